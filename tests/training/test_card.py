"""The model card tells how to load what lies beside it."""

from pathlib import Path
from typing import Any

import pytest

from rayrm.config.schema import RunConfig
from rayrm.training.card import write_card
from tests.builders import word_tokenizer


def card_of(folder: Path, model: dict[str, Any], *, is_adapter: bool) -> str:
    tokenizer = word_tokenizer()
    write_card(
        str(folder),
        RunConfig.model_validate({"model": model}),
        is_adapter=is_adapter,
        report=None,
        lines=[],
        metrics={},
        tokenizer=tokenizer,
        reward_moments=None,
        reload_difference=0.0,
    )
    return (folder / "README.md").read_text()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_base_of_few_bits_is_loaded_as_it_was_trained(dtype: str, tmp_path: Path) -> None:
    model = {"lora": {}, "quantization": "4bit", "dtype": dtype}
    card = card_of(tmp_path, model, is_adapter=True)
    assert "quantization_config=bits" in card
    assert f"bnb_4bit_compute_dtype='{dtype}'" in card
    assert "load_in_4bit=True,\n    bnb_4bit_quant_type='nf4'," in card


def test_a_model_that_was_merged_asks_for_no_quantization(tmp_path: Path) -> None:
    card = card_of(tmp_path, {"lora": {}, "quantization": "8bit"}, is_adapter=False)
    assert "BitsAndBytesConfig" not in card
    assert "quantization_config" not in card
