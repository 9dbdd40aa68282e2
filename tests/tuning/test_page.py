"""The page of a sweep: what is on it, and what it says of the fields."""

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest

from rayrm.config.schema import Choice, LogUniform, SearchSection
from rayrm.tuning.page import importance, write_page

SEARCH = SearchSection(
    metric="eval_accuracy",
    space={
        "train.learning_rate": LogUniform(type="log_uniform", low=1e-6, high=1e-2),
        "model.lora.r": Choice(type="choice", values=(4, 8, 16)),
        "train.lr_scheduler_type": Choice(type="choice", values=("linear", "cosine")),
    },
)


def trials(folder: Path, number: int, **changes: Any) -> list[dict[str, Any]]:
    """Trials whose accuracy is best at a rate of 1e-4, and depends on nothing else."""
    draw = random.Random(0)
    rows: list[dict[str, Any]] = []
    for index in range(number):
        rate = 10 ** draw.uniform(-6, -2)
        accuracy = 0.9 - 0.1 * (math.log10(rate) + 4) ** 2
        run = folder / f"{index:03d}-0"
        run.mkdir(parents=True)
        lines = [{"step": step, "eval_accuracy": accuracy * step / 4} for step in (2, 4)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        row = {
            "trial": run.name,
            "status": "finished",
            "train.learning_rate": rate,
            "model.lora.r": draw.choice([4, 8, 16]),
            "train.lr_scheduler_type": draw.choice(["linear", "cosine"]),
            "eval_accuracy": accuracy,
            "step": 4,
            "seconds": 1.5,
            "run_dir": str(run),
            "error": None,
        }
        rows.append(row | changes)
    return rows


def page_of(folder: Path, rows: list[dict[str, Any]]) -> str:
    write_page(folder, SEARCH, rows, best=rows[0]["trial"])
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("number", [1, 3, 9, 40])
def test_the_page_has_every_trial_and_field_and_asks_for_nothing(number: int, tmp_path: Path):
    page = page_of(tmp_path, trials(tmp_path, number))
    for index in range(number):
        assert f"<td>{index:03d}-0</td>" in page
    for field in SEARCH.space:
        assert f"<th>{field}</th>" in page
    assert page.count("<svg") == (4 if number >= 6 else 3)
    assert not re.findall(r"(?:src|href)=[\"'](?!#)", page.replace("xlink:href", "href"))


def test_a_trial_that_failed_is_listed_with_its_error_as_text(tmp_path: Path):
    rows = trials(tmp_path, 2)
    failed = {**rows[1], "status": "failed", "eval_accuracy": None, "error": "<b>lost</b>"}
    page = page_of(tmp_path, [rows[0], failed])
    assert "&lt;b&gt;lost&lt;/b&gt;" in page
    assert "<b>" not in page


def test_an_optimum_in_the_middle_counts_and_what_changes_nothing_does_not(tmp_path: Path):
    shares = importance(SEARCH, trials(tmp_path, 60))
    assert shares["train.learning_rate"] > 0.9
    assert shares["model.lora.r"] < 0.2
    assert shares["train.lr_scheduler_type"] < 0.2


def test_of_few_or_equal_trials_no_importance_is_told(tmp_path: Path):
    assert importance(SEARCH, trials(tmp_path / "few", 5)) == {}
    assert importance(SEARCH, trials(tmp_path / "equal", 9, eval_accuracy=0.5)) == {}
