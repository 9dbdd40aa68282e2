"""A run from end to end on two workers: dirty rows in, a model that anyone loads out."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.wandb_file import read_wandb_file

pytestmark = [pytest.mark.ray, pytest.mark.deepspeed]

COLOURS = ["red", "blue", "green", "black", "white", "grey", "pink", "brown", "gold"]


def good_row(number: int) -> dict[str, Any]:
    colour = COLOURS[number % len(COLOURS)]
    return {
        "prompt": [{"role": "user", "content": f"Name a colour, number {number}."}],
        "chosen": [{"role": "assistant", "content": f"It is {colour}." + " Yes." * (number % 5)}],
        "rejected": [{"role": "assistant", "content": f"Seven {number}."}],
    }


BAD_LINES = {
    "not json": ("unparsable", '{"prompt": "a", "chosen": '),
    "json true": ("unparsable", "true"),
    "not utf-8": ("unparsable", b'{"prompt": "a", "chosen": "\xff\xfe", "rejected": "b"}'),
    "no rejected": ("missing_field", '{"prompt": "a", "chosen": "b"}'),
    "nothing known": ("missing_field", '{"question": "a", "answer": "b"}'),
    "chosen null": ("wrong_type", '{"prompt": "a", "chosen": null, "rejected": "b"}'),
    "chosen number": ("wrong_type", '{"prompt": "a", "chosen": 42, "rejected": "b"}'),
    "chosen boolean": ("wrong_type", '{"prompt": "a", "chosen": true, "rejected": "b"}'),
    "empty reply": ("empty_response", '{"prompt": "a", "chosen": "", "rejected": "b"}'),
    "blank reply": ("empty_response", '{"prompt": "a", "chosen": "b", "rejected": " \\n"}'),
    "no messages": (
        "empty_response",
        '{"prompt": "a", "chosen": [], "rejected": [{"role": "assistant", "content": "b"}]}',
    ),
    "same replies": ("identical_pair", '{"prompt": "a", "chosen": "b", "rejected": "b"}'),
    "same but for space": ("identical_pair", '{"prompt": "a", "chosen": "b", "rejected": "b "}'),
    "nan margin": ("bad_margin", '{"prompt": "a", "chosen": "b", "rejected": "c", "margin": NaN}'),
    "text margin": (
        "bad_margin",
        '{"prompt": "a", "chosen": "b", "rejected": "c", "margin": "0.5"}',
    ),
    "two prompts": (
        "different_prompt",
        '{"chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],'
        ' "rejected": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "c"}]}',
    ),
    "too long": (
        "too_long",
        json.dumps({"prompt": "a", "chosen": "word " * 400, "rejected": "short"}),
    ),
}
NUM_GOOD = 21
NUM_EVAL = 9


@pytest.fixture(scope="module")
def train_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good rows with a bad one after each, a BOM, blank lines and no final newline."""
    bad = [line for _, line in BAD_LINES.values()]
    lines: list[bytes] = []
    for number in range(NUM_GOOD):
        lines.append(json.dumps(good_row(number)).encode())
        if number < len(bad):
            line = bad[number]
            lines += [line if isinstance(line, bytes) else line.encode(), b""]
    path = tmp_path_factory.mktemp("data") / "dirty.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines))
    return path


