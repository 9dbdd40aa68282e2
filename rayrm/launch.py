"""``fit``: from a configuration to a finished run, on the Ray that is there or on its own."""

import contextlib
import logging
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import ray
import ray.train
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.train.torch import TorchConfig, TorchTrainer

from rayrm.board import OrderOf, showing, start_board, stopping_on_signals
from rayrm.cluster import (
    KEEP_FREED_MEMORY,
    Resources,
    choose_resources,
    ray_running,
    start_attempts,
    wait_for_data_task,
)
from rayrm.config.loader import differing_fields, dump_config, load_config
from rayrm.config.schema import RunConfig, ScalingSection, WorkerRange
from rayrm.data.feed import Feed, FeedPlan
from rayrm.data.intake import (
    TRAIN,
    Rows,
    check_reports,
    check_unchanged,
    may_have_changed,
    read_rows,
)
from rayrm.errors import ConfigError, RayrmError, own_error
from rayrm.preflight import check_arguments, check_before_start, with_absolute_paths
from rayrm.training.commits import CHECKPOINTS, complete_checkpoints, settle_checkpoints
from rayrm.training.entry import run_worker
from rayrm.training.job import MODEL, REPORT, SCORE, Job
from rayrm.training.storage import RunFolder

logger = logging.getLogger(__name__)

_EVAL_PAIRS_A_STEP = 256
_LOOK_SECONDS, _VAIN_LOOKS, _ANSWER_SECONDS = 1, 3, 10
_MAY_CHANGE = ("run.resume", "scaling.")
"""Fields in which a run that goes on may differ from its start."""


@dataclass(frozen=True)
class FitResult:
    """What a finished run leaves in the caller's hands."""

    metrics: dict[str, float]
    """The last training line and the last evaluation."""
    model_dir: str
    run_dir: str
    dropped: dict[str, int]
    """Training rows that were not used, by reason."""


def fit(
    config: str | os.PathLike[str] | Mapping[str, Any] | RunConfig | None = None,
    overrides: Sequence[str] = (),
    *,
    datasets: Mapping[str, Any] | None = None,
) -> FitResult:
    """Train a reward model and return where it is.

    Args:
        config: a YAML file, a mapping, a ``RunConfig``, or null for the quickstart.
        overrides: ``section.field=value``, laid over the configuration.
        datasets: ``{"train": rows, "eval": rows or {name: rows}}`` in place of ``data.train`` and
            ``data.eval``; rows are a ``ray.data.Dataset``, a ``datasets.Dataset`` or a list.

    Raises:
        ConfigError: the configuration is wrong; nothing was started.
        DataError: no row is usable, or a bad row is to stop the run.
        CheckpointError: a checkpoint or the exported model cannot be trusted.
        RayrmError: training failed for another reason that the message names.
    """
    check_arguments(overrides, datasets)
    settled = with_absolute_paths(load_config(config, overrides))
    return fit_settled(settled, datasets or {})


def fit_settled(
    settled: RunConfig,
    datasets: Mapping[str, Any],
    *,
    on_board: Callable[[Any], None] = lambda board: None,
    rows: Rows | None = None,
) -> FitResult:
    """Train as ``fit`` does, for a caller who follows the run or has read its rows before.

    Args:
        settled: the configuration, its paths absolute.
        datasets: as in ``fit``.
        on_board: gets the actor that knows how far the run has come.
        rows: what ``read_rows_with`` returned for a run whose ``data`` and tokenizer are these.
    """
    handed = dict(datasets)
    check_before_start(settled, handed)
    for name in ("train", "eval"):
        if name in handed and getattr(settled.data, name):
            logger.warning("the rows of datasets take the place of data.%s", name)
    folder = RunFolder(f"{settled.run.output_dir.rstrip('/')}/{settled.run.name}")
    finished = _finished(folder, settled)
    stamps = (folder.read_json(REPORT) or {}).get("files", {})
    if finished is not None and not may_have_changed(settled, handed, stamps):
        return _nothing_to_do(finished)
    folder.create()
    with folder.held():
        logger.info("starting Ray")
        with ray_running(settled.scaling) as may_grow:
            resources = resources_for(settled.scaling, may_grow=may_grow)
            rows = rows or read_rows_with(resources, settled, handed)
            if finished is not None:
                _check_unchanged(rows, folder)
                return _nothing_to_do(finished)
            return _fit(settled, rows, resources, folder, on_board)


def resources_for(scaling: ScalingSection, *, may_grow: bool) -> Resources:
    """Return what to ask of the Ray that runs, as it is now."""
    there, free = ray.cluster_resources(), ray.available_resources()
    return choose_resources(scaling, there, free, may_grow=may_grow)


