"""Under ZeRO-3, on one worker and on two, flat rows give the gradients of padded rows."""

from pathlib import Path

import numpy as np
import pytest

from tests.builders import random_pairs, word_tokenizer
from tests.model.test_shared_prompt import ARCHITECTURES, LENGTHS, classifier_of
from tests.worlds import in_world

WITH_LORA = ["llama", "gemma2"]
"""Architectures that are tried with adapters too, and on one worker; test_shared_prompt has all."""

pytestmark = pytest.mark.deepspeed


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A one-label classifier of each architecture, with a tokenizer."""
    tokenizer = word_tokenizer()
    folder = tmp_path_factory.mktemp("architectures")
    for kind in ARCHITECTURES:
        place = folder / kind
        classifier_of(kind, vocab_size=len(tokenizer)).save_pretrained(place)
        tokenizer.save_pretrained(place)
    return {kind: str(folder / kind) for kind in ARCHITECTURES}


def compare(folders: dict[str, str]) -> dict[str, float]:
    """Return each architecture's largest difference of a gradient, as a share of the largest."""
    differences: dict[str, float] = {}
    for kind, folder in folders.items():
        for lora in (None, {"r": 4}) if kind in WITH_LORA else (None,):
            flat, padded = (step_gradients(folder, lora, setting) for setting in ("on", "off"))
            assert flat.keys() == padded.keys()
            assert any("score" in name for name in flat)
            scale = max(float(np.abs(gradient).max()) for gradient in padded.values())
            assert scale > 1e-4, (kind, scale)
            worst = max(float(np.abs(flat[name] - padded[name]).max()) for name in flat)
            differences[f"{kind}{', lora' if lora else ''}"] = worst / scale
    return differences


def step_gradients(folder: str, lora: dict[str, int] | None, setting: str) -> dict[str, np.ndarray]:
    """Return the whole gradient of every trained parameter after one step's backwards."""
    from deepspeed.utils import safe_get_full_grad

    from rayrm.config.schema import RunConfig
    from rayrm.data.plan import Cutting, PairLengths, plan_step
    from rayrm.model.tokenizer import load_tokenizer
    from rayrm.training.engine import Engine
    from rayrm.training.loop import pair_losses

    config = RunConfig.model_validate(
        {
            "model": {"name_or_path": folder, "dtype": "float32", "lora": lora},
            "loss": {"center_rewards_coefficient": 0.1},
            "train": {"shared_prompt": setting, "max_grad_norm": 0},
        }
    )
    engine = Engine(config, load_tokenizer(config.model), num_steps=1)
    if lora is None:
        engine.enable_gradient_checkpointing()
    engine.cutting = Cutting(engine.cutting.layout, 100)
    rng = np.random.default_rng(0)
    pairs = random_pairs(rng, LENGTHS)
    lengths = PairLengths.of(pairs)
    plan = plan_step(lengths, engine.cutting, num_ranks=engine.world_size)[engine.rank]
    for positions in plan:
        batch = engine.pack([pairs[position] for position in positions])
        losses = pair_losses(*engine.score(batch), batch, config.loss)
        engine.backward(losses.sum() / len(pairs), ends_step=False)
    gradients = {
        name: safe_get_full_grad(parameter)
        for name, parameter in engine.model.classifier.named_parameters()
        if parameter.requires_grad
    }
    return {name: grad.numpy() for name, grad in gradients.items() if grad is not None}


@pytest.mark.parametrize(
    ("num_workers", "kinds"),
    [
        pytest.param(1, WITH_LORA, id="1", marks=pytest.mark.slow),
        pytest.param(2, list(ARCHITECTURES), id="2"),
    ],
)
def test_gradients_under_zero_3_are_those_of_padded_rows(
    num_workers: int,
    kinds: list[str],
    folders: dict[str, str],
    tmp_path: Path,
) -> None:
    chosen = {kind: folders[kind] for kind in kinds}
    differences = in_world(compare, chosen, num_ranks=num_workers, folder=tmp_path)
    assert len(differences) == len(kinds) + len(WITH_LORA)
    assert max(differences.values()) < 1e-5, differences
