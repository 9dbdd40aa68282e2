"""``sweep``: trials of ``fit`` on Ray Tune, and what they answer."""

import csv
import json
import logging
import math
import os
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import yaml
from ray import tune

from rayrm.cluster import Resources, ray_running
from rayrm.config.loader import Source, differing_fields, dump_config, load_sweep, with_values
from rayrm.config.schema import SearchSection, SweepConfig, WorkerRange
from rayrm.config.space import Values, draw_trials, trial_config
from rayrm.data.intake import Rows, check_reports
from rayrm.errors import ConfigError, RayrmError
from rayrm.launch import read_rows_with, resources_for, write_reports
from rayrm.preflight import (
    check_arguments,
    check_before_start,
    check_search,
    with_absolute_paths,
)
from rayrm.training.job import MODEL
from rayrm.training.storage import RunFolder
from rayrm.tuning.page import write_page
from rayrm.tuning.proposals import Proposals, strategy_of
from rayrm.tuning.runners import start_runners
from rayrm.tuning.schedulers import scheduler_for
from rayrm.tuning.trial import FINISHED, RUN, TRIALS, SweepJob, Trial, trial_name

if TYPE_CHECKING:
    import pandas

logger = logging.getLogger(__name__)

_TUNE = "tune"
_RESULT = "sweep.json"
_TABLE = "trials.csv"
_BEST = "best.yaml"
_MAY_CHANGE = ("run.resume", "scaling.", "search.max_concurrent")
_SAME_TOKENS = ("train.", "loss.", "model.lora.", "model.peft.", "model.disable_dropout")
"""Fields by which trials may differ that train on the same tokens."""


@dataclass(frozen=True)
class SweepResult:
    """What a finished sweep leaves in the caller's hands."""

    best_config: dict[str, Any]
    """Configuration of the best trial, as ``fit`` takes it."""
    best_model_dir: str
    trials: "pandas.DataFrame"
    """A row a trial: values, status, metric, steps, folder."""
    sweep_dir: str


def sweep(
    config: Source,
    overrides: Sequence[str] = (),
    *,
    datasets: Mapping[str, Any] | None = None,
) -> SweepResult:
    """Train many configurations, and return the best of them and where its model is.

    Args:
        config: a YAML file, a mapping or a ``SweepConfig``; it has a ``search`` section.
        overrides: ``section.field=value``, laid over it.
        datasets: as in ``rayrm.fit``.

    Raises:
        ConfigError: the configuration is wrong; nothing was started.
        RayrmError: no trial was finished.
    """
    check_arguments(overrides, datasets)
    settled = with_absolute_paths(load_sweep(config, overrides))
    handed = dict(datasets or {})
    check_search(settled, handed)
    draws = draw_trials(settled.search, seed=settled.run.seed)
    check_before_start(trial_config(settled, draws[0]), handed)
    folder = f"{settled.run.output_dir.rstrip('/')}/{settled.run.name}"
    if "://" in folder:
        raise ConfigError("run.output_dir: a sweep needs a path that all of its nodes share")
    store = RunFolder(folder)
    if store.exists(_RESULT) and store.exists("config.json"):
        _check_unchanged(store, settled)
        return _nothing_to_do(folder)
    store.create()
    with store.held():
        _check_unchanged(store, settled)
        store.write_json("config.json", dump_config(settled))
        os.environ.setdefault(
            "RAY_AIR_NEW_OUTPUT", "0"
        )  # the new kind prints boxes when told not to
        with ray_running(settled.scaling) as may_grow:
            shared = _settled_resources(settled, len(draws))
            resources = resources_for(shared.scaling, may_grow=may_grow)
            rows = _shared_rows(resources, shared, handed, store)
            job = SweepJob(shared, folder, handed, start_runners(), rows)
            trials = _tuner(job, len(draws)).fit()
        return _answer(replace(job, config=settled), trials, len(draws))


def _nothing_to_do(folder: str) -> SweepResult:
    result = _read(folder)
    logger.warning("%s is finished already; nothing to do", folder)
    if failed := list(result.trials["status"]).count("failed"):
        logger.warning("%d trials failed; to try them again, remove %s/%s", failed, folder, _RESULT)
    return result


def _check_unchanged(store: RunFolder, config: SweepConfig) -> None:
    before = store.read_json("config.json")
    if before is None:
        return
    changed = differing_fields(load_sweep(before), config)
    if told := ", ".join(field for field in changed if not field.startswith(_MAY_CHANGE)):
        raise ConfigError(
            f"run.name: the sweep at {store.url} was started with another configuration ({told}); "
            "give another run.name, or go back to those settings"
        )


