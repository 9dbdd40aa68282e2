"""Small whole runs, and what is looked for in them and done to them."""

import contextlib
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

NUM_PAIRS = 13
BATCH_SIZE = 4
STEPS_AN_EPOCH = 4  # with a tail of one


def text_rows(num_rows: int) -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"Question {number}: " + "what is it? " * (number % 4),
            "chosen": f"The answer is {number}." + " Yes." * (number % 5),
            "rejected": "No." + " Not at all." * (number % 3),
            "margin": 0.1 * (number % 3),
        }
        for number in range(num_rows)
    ]


def rows_file(path: Path, rows: list[dict[str, Any]] | None = None) -> Path:
    """Write rows, those of a small run by default, as a source."""
    rows = text_rows(NUM_PAIRS) if rows is None else rows
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_for(base_model: Path, output_dir: Path, name: str, **train: Any) -> dict[str, Any]:
    return {
        "run": {"name": name, "output_dir": str(output_dir)},
        "model": {"name_or_path": str(base_model), "dtype": "float32"},
        "data": {"train": [], "max_length": 256},
        "loss": {"center_rewards_coefficient": 0.01},
        "train": {
            "batch_size": BATCH_SIZE,
            "num_train_epochs": 2,
            "logging_steps": 1,
            "learning_rate": 1e-3,
            **train,
        },
        "tracking": {"wandb": None},
    }


def training_lines(run_dir: str | Path) -> list[dict[str, Any]]:
    text = Path(run_dir, "metrics.jsonl").read_text(encoding="utf-8")
    return [line for line in map(json.loads, text.splitlines()) if "loss" in line]


def assert_each_row_once_an_epoch(run_dir: Path, *, num_epochs: int) -> None:
    """Count what the workers noted themselves."""
    trained: Counter[tuple[int, int]] = Counter()
    for file in (run_dir / "rows").glob("worker-*.jsonl"):
        for line in map(json.loads, file.read_text().splitlines()):
            epoch = (line["step"] - 1) // STEPS_AN_EPOCH
            trained.update((epoch, row) for _, row in line["rows"])
    expected = [(epoch, row) for epoch in range(num_epochs) for row in range(NUM_PAIRS)]
    assert trained == Counter(expected)


def actors_of(driver: psutil.Process, name: str) -> list[psutil.Process]:
    """Return the processes of a driver's Ray that run actors of this name."""
    found: list[psutil.Process] = []
    for process in driver.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it ended since
            if name in " ".join(process.cmdline()):
                found.append(process)
    return found


def wait_for(moment: str, step: int, run_dir: Path) -> None:
    """Wait for the moment; a busy machine takes minutes to start a second Ray."""
    if moment == "at an epoch's last step":
        step += -step % STEPS_AN_EPOCH
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline:
        metrics = run_dir / "metrics.jsonl"
        is_time = metrics.exists() and len(metrics.read_text().splitlines()) >= step
        if is_time and (moment != "during a checkpoint" or list(run_dir.glob("*/part_*"))):
            return
        if (run_dir / "result.json").exists():  # the last checkpoint came and went
            return
        time.sleep(0.001)
    raise TimeoutError(f"{run_dir} did not come to step {step}")
