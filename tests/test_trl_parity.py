"""rayrm and TRL, given the same weights, pairs and settings, take the same optimizer steps."""

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import rayrm
from rayrm.config.schema import ModelSection
from rayrm.data.formats import parse_line
from rayrm.data.packing import pack_pairs
from rayrm.data.tokenize import PairTokenizer, TokenizedPair
from rayrm.model.build import build_reward_model
from rayrm.model.tokenizer import load_tokenizer
from tests.builders import tiny_llama_folder, word_tokenizer

pytestmark = [
    pytest.mark.ray,
    pytest.mark.deepspeed,
    pytest.mark.timeout(600),  # TRL's two runs and one of ours count to the first test
    pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed"),
]

NUM_STEPS = 20
PAIRS_A_STEP = 8
LEARNING_RATE = 1e-3
HARDER = (
    "loss.center_rewards_coefficient=0.05",
    "train.lr_scheduler_type=cosine",
    "train.warmup_ratio=0.2",
    "train.weight_decay=0.1",
    "train.max_grad_norm=0.5",
)
"""The overrides that go with TRL's settings of the run with margins."""
WORDS = ("Blue", "Red.", "seven pears", "an apple", "a colour", "not at all", "ultramarine")

Log = list[dict[str, float]]


def plain_pairs() -> list[dict[str, Any]]:
    """Text pairs whose sides have from two words to some forty."""
    rng = random.Random(0)
    return [
        {
            "prompt": "Question: " + " ".join(rng.choices(WORDS, k=rng.randint(1, 12))),
            "chosen": f" Answer: {number}, " + " ".join(rng.choices(WORDS, k=rng.randint(1, 20))),
            "rejected": f" Answer: {number}! " + " ".join(rng.choices(WORDS, k=rng.randint(1, 20))),
        }
        for number in range(NUM_STEPS * PAIRS_A_STEP)
    ]


def pairs_with_margins() -> list[dict[str, Any]]:
    rng = random.Random(1)
    return [pair | {"margin": rng.choice([0.0, 0.5, 1.25])} for pair in plain_pairs()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny one-label classifier, whose head is thereby the same on both sides, and the pairs."""
    folder = tmp_path_factory.mktemp("parity")
    tiny_llama_folder(
        folder / "model", word_tokenizer(adds="bos", chat_template=None), num_labels=1
    )
    for name, pairs in (("plain", plain_pairs()), ("margins", pairs_with_margins())):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return folder


@pytest.fixture(scope="module")
def trl_logs(folder: Path) -> dict[str, Log]:
    """What TRL logs, by the name of the pairs."""
    common = {
        "per_device_train_batch_size": PAIRS_A_STEP,
        "learning_rate": LEARNING_RATE,
        "num_train_epochs": 1,
    }
    harder = {
        "center_rewards_coefficient": 0.05,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 4,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
    }
    runs = {
        "plain": {"pairs": str(folder / "plain.jsonl"), "settings": common},
        "margins": {"pairs": str(folder / "margins.jsonl"), "settings": common | harder},
        "saved": {
            "pairs": str(folder / "plain.jsonl"),
            "settings": common | {"max_steps": 2},
            "save": str(folder / "saved"),
        },
    }
    (folder / "runs.json").write_text(json.dumps(runs))
    script = Path(__file__).with_name("trl_reference.py")
    files = [folder / "model", folder / "runs.json", folder / "logs.json"]
    subprocess.run([sys.executable, script, *files], check=True, timeout=240)
    return json.loads((folder / "logs.json").read_text())


def train_with_rayrm(
    folder: Path,
    *,
    pairs: str,
    model: str = "model",
    max_tokens: int = 8192,
    overrides: Sequence[str] = (),
) -> Log:
    """Return rayrm's metrics, a line a step."""
    config = {
        "run": {"output_dir": str(folder), "name": f"{model}-{pairs}"},
        "model": {"name_or_path": str(folder / model), "dtype": "float32"},
        "data": {"train": str(folder / f"{pairs}.jsonl"), "shuffle": False},
        "train": {
            "batch_size": PAIRS_A_STEP,
            "learning_rate": LEARNING_RATE,
            "max_tokens_per_micro_batch": max_tokens,
            "logging_steps": 1,
            "save_steps": None,
        },
        "tracking": {"wandb": None},
    }
    result = rayrm.fit(config, overrides)
    lines = (Path(result.run_dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def assert_same_steps(ours: Log, theirs: Log) -> None:
    """Losses, gradients and the metrics of TRL's names agree at every step."""
    assert len(ours) == len(theirs) == NUM_STEPS
    for name in ("loss", "accuracy", "margin", "min_reward", "mean_reward", "max_reward"):
        expected = [line[name] for line in theirs]
        assert [line[name] for line in ours] == pytest.approx(expected, rel=0, abs=1e-4), name
    for name in ("grad_norm", "learning_rate"):
        expected = [line[name] for line in theirs]
        assert [line[name] for line in ours] == pytest.approx(expected, rel=1e-3), name


def test_plain_pairs(ray_session: Any, folder: Path, trl_logs: dict[str, Log]):
    assert_same_steps(train_with_rayrm(folder, pairs="plain"), trl_logs["plain"])


def test_margins_and_centering_under_clipping_decay_and_a_warm_cosine_in_several_forwards(
    ray_session: Any, folder: Path, trl_logs: dict[str, Log]
):
    ours = train_with_rayrm(folder, pairs="margins", max_tokens=400, overrides=HARDER)
    assert ours[0]["num_tokens"] > 400  # too many for one forward
    assert_same_steps(ours, trl_logs["margins"])


def test_what_trl_trained_begins_with_its_rewards_and_goes_on(
    ray_session: Any, folder: Path, trl_logs: dict[str, Log]
):
    theirs: list[list[float]] = json.loads((folder / "saved" / "rewards.json").read_text())
    section = ModelSection(name_or_path=str(folder / "saved"), dtype="float32")
    tokenizer = load_tokenizer(section)
    model = build_reward_model(section, tokenizer, seed=0, shared_prompt="on").eval()
    lines = (folder / "plain.jsonl").read_text().splitlines()
    pairs = PairTokenizer(tokenizer, max_length=1024).tokenize([parse_line(x, {}) for x in lines])
    tokenized = [pair for pair in pairs if isinstance(pair, TokenizedPair)]
    with torch.no_grad():
        rewards = model(**pack_pairs(tokenized, model.layout).inputs)
    torch.testing.assert_close(rewards.view(-1, 2), torch.tensor(theirs), rtol=0, atol=1e-5)

    ours = train_with_rayrm(folder, pairs="plain", model="saved", overrides=["train.max_steps=1"])
    first = torch.tensor(theirs[:PAIRS_A_STEP])
    expected = {
        "min_reward": first.min(),
        "mean_reward": first.mean(),
        "max_reward": first.max(),
        "margin": (first[:, 0] - first[:, 1]).mean(),
    }
    assert {name: ours[0][name] for name in expected} == pytest.approx(
        {name: value.item() for name, value in expected.items()}, rel=0, abs=1e-5
    )