def read_rows_with(
    resources: Resources,
    config: RunConfig,
    handed: Mapping[str, Any],
    *,
    hold_train: bool = False,
) -> Rows:
    """Wait until a data task finds its CPU, then read as ``rayrm.data.intake.read_rows``."""
    wait_for_data_task(resources, seconds=60 * config.scaling.timeout_minutes)
    try:
        return read_rows(
            config,
            handed,
            cpus_per_task=resources.cpus_per_task,
            rows_a_mark=_feed_plans(config, [TRAIN])[TRAIN].rows_a_mark,
            hold_train=hold_train,
        )
    except RayTaskError as error:  # our own errors arrive wrapped in the traceback of a task
        raise (own_error(error) or error) from None


def _fit(
    config: RunConfig,
    rows: Rows,
    resources: Resources,
    folder: RunFolder,
    on_board: Callable[[Any], None],
) -> FitResult:
    streams, reports = rows.streams, rows.reports
    may_go_on = bool(complete_checkpoints(folder))
    if may_go_on:
        _check_unchanged(rows, folder)
    write_reports(rows, folder)
    check_reports(reports, config, kept_in=folder.path("dropped"))
    folder.write_json("config.json", dump_config(config))
    steps_per_epoch = ceil(reports[TRAIN].num_pairs / config.train.batch_size)
    num_steps = config.train.max_steps
    if num_steps < 0:
        num_steps = ceil(config.train.num_train_epochs * steps_per_epoch)
    board = start_board(config.train.save_minutes)
    on_board(board)
    plans = _feed_plans(config, streams)
    feeds = {
        name: Feed.start(
            stream, replace(plans[name], marks=tuple(reports[name].marks)), order=OrderOf(board)
        )
        for name, stream in streams.items()
    }
    if not may_go_on:  # the workers will ask for the first step
        feeds[TRAIN].read_ahead()
    job = Job(
        config=dump_config(config),
        run_dir=folder.url,
        run_id=_run_id(folder),
        num_steps=num_steps,
        steps_per_epoch=steps_per_epoch,
        longest_pair={
            "shared_prompt": reports[TRAIN].longest_pair,
            "packed": 2 * reports[TRAIN].longest_side,
            "padded": 2 * reports[TRAIN].longest_side,
        },
        train_files=tuple(file.path for file in streams[TRAIN].files),
        train_feed=feeds.pop(TRAIN),
        eval_feeds=feeds,
        board=board,
    )
    value = _train(config, job, resources, folder)
    dropped = dict(reports[TRAIN].dropped)
    result = {**value, "model_dir": folder.path(MODEL), "dropped": dropped}
    folder.write_json("result.json", result)
    return _as_fit_result(result, folder)


def _check_unchanged(rows: Rows, folder: RunFolder) -> None:
    check_unchanged(rows.reports, (folder.read_json(REPORT) or {}).get("sources", {}))


def write_reports(rows: Rows, folder: RunFolder) -> None:
    """Write the account of all rows, and the dropped ones themselves."""
    reports = rows.reports.values()
    account = {label: told for report in reports for label, told in report.as_dict().items()}
    folder.write_json(REPORT, {"sources": account, "files": rows.stamps})
    for report in reports:
        for label, source in report.sources.items():
            if source.kept_rows:
                folder.write_json_lines(f"dropped/{label}.jsonl", source.kept_rows)


def _finished(folder: RunFolder, config: RunConfig) -> FitResult | None:
    """Return the result of a finished run of this name; check that an unfinished one may go on.

    Raises:
        ConfigError: ``run.resume`` forbids it, or the run was started with other settings.
    """
    result = folder.read_json("result.json")
    before = folder.read_json("config.json")
    has_progress = result is not None or bool(complete_checkpoints(folder))
    if config.run.resume == "must" and not has_progress:
        raise ConfigError(f"run.resume: must, but there is no run to go on with at {folder.url}")
    if not has_progress or before is None:
        return None
    if config.run.resume == "never":
        raise ConfigError(
            f"run.name: there is a run at {folder.url} already and run.resume is never; give "
            "another run.name, or remove the folder"
        )
    changed = differing_fields(load_config(before), config)
    if told := ", ".join(field for field in changed if not field.startswith(_MAY_CHANGE)):
        raise ConfigError(
            f"run.name: the run at {folder.url} was started with another configuration ({told}); "
            "give another run.name, or go back to those settings"
        )
    if result is None:
        return None
    return _as_fit_result(result, folder)


def _nothing_to_do(finished: FitResult) -> FitResult:
    logger.warning("%s is finished already; nothing to do", finished.run_dir)
    return finished


def _as_fit_result(result: dict[str, Any], folder: RunFolder) -> FitResult:
    return FitResult(result["metrics"], result["model_dir"], folder.url, result["dropped"])


def _run_id(folder: RunFolder) -> str:
    """Return an id that stays the same over restarts of this run."""
    known = folder.read_json("run.json")
    if known is None:
        known = {"wandb_run_id": uuid.uuid4().hex[:8]}
        folder.write_json("run.json", known)
    return known["wandb_run_id"]