def _settled_resources(config: SweepConfig, configurations: int) -> SweepConfig:
    """Share the cluster out among the trials that run at a time.

    Raises:
        ConfigError: so many trials cannot run at a time.
    """
    cluster = ray.cluster_resources()
    total = cluster.get("CPU", 0.0)
    asked = config.scaling.num_workers
    workers = asked.max if isinstance(asked, WorkerRange) else asked
    given = config.scaling.resources_per_worker
    cpus = (given or {}).get("CPU", min(1.0, total / 2))
    fitting = int((total - min(1.0, total / 2)) // (workers * cpus)) if cpus else 1
    if gpus := (given or {}).get("GPU", 1.0 if config.scaling.use_gpu is True else 0.0):
        fitting = min(fitting, int(cluster.get("GPU", 0.0) // (workers * gpus)))
    is_population = config.search.scheduler == "pbt"
    default = configurations if is_population else max(fitting, 1)
    concurrent = config.search.max_concurrent or default
    if is_population and concurrent < configurations:
        raise ConfigError(
            f"search.max_concurrent: pbt trains its whole population at a time: give "
            f"{configurations}, or search.num_samples={concurrent}"
        )
    if given is not None and concurrent > fitting:
        raise ConfigError(
            f"search.max_concurrent: {concurrent} trials x {workers} workers x {given} and 1 CPU "
            f"for data tasks are more than the cluster has ({total:g} CPU, "
            f"{cluster.get('GPU', 0):g} GPU)"
        )
    scaling = config.scaling
    if given is None and concurrent > 1:
        share = max(int(50 * total / (concurrent * workers)) / 100, 0.01)
        each = {"CPU": min(share, 1.0)} | ({"GPU": 1.0} if gpus else {})
        scaling = scaling.model_copy(update={"resources_per_worker": each})
    search = config.search.model_copy(update={"max_concurrent": concurrent})
    return config.model_copy(update={"scaling": scaling, "search": search})


def _shared_rows(
    resources: Resources, config: SweepConfig, handed: Mapping[str, Any], store: RunFolder
) -> Rows | None:
    """Tokenize once what all trials train on, unless the search changes tokens or rows.

    Raises:
        DataError: a set has no usable pair, or a bad row is to stop the sweep.
    """
    if changed := [field for field in config.search.space if not field.startswith(_SAME_TOKENS)]:
        logger.info("each trial reads and tokenizes its own rows: %s may change them", changed[0])
        return None
    rows = read_rows_with(resources, config, handed, hold_train=True)
    write_reports(rows, store)
    check_reports(rows.reports, config, kept_in=store.path("dropped"))
    return rows


def _tuner(job: SweepJob, configurations: int) -> tune.Tuner:
    """Return a new tuner, or one that goes on where a killed sweep stopped."""
    trainable = tune.with_resources(tune.with_parameters(Trial, job=job), {"CPU": 0.01})
    place = f"{job.folder}/{_TUNE}"
    if tune.Tuner.can_restore(place):
        logger.info("going on with the sweep at %s", job.folder)
        return tune.Tuner.restore(place, trainable=trainable, resume_errored=True)
    search = job.config.search
    strategy = strategy_of(search, seed=job.config.run.seed)
    population: dict[str, Any] | None = None
    proposals: Proposals | None = Proposals(strategy, configurations, search)
    if search.scheduler == "pbt":  # which Tune has without a searcher only
        values = [strategy.ask(number) for number in range(configurations)]
        population, proposals = _population(values), None
    return tune.Tuner(
        trainable,
        param_space=population,
        tune_config=tune.TuneConfig(
            metric=search.metric,
            mode=search.mode,
            num_samples=configurations * search.repeats if proposals else 1,
            search_alg=proposals,
            scheduler=scheduler_for(job.config),
            max_concurrent_trials=search.max_concurrent,
            time_budget_s=None if search.time_budget is None else 60 * search.time_budget,
            trial_name_creator=_name_of,
            trial_dirname_creator=_name_of,
        ),
        run_config=tune.RunConfig(
            name=_TUNE,
            storage_path=job.folder,
            verbose=0,
            callbacks=[_Told(search)],
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
        ),
    )


def _population(values: list[Values]) -> dict[str, Any]:
    """Return the space of which Tune draws each of these once."""
    numbers = tune.grid_search(list(range(len(values))))
    drawn = tune.sample_from(lambda config: values[config["number"]])
    return {"number": numbers, "repeat": 0, "values": drawn}


def _name_of(trial: Any) -> str:
    return trial_name(trial.config["number"], trial.config["repeat"])


class _Told(tune.Callback):
    """Tells of each trial's evaluations and end."""

    def __init__(self, search: SearchSection) -> None:
        self._metric = search.metric

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        """A trial starts."""
        logger.info("trial %s starts (of %d so far)", trial, len(trials))

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any
    ) -> None:
        """A trial was evaluated, or is finished."""
        value = result.get(self._metric, math.nan)
        at = "finished" if result.get(FINISHED) else f"step {result.get('step')}"
        logger.info("trial %s %s  %s %.4g", trial, at, self._metric, value)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        """A trial failed."""
        logger.warning("trial %s failed; the sweep goes on", trial)


def _answer(job: SweepJob, trials: tune.ResultGrid, configurations: int) -> SweepResult:
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
        _RESULT,
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
    return _read(job.folder)


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
        values = [row[search.metric] for row in _with_number(of_number, search)]
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
    return max(_with_number(rows, search), key=lambda row: row[search.metric] * _sign(search))


def _with_number(rows: Sequence[dict[str, Any]], search: SearchSection) -> list[dict[str, Any]]:
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


def _read(folder: str) -> SweepResult:
    import pandas

    answer = json.loads(Path(folder, _RESULT).read_text(encoding="utf-8"))
    best = yaml.safe_load(Path(folder, _BEST).read_text(encoding="utf-8"))
    trials = pandas.read_csv(Path(folder, _TABLE))
    return SweepResult(best, answer["best_model_dir"], trials, folder)
