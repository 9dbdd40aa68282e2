"""Under every ZeRO stage, what was saved on two ranks goes on, on two and on three."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.builders import random_pairs, tiny_llama_folder, word_tokenizer
from tests.worlds import in_world

pytestmark = pytest.mark.deepspeed

LORA = "stage 3, lora, bfloat16"
CASES: dict[str, dict[str, Any]] = {
    "stage 3": {"zero": {"stage": 3}, "model": {"dtype": "float32"}},
    LORA: {
        "zero": {"stage": 3},
        "model": {"dtype": "bfloat16", "lora": {"r": 3, "lora_dropout": 0.1}},
    },
    "stage 2, bfloat16": {"zero": {"stage": 2}, "model": {"dtype": "bfloat16"}},
    "stage 1": {"zero": {"stage": 1}, "model": {"dtype": "float32"}},
    "stage 0": {"zero": {"stage": 0}, "model": {"dtype": "float32"}},
}
FOREIGN = [("stage 3", LORA), (LORA, "stage 3"), ("stage 0", "nothing")]
"""A model, and the checkpoint that it is to load."""
FLIPPED = [("stage 3", "flipped")]
SAVED_AT, NUM_STEPS = 2, 5


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Return each case's losses, in the ways that are asked for, and what is told of the refused.

    Ways are from the start (false), or resumed (true).
    """
    place = Path(job["folder"])
    losses = {
        name: [losses_of(case, place / name, resume=resume) for resume in job["resume"]]
        for name, case in CASES.items()
    }
    refused = [told_of(model, checkpoint, place) for model, checkpoint in job["refused"]]
    return {"losses": losses, "refused": refused}


def flip_a_bit(checkpoint: Path, copy: Path) -> str:
    """Copy a checkpoint with one bit of a weight turned, which changes no size; return its name."""
    shutil.copytree(checkpoint, copy)
    for path in copy.glob("state-*.safetensors"):
        content = bytearray(path.read_bytes())
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        weights = [name for name in header if name.startswith("weight.")]
        if weights:
            content[8 + length + header[weights[0]]["data_offsets"][0]] ^= 1
            path.write_bytes(content)
            return weights[0]
    raise AssertionError("there is no weight")


def told_of(model: str, checkpoint: str, place: Path) -> str:
    """Return the error of loading one case's checkpoint into the model of another."""
    from rayrm.errors import CheckpointError

    with pytest.raises(CheckpointError) as error:
        losses_of(CASES[model], place / checkpoint, resume=True)
    return str(error.value)


def losses_of(case: dict[str, Any], checkpoint: Path, *, resume: bool) -> list[float]:
    from rayrm.config.schema import RunConfig
    from rayrm.data.plan import Cutting, PairLengths, plan_step
    from rayrm.model.tokenizer import load_tokenizer
    from rayrm.training.engine import Engine
    from rayrm.training.loop import pair_losses

    model = {"name_or_path": str(checkpoint.parent / "model"), **case["model"]}
    train = {"learning_rate": 1e-2, "warmup_ratio": 0.4}
    config = RunConfig.model_validate({"model": model, "zero": case["zero"], "train": train})
    engine = Engine(config, load_tokenizer(config.model), num_steps=NUM_STEPS)
    engine.leave_zero()  # the next case's model may be under another stage
    engine.cutting = Cutting(engine.cutting.layout, 60)
    os.makedirs(checkpoint, exist_ok=True)
    if resume:
        engine.load(str(checkpoint), world_size=2)
    losses: list[float] = []
    for step in range(SAVED_AT if resume else 0, NUM_STEPS):
        if step == SAVED_AT and not resume:
            engine.save(str(checkpoint))
        rng = np.random.default_rng(step)
        sizes = rng.integers(1, 12, (6, 3))
        pairs = random_pairs(rng, sizes)
        plan = plan_step(PairLengths.of(pairs), engine.cutting, num_ranks=engine.world_size)
        total = 0.0
        mine = plan[engine.rank]
        for index, positions in enumerate(mine):
            batch = engine.pack([pairs[position] for position in positions])
            loss = pair_losses(*engine.score(batch), batch, config.loss).sum() / len(pairs)
            engine.backward(loss, ends_step=index == len(mine) - 1)
            total += float(loss)
        losses.append(sum(engine.gather_objects(total)))
    return losses


def test_losses_go_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    tiny_llama_folder(tmp_path / "model", word_tokenizer())  # no size of it is divided by three
    job = {"folder": str(tmp_path), "resume": [False, True], "refused": FOREIGN}
    on_two = in_world(train, job, num_ranks=2, folder=tmp_path)
    turned = flip_a_bit(tmp_path / "stage 3", tmp_path / "flipped")
    on_three = in_world(
        train, job | {"resume": [True], "refused": FLIPPED}, num_ranks=3, folder=tmp_path
    )
    for name, (undisturbed, resumed) in on_two["losses"].items():
        expected = undisturbed[SAVED_AT:]
        assert expected[-1] != expected[0]
        assert resumed == expected, name  # bit by bit, dropout included
        if "dropout" not in str(CASES[name]):
            tolerance = 2e-2 if "bfloat16" in name else 1e-5
            found = on_three["losses"][name][0]
            assert found == pytest.approx(expected, rel=tolerance, abs=tolerance), name
    lora, full, nothing = on_two["refused"]
    assert "is missing, and [" in lora
    assert "of another model; give another run.name" in lora
    assert "is missing, and [" in full
    assert "cannot be read" in nothing
    (flipped,) = on_three["refused"]
    assert f"{turned} is not as it was saved" in flipped
    assert "remove this checkpoint to go on from the one before" in flipped