@pytest.fixture(scope="module")
def eval_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "held_out.jsonl"
    rows = [good_row(100 + number) for number in range(NUM_EVAL)]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def config(
    base_model: Path, train_file: Path, eval_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    return {
        "run": {"name": "dirty", "output_dir": str(tmp_path_factory.mktemp("runs"))},
        "model": {"name_or_path": str(base_model), "dtype": "float32"},
        "data": {"train": str(train_file), "eval": str(eval_file), "max_length": 256},
        "train": {
            "batch_size": 8,
            "num_train_epochs": 2,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "eval_steps": 3,
            "max_tokens_per_micro_batch": 256,
        },
        "scaling": {"num_workers": 2},
        "tracking": {"wandb": {"project": "tests", "mode": "offline"}},
    }


@pytest.fixture(scope="module")
def run_dir(ray_session: None, config: dict[str, Any]) -> Path:
    import rayrm

    return Path(rayrm.fit(config).run_dir)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_exactly_the_good_rows_are_trained_once_an_epoch(run_dir: Path) -> None:
    result = json.loads((run_dir / "result.json").read_text())
    assert result["pairs"] == 2 * NUM_GOOD
    assert result["steps"] == 2 * 3  # 21 pairs at 8 a step, the tail included


def test_each_bad_row_is_counted_and_kept_with_its_reason(run_dir: Path) -> None:
    expected: dict[str, int] = {}
    for reason, _ in BAD_LINES.values():
        expected[reason] = expected.get(reason, 0) + 1
    report = json.loads((run_dir / "data_report.json").read_text())["sources"]["dirty"]
    assert report["rows"] == NUM_GOOD + len(BAD_LINES)
    assert report["pairs"] == NUM_GOOD
    assert report["dropped"] == expected
    kept = read_lines(run_dir / "dropped" / "dirty.jsonl")
    assert [row["reason"] for row in kept] == [reason for reason, _ in BAD_LINES.values()]
    assert all(row["detail"] for row in kept)
    # a bad line and a blank one follow each good line: the number is that of the physical line
    assert [row["row"] for row in kept] == [1 + 3 * i for i in range(len(BAD_LINES))]
    assert json.loads((run_dir / "result.json").read_text())["dropped"] == expected


def test_metrics_have_a_line_a_step_and_a_line_an_evaluation(run_dir: Path) -> None:
    lines = read_lines(run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "eval_loss" in line] == [3, 6]
    first = lines[0]
    for name in (
        "accuracy",
        "margin",
        "min_reward",
        "mean_reward",
        "max_reward",
        "num_tokens",
        "learning_rate",
        "grad_norm",
        "epoch",
        "ties",
        "pairs_per_second",
        "tokens_per_second",
        "padding_share",
        "shared_prompt_share",
    ):
        assert name in first, name
    assert lines[-1]["eval_num_pairs"] == NUM_EVAL
    assert (run_dir / "config.json").exists()


_SCORE_WITH_PLAIN_TRANSFORMERS = """
import json, sys
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
folder, rows, kind = sys.argv[1:]
if kind == "adapter":
    from peft import AutoPeftModelForSequenceClassification as AutoClass
else:
    AutoClass = AutoModelForSequenceClassification
model = AutoClass.from_pretrained(folder, dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(folder)
rewards = []
for side in ("chosen", "rejected"):
    conversations = [row["prompt"] + row[side] for row in map(json.loads, open(rows))]
    batch = tokenizer.apply_chat_template(
        conversations, padding=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        rewards.append(model(**batch).logits[:, 0].tolist())
assert not any(name.split(".")[0] == "rayrm" for name in sys.modules)
print(json.dumps(rewards))
"""


def score_with_plain_libraries(folder: Path, rows: Path, kind: str) -> list[list[float]]:
    """Return rewards of chosen and rejected, from a process that does not know rayrm."""
    process = subprocess.run(
        [sys.executable, "-c", _SCORE_WITH_PLAIN_TRANSFORMERS, str(folder), str(rows), kind],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=folder,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def check_scores_are_those_of_training(run_dir: Path, eval_file: Path, kind: str) -> None:
    chosen, rejected = score_with_plain_libraries(run_dir / "model", eval_file, kind)
    evaluation = read_lines(run_dir / "metrics.jsonl")[-1]
    gaps = [c - r for c, r in zip(chosen, rejected, strict=True)]
    assert evaluation["eval_margin"] == pytest.approx(sum(gaps) / len(gaps), abs=1e-5)
    assert evaluation["eval_min_reward"] == pytest.approx(min(chosen + rejected), abs=1e-5)
    assert evaluation["eval_max_reward"] == pytest.approx(max(chosen + rejected), abs=1e-5)
    mean = sum(chosen + rejected) / (2 * len(chosen))
    assert evaluation["eval_mean_reward"] == pytest.approx(mean, abs=1e-5)
    assert evaluation["eval_accuracy"] == sum(gap > 0 for gap in gaps) / len(gaps)


def test_plain_transformers_scores_a_padded_batch_as_training_did(
    run_dir: Path, eval_file: Path
) -> None:
    config = json.loads((run_dir / "model" / "config.json").read_text())
    assert config["pad_token_id"] != config["eos_token_id"]
    check_scores_are_those_of_training(run_dir, eval_file, "model")


def test_one_offline_wandb_run_holds_config_and_all_metrics_at_their_steps(run_dir: Path) -> None:
    (path,) = (run_dir / "wandb").glob("offline-run-*/*.wandb")
    config, history = read_wandb_file(path)
    assert config["train"]["batch_size"] == 8
    logged: dict[int, dict[str, Any]] = {}
    for row in history:
        logged.setdefault(row["_step"], {}).update(row)
    assert [row["_step"] for row in history] == sorted(row["_step"] for row in history)
    for line in read_lines(run_dir / "metrics.jsonl"):
        for name, value in line.items():
            assert logged[line["step"]][name] == pytest.approx(value), name
    last = logged[6]
    assert last["eval_rewards"]["_type"] == "table-file"
    assert last["eval_margins"]["_type"] == "histogram"
    assert json.loads((run_dir / "result.json").read_text())["wandb_run_id"] in path.name


def test_a_second_start_of_a_finished_run_does_nothing(
    run_dir: Path, config: dict[str, Any]
) -> None:
    import rayrm

    before = (run_dir / "result.json").stat().st_mtime_ns
    result = rayrm.fit(config)
    assert result.run_dir == str(run_dir)
    assert (run_dir / "result.json").stat().st_mtime_ns == before


def test_a_finished_run_whose_rows_have_changed_since_is_refused(
    run_dir: Path, config: dict[str, Any]
) -> None:
    import rayrm

    path = Path(config["data"]["train"])
    content = path.read_bytes()
    try:
        path.write_bytes(content)  # newer, and the same
        assert rayrm.fit(config).run_dir == str(run_dir)
        path.write_bytes(content.replace(b"Name a colour", b"Name a flower", 1))
        with pytest.raises(rayrm.DataError, match="has changed since this run began"):
            rayrm.fit(config)
    finally:
        path.write_bytes(content)
    with pytest.raises(rayrm.DataError, match="began with the rows of dirty, eval, not of train"):
        rayrm.fit(config, datasets={"train": [good_row(number) for number in range(5)]})


def test_a_second_run_of_the_same_name_with_other_settings_is_refused(
    run_dir: Path, config: dict[str, Any]
) -> None:
    import rayrm

    with pytest.raises(rayrm.ConfigError, match=r"train\.learning_rate"):
        rayrm.fit(config, ["train.learning_rate=5e-4"])
    with pytest.raises(rayrm.ConfigError, match="never"):
        rayrm.fit(config, ["run.resume=never"])


def test_the_model_card_tells_data_metrics_and_versions(run_dir: Path) -> None:
    card = (run_dir / "model" / "README.md").read_text()
    for part in ("eval_accuracy", "| dirty | 38 | 21 |", "deepspeed", '"learning_rate": 0.001'):
        assert part in card, part


def test_the_model_holds_mean_and_deviation_of_its_rewards(run_dir: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = run_dir / "model"
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rewards: list[float] = []
    for row in map(good_row, range(NUM_GOOD)):
        for side in ("chosen", "rejected"):
            text = tokenizer.apply_chat_template(row["prompt"] + row[side], tokenize=False)
            inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
            with torch.no_grad():
                rewards.append(model(**inputs).logits[0].item())
    wanted = torch.tensor(rewards)
    assert model.config.reward_mean == pytest.approx(wanted.mean().item(), abs=1e-5)
    assert model.config.reward_std == pytest.approx(wanted.std(correction=0).item(), abs=1e-5)
    assert f"the mean {wanted.mean().item():.4g}" in (folder / "README.md").read_text()


def test_the_model_card_shows_the_curves(run_dir: Path) -> None:
    folder = run_dir / "model"
    assert "](curves.png)" in (folder / "README.md").read_text()
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_adapters_reload_through_peft_with_the_trained_rewards(
    ray_session: None, config: dict[str, Any], eval_file: Path
) -> None:
    import rayrm

    result = rayrm.fit(
        config,
        [
            "run.name=lora",
            "model.lora={r: 4, lora_dropout: 0.1}",
            "model.gradient_checkpointing=true",
        ],
    )
    run_dir = Path(result.run_dir)
    settings = json.loads((run_dir / "model" / "adapter_config.json").read_text())
    assert "score" in settings["modules_to_save"]
    assert settings["task_type"] == "SEQ_CLS"
    assert settings["lora_dropout"] == 0.1
    check_scores_are_those_of_training(run_dir, eval_file, "adapter")
