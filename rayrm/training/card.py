"""The model card: ``README.md`` in the model's folder, with a picture of the training."""

import json
import re
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from transformers import PreTrainedTokenizerBase

from rayrm.config.schema import ModelSection, RunConfig
from rayrm.model.quantize import quantization_arguments
from rayrm.model.tokenizer import pad_token_id
from rayrm.training.curves import draw_curves

CARD = "README.md"
CURVES = "curves.png"

_PACKAGES = ("torch", "transformers", "peft", "ray", "deepspeed", "accelerate")


def write_card(
    folder: str,
    config: RunConfig,
    *,
    is_adapter: bool,
    report: dict[str, Any] | None,
    lines: Sequence[dict[str, Any]],
    metrics: dict[str, float],
    tokenizer: PreTrainedTokenizerBase,
    reward_moments: tuple[float, float] | None,
    reload_difference: float,
) -> None:
    """Write what the model in ``folder`` is, how and on what it was trained, how well, how to load.

    Args:
        folder: of the model.
        config: of its run.
        is_adapter: whether the folder holds an adapter.
        report: ``data_report.json``, if there is one.
        lines: of ``metrics.jsonl``; drawn, where there are some.
        metrics: the final ones.
        tokenizer: whose padding the model has.
        reward_moments: mean and standard deviation of training rewards, if they were taken.
        reload_difference: what the proof of the export found.
    """
    if lines:
        draw_curves(lines, f"{folder}/{CURVES}")
    library = "peft" if is_adapter else "transformers"
    card = f"""---
library_name: {library}
base_model: {json.dumps(config.model.name_or_path)}
pipeline_tag: text-classification
tags: [reward-model, rayrm]
---

# {config.run.name}

A reward model: one number for a text or conversation, higher where people would prefer it. Trained
by rayrm from `{config.model.name_or_path}` on preference pairs (Bradley-Terry). Only differences
between rewards of replies to one prompt have a meaning.

{_loading(library, pad_token_id(tokenizer), config.model)}
Plain text, without a chat template, ends with the EOS token. Padding is `{tokenizer.pad_token}`.
After the export the folder was loaded again and real pairs were scored singly and padded: the
largest difference to the trained model was {reload_difference:.2g}.
{_normalising(reward_moments)}
## Results
{_picture(lines)}
{_table(("metric", "value"), [(k, f"{v:.4g}") for k, v in sorted(metrics.items())])}

## Data

{_table(("source", "rows", "pairs", "dropped"), _data_rows(report or {"sources": {}}))}

## Configuration

```json
{json.dumps(config.model_dump(mode="json"), indent=2)}
```

## Versions

{_table(("package", "version"), [(name, version(name)) for name in ("rayrm", *_PACKAGES)])}
"""
    with open(f"{folder}/{CARD}", "w", encoding="utf-8") as file:
        file.write(card)


def card_of_merged(card: str) -> str:
    """Return the card of an adapter as that of the whole model which it was merged into."""
    card = card.replace("library_name: peft\n", "library_name: transformers\n", 1)
    example = re.compile(r"^## Load\n.*?^```\n(?=\n)", re.MULTILINE | re.DOTALL)
    return example.sub(lambda _: _loading("transformers"), card, count=1)


def _loading(library: str, pad_id: int | None = None, model: ModelSection | None = None) -> str:
    is_adapter = library == "peft"
    auto_class = f"Auto{'Peft' if is_adapter else ''}ModelForSequenceClassification"
    # a base of the hub has a language model's labels and padding
    extra = f", num_labels=1, pad_token_id={pad_id}" if is_adapter else ""
    bits = ""
    if is_adapter and model is not None and model.quantization is not None:
        given = quantization_arguments(model).items()
        arguments = "".join(f"    {name}={value!r},\n" for name, value in given)
        extra += ", quantization_config=bits"
        bits = f"""from transformers import BitsAndBytesConfig

# as in training: with a base of more bits the rewards are a little different
bits = BitsAndBytesConfig(
{arguments})
"""
    return f"""## Load

```python
from {library} import {auto_class}
from transformers import AutoTokenizer
{bits}
model = {auto_class}.from_pretrained(FOLDER{extra})
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
text = tokenizer.apply_chat_template(conversation, tokenize=False)
inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
reward = model(**inputs).logits[0].item()
```
"""


def _normalising(reward_moments: tuple[float, float] | None) -> str:
    if reward_moments is None:
        return ""
    mean, std = reward_moments
    return f"""
Rewards of the last training pairs have the mean {mean:.4g} and the standard deviation {std:.4g}
(`reward_mean` and `reward_std` in `config.json`): for those who need rewards near zero.
"""


def _picture(lines: Sequence[dict[str, Any]]) -> str:
    return f"\n![Loss and accuracy over the steps]({CURVES})\n" if lines else ""


def _data_rows(report: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (label, source["rows"], source["pairs"],
         ", ".join(f"{n} {reason}" for reason, n in source["dropped"].items()) or "none")
        for label, source in report["sources"].items()
    ]  # fmt: skip


def _table(header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
