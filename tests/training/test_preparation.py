from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rayrm.config.schema import ModelSection, RunConfig, TrainSection
from rayrm.data.packing import PackedBatch, pack_pairs
from rayrm.data.plan import Cutting
from rayrm.data.tokenize import TokenizedPair
from rayrm.errors import RayrmError
from rayrm.model.build import build_reward_model
from rayrm.model.tokenizer import load_tokenizer
from rayrm.training.loop import Progress
from rayrm.training.preparation import (
    prove_layout,
    settle_memory,
    slow_dtype,
    unusual_learning_rate,
)
from tests.builders import pair_of, tiny_llama_folder, word_tokenizer

PAIRS = [pair_of([5, 6, 7, 8], [9, 10, 11], [12]), pair_of([20, 21], [22], [23, 24])]


class LocalEngine:
    """What preparation needs of an engine, on a tiny model, without DeepSpeed."""

    def __init__(self, folder: Path, *, bytes_to_come: int = 0, bytes_a_token: int = 1) -> None:
        section = ModelSection(name_or_path=str(folder), dtype="float32")
        self.model = build_reward_model(section, load_tokenizer(section), seed=1)
        self.cutting = Cutting(self.model.layout, 1)
        self.device = torch.device("cpu")
        self.bytes_to_come = bytes_to_come
        self.bytes_a_token = bytes_a_token
        self.is_checkpointing = False
        self.num_measured = 0

    def pack(self, pairs: Sequence[TokenizedPair]) -> PackedBatch:
        return pack_pairs(pairs, self.cutting.layout)

    def score(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        chosen, rejected = self.model(**batch.inputs).view(-1, 2).unbind(1)
        return chosen, rejected

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with torch.no_grad():
            yield

    def reduce_max(self, tensor: Tensor) -> Tensor:
        return tensor

    def measure_activations(self, batch: PackedBatch) -> int:
        self.num_measured += 1
        return 1_000 + self.bytes_a_token * batch.num_slots

    def enable_gradient_checkpointing(self) -> None:
        self.is_checkpointing = True


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a language model."""
    return tiny_llama_folder(tmp_path_factory.mktemp("llama"), word_tokenizer())


def settle(
    engine: LocalEngine, progress: Progress, *, tokens: Any = "auto", checkpointing: Any = "auto"
) -> tuple[int, bool]:
    config = RunConfig(
        train=TrainSection(max_tokens_per_micro_batch=tokens),
        model=ModelSection(dtype="float32", gradient_checkpointing=checkpointing),
    )
    some: Any = engine
    settle_memory(some, config, progress, longest_pair=100, workers_on_node=1)
    assert engine.is_checkpointing == progress.gradient_checkpointing
    assert engine.cutting == Cutting("shared_prompt", progress.max_tokens or 0)
    return engine.cutting.max_tokens, engine.is_checkpointing


def test_what_is_given_is_taken_and_nothing_is_measured(llama: Path):
    engine = LocalEngine(llama, bytes_to_come=10**15)
    assert settle(engine, Progress(), tokens=777, checkpointing=False) == (777, False)
    assert engine.num_measured == 0


def test_with_memory_to_spare_forwards_are_large_and_nothing_is_recomputed(llama: Path):
    assert settle(LocalEngine(llama), Progress()) == (65_536, False)


def test_without_memory_forwards_are_small_and_activations_are_recomputed(llama: Path):
    assert settle(LocalEngine(llama, bytes_to_come=10**15), Progress()) == (512, True)


def test_activations_are_recomputed_only_where_that_is_asked_for(llama: Path):
    engine = LocalEngine(llama, bytes_to_come=10**15)
    assert settle(engine, Progress(), checkpointing=False) == (512, False)
    assert settle(LocalEngine(llama), Progress(), checkpointing=True) == (65_536, True)


def test_many_tokens_in_a_forward_may_need_checkpointing(llama: Path):
    engine = LocalEngine(llama, bytes_a_token=10**6)
    assert settle(engine, Progress(), tokens=10**7) == (10**7, True)


def test_a_restart_takes_what_the_first_start_settled(llama: Path):
    progress = Progress()
    settle(LocalEngine(llama), progress)
    engine = LocalEngine(llama, bytes_to_come=10**15)
    assert settle(engine, progress) == (65_536, False)
    assert engine.num_measured == 0


def test_rewards_of_the_flat_row_are_proved_on_real_pairs(llama: Path):
    engine: Any = LocalEngine(llama)
    assert engine.cutting.layout == "shared_prompt"
    prove_layout(engine, Progress(), PAIRS, dtype="float32")
    prove_layout(engine, Progress(), [], dtype="float32")  # a rank without pairs


def test_a_flat_row_that_is_not_exact_stops_the_run_with_both_numbers(llama: Path):
    engine: Any = LocalEngine(llama)
    exact = engine.score(engine.pack(PAIRS))

    def pack_wrongly(pairs: Sequence[TokenizedPair]) -> PackedBatch:
        batch = pack_pairs(pairs, "shared_prompt")
        batch.inputs["position_ids"] *= 3
        return batch

    engine.pack = pack_wrongly
    with pytest.raises(RayrmError, match=r"train\.shared_prompt: off") as raised:
        prove_layout(engine, Progress(), PAIRS, dtype="float32")
    found = torch.tensor([float(x) for x in numbers_in(str(raised.value))]).view(2, -1, 2)
    torch.testing.assert_close(found[1], torch.stack(exact, 1).detach(), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found[0], found[1], atol=1e-3)


def test_a_restart_takes_the_proof_of_the_first_start_on_the_same_kind_of_machine(llama: Path):
    progress = Progress()
    engine: Any = LocalEngine(llama)
    prove_layout(engine, progress, PAIRS, dtype="float32")

    def score_wrongly(batch: PackedBatch) -> tuple[Tensor, Tensor]:
        raise AssertionError("compared again")

    engine.score = score_wrongly
    prove_layout(engine, progress, PAIRS, dtype="float32")
    progress.layout_proved_on = f"other {progress.layout_proved_on}"
    with pytest.raises(AssertionError, match="compared again"):
        prove_layout(engine, progress, PAIRS, dtype="float32")


def numbers_in(text: str) -> list[str]:
    words = text.replace("[", " ").replace("]", " ").replace(",", " ").split()
    return [word for word in words if word.lstrip("-")[:1].isdigit()]


def test_a_reward_that_is_no_number_is_a_difference(llama: Path):
    engine: Any = LocalEngine(llama)
    exact = engine.score

    def score_wrongly(batch: PackedBatch) -> tuple[Tensor, Tensor]:
        chosen, rejected = exact(batch)
        return (chosen * torch.nan if "segments" in batch.inputs else chosen), rejected

    engine.score = score_wrongly
    with pytest.raises(RayrmError, match="gives rewards"):
        prove_layout(engine, Progress(), PAIRS, dtype="float32")


@pytest.mark.parametrize(
    ("model", "rate", "num_parameters", "told"),
    [
        ({}, 1e-4, 7e9, "is high for training every weight of 7.0 billion"),
        ({}, 1e-5, 7e9, None),
        ({}, 1e-4, 1e8, None),
        ({"lora": {}}, 1e-4, 7e9, None),
        ({"lora": {}}, 1e-6, 7e9, "is low for adapters"),
    ],
)
def test_a_learning_rate_that_is_known_to_fail_is_told(
    model: dict[str, Any], rate: float, num_parameters: int, told: str | None
):
    config = RunConfig.model_validate({"model": model, "train": {"learning_rate": rate}})
    says = unusual_learning_rate(config, num_parameters)
    assert says is None if told is None else told in (says or "")


def test_a_type_that_the_machine_imitates_is_told():
    cpu = torch.device("cpu")
    assert slow_dtype("float32", cpu) is None
    assert slow_dtype("bfloat16", torch.device("cuda")) is None
    says = slow_dtype("bfloat16", cpu)
    assert (says is None) == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert says is None or "model.dtype=float32" in says