def _feed_plans(config: RunConfig, streams: Iterable[str]) -> dict[str, FeedPlan]:
    plans = dict.fromkeys(streams, FeedPlan(_EVAL_PAIRS_A_STEP))
    plans[TRAIN] = FeedPlan(
        batch_size=config.train.batch_size,
        seed=config.run.seed if config.data.shuffle else None,
        buffer_size=config.data.shuffle_buffer_size,
    )
    return plans


def _train(config: RunConfig, job: Job, resources: Resources, folder: RunFolder) -> dict[str, Any]:
    """Run the workers and return what the first one returns, even if their controller is lost."""
    failures = 0
    while True:
        try:
            value = _run_workers(
                config, replace(job, earlier=settle_checkpoints(folder)), resources, folder
            )
        except RayActorError as error:
            failures += 1
            if failures > config.scaling.max_failures:
                raise RayrmError(f"training failed: {error}") from error
            logger.warning("Ray Train's controller was lost; going on from the last checkpoint")
            place: Any = ray.get(job.board.place.remote())
            if place is not None:  # Ray lets go of what it held only where it has a dashboard
                ray.util.remove_placement_group(place)
        else:
            settle_checkpoints(folder)
            return value


def _run_workers(
    config: RunConfig, job: Job, resources: Resources, folder: RunFolder
) -> dict[str, Any]:
    train = config.train
    best = train.metric_for_best_model is not None
    trainer = TorchTrainer(
        run_worker,
        train_loop_config={"job": job},
        torch_config=TorchConfig(timeout_s=ceil(60 * config.scaling.timeout_minutes)),
        scaling_config=ray.train.ScalingConfig(
            num_workers=resources.num_workers,
            use_gpu=resources.use_gpu,
            resources_per_worker=resources.per_worker,
            **_elasticity(config.scaling.num_workers),
        ),
        run_config=ray.train.RunConfig(
            name=CHECKPOINTS,
            storage_path=folder.url,
            worker_runtime_env={} if resources.use_gpu else {"env_vars": KEEP_FREED_MEMORY},
            failure_config=ray.train.FailureConfig(
                max_failures=config.scaling.max_failures,
                controller_failure_limit=start_attempts(config.scaling),
            ),
            checkpoint_config=ray.train.CheckpointConfig(
                num_to_keep=train.save_total_limit,
                checkpoint_score_attribute=SCORE if best else None,
            ),
        ),
    )
    with showing(job.board, waiting_for=str(resources)), stopping_on_signals(job.board) as signals:
        try:
            outcome = _in_a_thread(trainer.fit, until=lambda: signals and _nobody_works(job.board))
        except ray.train.TrainingFailedError as error:
            raise _explained(error, job, resources, config.scaling) from error
    failure: Any = ray.get(job.board.failure.remote())
    if failure is not None:
        raise failure
    value = None if outcome is None else outcome.return_value
    if value is None:
        how = "with a checkpoint" if outcome is not None else "while no worker was there"
        logger.warning("stopped %s; the same command goes on from there", how)
        raise KeyboardInterrupt if signals == [signal.SIGINT] else SystemExit(143)
    return value


def _elasticity(num_workers: int | WorkerRange) -> dict[str, Any]:
    if isinstance(num_workers, int):
        return {}
    return {"elastic_resize_monitor_interval_s": num_workers.resize_monitor_interval_s}


def _in_a_thread(call: Callable[[], Any], *, until: Callable[[], Any]) -> Any:
    """Call in another thread: in the main one Ray Train would take Ctrl-C for itself.

    Nothing is returned, and the thread is left to itself, once ``until`` held for some seconds.
    """
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    vain = 0
    while not wait([outcome], timeout=_LOOK_SECONDS).done and vain < _VAIN_LOOKS:
        vain = vain + 1 if until() else 0
    return outcome.result() if outcome.done() else None


def _nobody_works(board: Any) -> bool:
    """Whether no worker has begun yet, or the one that did last has gone."""
    worker: Any = ray.get(board.worker.remote())
    if worker is None:
        return True
    try:
        ray.get(worker.__ray_ready__.remote(), timeout=_ANSWER_SECONDS)
    except RayActorError:
        return True
    except GetTimeoutError:
        return False
    return False


def _explained(
    error: Exception, job: Job, resources: Resources, scaling: ScalingSection
) -> Exception:
    """Return the error that a worker posted, or say what Ray says."""
    with contextlib.suppress(RayActorError):
        failure: Any = ray.get(job.board.failure.remote())
        if failure is not None:
            return failure
    cause = type(getattr(error, "controller_failure", None)).__name__  # Ray keeps the class private
    if cause == "WorkerGroupStartupTimeoutError":
        return RayrmError(
            f"scaling: {resources} were not placed in {scaling.timeout_minutes:g} minutes "
            f"(scaling.timeout_minutes); the cluster has {ray.cluster_resources()}"
        )
    return RayrmError(f"training failed: {error}")
