"""Whatever is trained under ZeRO-3 scores the same through plain libraries in another process."""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayrm.config.schema import RunConfig
from rayrm.training.convert import convert
from tests.builders import (
    random_pairs,
    tiny_llama_folder,
    with_other_template,
    word_tokenizer,
)
from tests.worlds import export_trained, in_world, proof_of, start_engine

pytestmark = pytest.mark.deepspeed

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
TRAINED: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": LORA},
    "all-linear": {"lora": {"r": 4}},
    "dora": {"lora": {**LORA, "use_dora": True}},
    "rslora": {"lora": {**LORA, "use_rslora": True}},
    "continued": {"adapter_path": "all-linear"},
    "stacked": {"adapter_path": "dora", "lora": LORA},
    "loha": {"peft": {"peft_type": "LOHA", "r": 2, "target_modules": ["q_proj", "down_proj"]}},
    "vera": {"peft": {"peft_type": "VERA", "r": 4, "target_modules": ["q_proj", "o_proj"]}},
    "new tokens": {"chat_template_path": "template", "lora": LORA},
    "norms": {"peft": {"peft_type": "LN_TUNING", "target_modules": ["input_layernorm"]}},
}
"""What of the model is trained; an adapter goes on from the case that it names."""
BASES = [f"{ties}, {pad}" for ties, pad in product(("tied", "untied"), ("pad is eos", "own pad"))]

SCORE_PLAINLY = """
import json, sys, torch
from peft import AutoPeftModelForSequenceClassification
from transformers import AutoModelForSequenceClassification

job = json.load(sys.stdin)
rewards = {}
for name, (folder, texts, pad) in job.items():
    is_adapter = not name.endswith("merged") and "full" not in name
    plain, adapted = AutoModelForSequenceClassification, AutoPeftModelForSequenceClassification
    model = (adapted if is_adapter else plain).from_pretrained(folder, dtype=torch.float32).eval()
    width = max(map(len, texts))
    input_ids = torch.tensor([text + [pad] * (width - len(text)) for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in texts])
    with torch.no_grad():
        rewards[name] = {
            "padded": model(input_ids=input_ids, attention_mask=mask).logits[:, 0].tolist(),
            "single": [model(input_ids=torch.tensor([text])).logits[0].item() for text in texts],
        }
print(json.dumps(rewards))
"""


def train_and_export(job: dict[str, Any]) -> dict[str, Any]:
    """Train each case a little, export it, and return its texts, their rewards and its padding."""
    return {
        f"{base}, {trained}": _train_one(Path(job["folder"]), base, trained)
        for base in job["bases"]
        for trained in TRAINED
    }


def _train_one(place: Path, base: str, trained: str) -> dict[str, Any]:
    from rayrm.training.loop import pair_losses

    options = dict(TRAINED[trained])
    if "adapter_path" in options:
        options["adapter_path"] = str(place / f"{base}, {options['adapter_path']}")
    if "chat_template_path" in options:
        options["chat_template_path"] = str(place / options["chat_template_path"])
    section = {"name_or_path": str(place / base), "dtype": "float32", **options}
    config = RunConfig.model_validate({"model": section, "train": {"learning_rate": 3e-2}})
    engine, tokenizer = start_engine(config, num_steps=4)
    assert all(module.training for module in engine.model.modules())
    rng = np.random.default_rng(engine.rank)
    pairs = random_pairs(rng, (rng.integers(1, 12, 3) for _ in range(3)), below=len(tokenizer))
    before = proof_of(engine, pairs)
    for _ in range(2):
        batch = engine.pack(pairs)
        loss = pair_losses(*engine.score(batch), batch, config.loss).sum() / 6
        engine.backward(loss, ends_step=True)
    proof = proof_of(engine, pairs)
    export_trained(engine, tokenizer, config.model, place / f"{base}, {trained}", proof)
    return {
        "texts": [text.tolist() for text in proof.texts],
        "before": before.rewards.tolist(),
        "rewards": proof.rewards.tolist(),
        "pad": tokenizer.convert_tokens_to_ids(str(tokenizer.pad_token)),
    }


@pytest.mark.parametrize(
    ("num_ranks", "bases"),
    [
        pytest.param(2, [BASES[0], BASES[3]], id="2"),
        pytest.param(2, [BASES[1], BASES[2]], id="2, other bases", marks=pytest.mark.slow),
        pytest.param(1, BASES, id="1", marks=pytest.mark.slow),
    ],
)
def test_trained_reloaded_and_merged_rewards_are_one(
    num_ranks: int, bases: list[str], tmp_path: Path
) -> None:
    for base in bases:
        tokenizer = word_tokenizer(pad_token="<eos>" if "pad is eos" in base else "<pad>")
        tiny_llama_folder(tmp_path / base, tokenizer, tied=base.startswith("tied"))
    with_other_template(tmp_path / "template")
    work = {"folder": str(tmp_path), "bases": bases}
    trained = in_world(train_and_export, work, num_ranks=num_ranks, folder=tmp_path)
    job: dict[str, Any] = {}
    for name, case in trained.items():
        job[name] = (str(tmp_path / name), case["texts"], case["pad"])
        if "full" not in name:
            merged = str(tmp_path / f"{name}, merged")
            assert convert(str(tmp_path / name), merged, merge=True) < 1e-4
            job[f"{name}, merged"] = (merged, case["texts"], case["pad"])
    done = subprocess.run(
        [sys.executable, "-c", SCORE_PLAINLY],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=True,
    )
    for base, (name, options) in product(bases, TRAINED.items()):
        case = trained[f"{base}, {name}"]
        assert case["before"] != pytest.approx(case["rewards"], abs=1e-3), name  # it was trained
        if "adapter_path" in options:
            left = trained[f"{base}, {options['adapter_path']}"]["rewards"]
            assert case["before"] == pytest.approx(left, rel=1e-5, abs=1e-5), name
    for name, rewards in json.loads(done.stdout.splitlines()[-1]).items():
        expected = trained[name.removesuffix(", merged")]["rewards"]
        assert len(set(expected)) == len(expected), name
        for how, found in rewards.items():
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-5), (name, how)
