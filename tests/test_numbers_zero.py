"""A step whose gradient is not finite, on one rank only, is left out by all, under every stage."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.builders import pair_of, tiny_llama_folder, word_tokenizer
from tests.worlds import in_world

pytestmark = pytest.mark.deepspeed

CASES = [(stage, "float32", None) for stage in range(4)] + [(3, "bfloat16", {"r": 2})]
BAD = {2: float("nan"), 3: float("inf"), 4: float("-inf")}
"""What the second rank's loss is multiplied by, by step."""
NUM_STEPS = 6
BAD_TOKEN = 90
"""Its embedding is NaN."""


def take_steps(job: dict[str, Any]) -> list[list[dict[str, Any]]]:
    return [steps_of(job["model"], *case) for case in CASES]


def steps_of(model: str, stage: int, dtype: str, lora: Any) -> list[dict[str, Any]]:
    from rayrm.config.schema import RunConfig
    from rayrm.model.tokenizer import load_tokenizer
    from rayrm.training.engine import Engine
    from rayrm.training.loop import pair_losses

    config = RunConfig.model_validate(
        {
            "model": {"name_or_path": model, "dtype": dtype, "lora": lora},
            "zero": {"stage": stage},
            "train": {"learning_rate": 1e-2},
        }
    )
    engine = Engine(config, load_tokenizer(config.model), num_steps=NUM_STEPS)
    engine.leave_zero()
    engine.measure_activations(engine.pack([pair_of([BAD_TOKEN], [30], [40])]))  # leaves nothing
    taken: list[dict[str, Any]] = []
    before = engine.gather_state(trained_only=True)
    for step in range(NUM_STEPS):
        batch = engine.pack([pair_of([20 + engine.rank], [30, 31], [40])])
        loss = pair_losses(*engine.score(batch), batch, config.loss).sum() / engine.world_size
        factor = BAD.get(step, 1.0) if engine.rank == 1 else 1.0
        rate = engine.learning_rate
        engine.backward(loss * factor, ends_step=True)
        after = engine.gather_state(trained_only=True)
        taken.append(
            {
                "applied": engine.gather_objects(engine.step_was_applied),
                "rate": rate,
                "moved": any(
                    not torch.equal(before[name].nan_to_num(), after[name].nan_to_num())
                    for name in after
                ),
                "finite": all(
                    bool(torch.isfinite(weight).all())
                    for name, weight in after.items()
                    if "embed" not in name
                ),
            }
        )
        before = after
    return taken


def test_no_rank_takes_a_step_that_one_cannot(tmp_path: Path) -> None:
    model = tiny_llama_folder(tmp_path / "model", word_tokenizer())
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][BAD_TOKEN] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    found = in_world(take_steps, {"model": str(model)}, num_ranks=2, folder=tmp_path)
    for case, steps in zip(CASES, found, strict=True):
        for step, taken in enumerate(steps):
            is_good = step not in BAD
            assert taken["applied"] == [is_good, is_good], (case, step)
            assert taken["moved"] is is_good, (case, step)
            assert taken["finite"], (case, step)
        rates = [taken["rate"] for taken in steps]
        assert rates[2] == rates[3] == rates[4] == rates[5] != rates[1]  # the schedule waits, too
