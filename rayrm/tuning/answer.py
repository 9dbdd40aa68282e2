"""What a sweep answers: a table, the best configuration, its model, and the page."""

import csv
import json
import logging
import math
import os
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from ray import tune

from rayrm.config.loader import dump_config, with_values
from rayrm.config.schema import SearchSection
from rayrm.config.space import trial_config
from rayrm.errors import RayrmError
from rayrm.training.job import MODEL
from rayrm.training.storage import RunFolder
from rayrm.tuning.page import write_page
from rayrm.tuning.trial import RUN, TRIALS, SweepJob

if TYPE_CHECKING:
    import pandas

logger = logging.getLogger(__name__)

ANSWER = "sweep.json"
_TABLE = "trials.csv"
_BEST = "best.yaml"


@dataclass(frozen=True)
class SweepResult:
    """What a finished sweep leaves in the caller's hands."""

    best_config: dict[str, Any]
    """Configuration of the best trial, as ``fit`` takes it."""
    best_model_dir: str
    trials: "pandas.DataFrame"
    """A row a trial: values, status, metric, steps, folder."""
    sweep_dir: str


def answer(job: SweepJob, trials: tune.ResultGrid, configurations: int) -> SweepResult:
    """Write the table, the best configuration and its model.

    Raises:
        RayrmError: no trial was finished.
    """
    search, folder = job.config.search, Path(job.folder)
    rows = sorted((_row(job, trial) for trial in trials), key=lambda row: row["trial"])
    if missing := configurations * search.repeats - len(rows):
        logger.warning("%d trials were not started: search.time_budget was over", missing)
    if rows:
        _write_table(folder / _TABLE, rows)
    finished = [row for row in rows if row["status"] == "finished"]
    if not finished:
        first = next((row["error"] for row in rows if row["error"]), "none was trained to its end")
        raise RayrmError(f"search: no trial was finished; see {folder / _TABLE} ({first})")
    judged = judge(finished, search)
    best = judged[0]
    chosen = best_row([row for row in finished if row["number"] == best["number"]], search)
    model_dir = _copy_model(folder, Path(chosen["run_dir"]))
    run = trial_config(job.config, {field: chosen[field] for field in search.space})
    named = {"run.name": "best", "run.seed": run.run.seed + chosen["repeat"]}
    best_config = dump_config(with_values(run, named))
    (folder / _BEST).write_text(yaml.safe_dump(best_config, sort_keys=False), encoding="utf-8")
    write_page(folder, search, rows, best=chosen["trial"])
    RunFolder(job.folder).write_json(
        ANSWER,
        {
            "metric": search.metric,
            "mode": search.mode,
            "best": {**best, "trial": chosen["trial"]},
            "best_model_dir": model_dir,
            "configurations": judged,
            "trials": rows,
            "not_started": missing,
        },
    )
    return read_answer(job.folder)


def _row(job: SweepJob, trial: tune.Result) -> dict[str, Any]:
    """Tell of one trial what its run's folder has."""
    name = Path(trial.path).name
    number, repeat = map(int, name.split("-"))
    drawn = RunFolder(trial.path).read_json("params.json") or {"values": {}}  # if it was started
    run = RunFolder(f"{job.folder}/{TRIALS}/{(trial.metrics or {}).get(RUN, name)}")
    result = run.read_json("result.json")
    metrics: dict[str, Any] = {}
    for line in run.read_lines("metrics.jsonl"):
        metrics |= json.loads(line)
    if result is not None:
        metrics |= result["metrics"]
    error = None if trial.error is None else str(trial.error).strip().split("\n")[-1]
    status = "finished" if result is not None else "stopped" if error is None else "failed"
    return {
        "trial": name,
        "number": number,
        "repeat": repeat,
        "status": status,
        **{field: drawn["values"].get(field) for field in job.config.search.space},
        job.config.search.metric: metrics.get(job.config.search.metric),
        "step": metrics.get("step"),
        "seconds": None if result is None else result["seconds_in_steps"],
        "run_dir": run.url,
        "error": error,
    }


def judge(rows: Sequence[dict[str, Any]], search: SearchSection) -> list[dict[str, Any]]:
    """Return each configuration with the mean of its metric and its standard error, best first.

    A configuration of which fewer repeats were finished comes after those of which more were.
    """
    judged: list[dict[str, Any]] = []
    for number in dict.fromkeys(row["number"] for row in rows):
        of_number = [row for row in rows if row["number"] == number]
        values = [row[search.metric] for row in with_number(of_number, search)]
        if not values:
            continue
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        judged.append(
            {
                "number": number,
                search.metric: statistics.fmean(values),
                "standard_error": error,
                "repeats": len(values),
            }
        )
    if not judged:
        raise RayrmError(f"search.metric: {search.metric} is no number in any finished trial")
    return sorted(judged, key=lambda one: (-one["repeats"], -one[search.metric] * _sign(search)))


def best_row(rows: Sequence[dict[str, Any]], search: SearchSection) -> dict[str, Any]:
    """Return the row with the best metric; at least one is a number."""
    return max(with_number(rows, search), key=lambda row: row[search.metric] * _sign(search))


def with_number(rows: Sequence[dict[str, Any]], search: SearchSection) -> list[dict[str, Any]]:
    """Return the rows whose metric is a finite number."""
    values = [(row, row[search.metric]) for row in rows]
    return [row for row, value in values if value is not None and math.isfinite(value)]


def _sign(search: SearchSection) -> int:
    return 1 if search.mode == "max" else -1


def _copy_model(folder: Path, run: Path) -> str:
    """Copy a trial's model to the sweep's folder; an adapter names the copy of its base."""
    source = run / MODEL
    with RunFolder(str(folder)).building(MODEL) as place:
        shutil.copytree(source, place, symlinks=True, dirs_exist_ok=True)
        adapter = Path(place, "adapter_config.json")
        if adapter.is_file():
            text = adapter.read_text(encoding="utf-8")
            adapter.write_text(text.replace(str(source), str(folder / MODEL)), encoding="utf-8")
    return str(folder / MODEL)


def _write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    part = path.with_suffix(".part")
    with open(part, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    os.replace(part, path)


def read_answer(folder: str) -> SweepResult:
    """Return what a finished sweep left in its folder."""
    import pandas

    answer = json.loads(Path(folder, ANSWER).read_text(encoding="utf-8"))
    best = yaml.safe_load(Path(folder, _BEST).read_text(encoding="utf-8"))
    trials = pandas.read_csv(Path(folder, _TABLE))
    return SweepResult(best, answer["best_model_dir"], trials, folder)
