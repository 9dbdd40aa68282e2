"""What a rank holds between steps is what ZeRO promises."""

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayrm.config.schema import RunConfig
from rayrm.training.zero import state_bytes
from tests.builders import random_pairs, tiny_llama_folder, word_tokenizer
from tests.worlds import in_world, start_engine

pytestmark = pytest.mark.deepspeed

CASES: dict[str, dict[str, Any]] = {
    "full, bfloat16, ZeRO-3": {},
    "full, float32, ZeRO-3": {},
    "lora, bfloat16, ZeRO-3": {"lora": {"r": 32}},
}


def hold(job: dict[str, Any]) -> dict[str, Any]:
    return {name: _train_one(job["model"], name) for name in CASES}


def _train_one(model: str, name: str) -> dict[str, float]:
    import torch

    _, dtype, stage = name.split(", ")
    small = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 10_000}
    before = live_bytes()
    config = RunConfig.model_validate(
        {
            "model": {"name_or_path": model, "dtype": dtype, **CASES[name]},
            # else weights of these sizes would be held whole by each rank, and buffers outdo them
            "zero": {"extra": {"zero_optimization": small}},
        }
    )
    engine, _ = start_engine(config, num_steps=4)
    rng = np.random.default_rng(engine.rank)
    pairs = random_pairs(rng, (rng.integers(1, 12, 3) for _ in range(3)))
    for _ in range(2):
        engine.backward(torch.cat(engine.score(engine.pack(pairs))).sum() / 6, ends_step=True)
    held = live_bytes() - before
    trained, total = engine.num_parameters()
    stage, world_size = int(stage[-1]), engine.world_size
    wanted = state_bytes(total, trained, stage=stage, dtype=dtype, world_size=world_size)
    states = sum(
        value.untyped_storage().nbytes()
        for values in engine._engine.optimizer.optimizer.state.values()
        for value in values.values()
        if isinstance(value, torch.Tensor)
    )
    return {"held": held, "wanted": wanted.total, "moments": states, "trained": trained}


def live_bytes() -> int:
    """Return the bytes of all tensors of this process, each storage once."""
    import torch

    gc.collect()
    sizes: dict[int, int] = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_rank_holds_its_share_of_parameters_gradients_and_optimizer(
    num_ranks: int, tmp_path: Path
) -> None:
    folder = tiny_llama_folder(tmp_path / "model", word_tokenizer(), hidden_size=256)
    found = in_world(hold, {"model": str(folder)}, num_ranks=num_ranks, folder=tmp_path)
    for name, bytes_of in found.items():
        assert bytes_of["held"] == pytest.approx(bytes_of["wanted"], rel=0.15), name
        moments = 8 * bytes_of["trained"] / num_ranks
        assert bytes_of["moments"] == pytest.approx(moments, rel=0.01), name
