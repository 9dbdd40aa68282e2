"""The folder of a model is proved with plain libraries."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayrm.config.schema import LoraSection, ModelSection
from rayrm.data.packing import pack_pairs
from rayrm.errors import CheckpointError
from rayrm.model.build import build_reward_model
from rayrm.model.tokenizer import load_tokenizer
from rayrm.training.export import Proof, prove_export
from tests.builders import (
    pair_of,
    tiny_bert_folder,
    tiny_gpt2_folder,
    tiny_jamba_folder,
    tiny_llama_folder,
    word_tokenizer,
)

PAIRS = [pair_of([10, 11, 12], [13, 14, 15, 16, 17, 18], [19]), pair_of([20], [21, 22], [23])]
FAMILIES = [tiny_llama_folder, tiny_gpt2_folder, tiny_bert_folder, tiny_jamba_folder]


def saved_with_proof(
    make_folder: Callable[..., Path], tmp_path: Path, **options: Any
) -> tuple[dict[str, Any], Callable[..., float]]:
    """Save a reward model; return the arguments of its proof, and the proof."""
    base = make_folder(tmp_path / "base", word_tokenizer())
    section = ModelSection(name_or_path=str(base), dtype="float32", **options)
    tokenizer = load_tokenizer(section)
    model = build_reward_model(section, tokenizer, seed=1).eval()
    with torch.no_grad():
        rewards = model(**pack_pairs(PAIRS, model.layout).inputs)
    texts: list[np.ndarray] = []
    for pair in PAIRS:
        for reply in (pair.chosen_ids, pair.rejected_ids):
            texts.append(np.concatenate([pair.prompt_ids, reply]))
    folder = tmp_path / "saved"
    classifier: Any = model.classifier
    classifier.save_pretrained(folder)
    classifier.config.save_pretrained(folder)  # an adapter's folder tells of its base
    arguments = {
        "folder": str(folder),
        "model": section,
        "proof": Proof(texts, rewards),
        "pad_token_id": tokenizer.convert_tokens_to_ids(str(tokenizer.pad_token)),
        "padding_sides": model.padding_sides,
    }
    return arguments, prove_export


@pytest.mark.parametrize("make_folder", FAMILIES, ids=["llama", "gpt2", "bert", "jamba"])
def test_every_family_reloads_with_its_rewards_wherever_it_may_be_padded(
    make_folder: Callable[..., Path], tmp_path: Path
) -> None:
    arguments, prove = saved_with_proof(make_folder, tmp_path)
    assert prove(**arguments) < 1e-5


def test_padding_moves_no_reward_of_an_adapter_with_learned_positions(tmp_path: Path) -> None:
    arguments, prove = saved_with_proof(tiny_gpt2_folder, tmp_path, lora=LoraSection(r=2))
    assert arguments["padding_sides"] == ("right", "left")
    assert prove(**arguments) < 1e-5


def test_a_padding_that_the_model_takes_for_text_is_told(tmp_path: Path) -> None:
    arguments, prove = saved_with_proof(tiny_llama_folder, tmp_path)
    with pytest.raises(CheckpointError, match=r"right-padded.*not to be trusted"):
        prove(**arguments | {"pad_token_id": 9})


def test_a_model_that_scores_otherwise_is_told_with_both_numbers(tmp_path: Path) -> None:
    arguments, prove = saved_with_proof(tiny_llama_folder, tmp_path)
    proof = arguments["proof"]
    moved = Proof(proof.texts, proof.rewards + 0.5)
    with pytest.raises(CheckpointError, match=r"saved model scores \[.*the trained one \["):
        prove(**arguments | {"proof": moved})
