"""``fit``: from a configuration to a finished run, on the Ray that is there or on one of its own."""

import contextlib
import logging
import os
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import ray
import ray.data
import ray.train
from ray.exceptions import RayActorError
from ray.train.torch import TorchTrainer
from tqdm import tqdm

from rayrm.config.loader import differing_fields, load_config
from rayrm.config.schema import DataSection, RunConfig, Source
from rayrm.data.feed import FeedConfig, FeedPlan
from rayrm.data.pipeline import PairStream, check_report, tokenize_rows
from rayrm.data.report import DataReport
from rayrm.data.sources import RawRows, hand_over, open_sources
from rayrm.errors import CheckpointError, ConfigError, RayrmError
from rayrm.model.reward import load_config as load_model_config
from rayrm.model.tokenizer import load_tokenizer
from rayrm.scaling import Resources, choose_resources, local_cpus
from rayrm.training.checkpoint import SCORE
from rayrm.training.storage import RunFolder
from rayrm.training.tracking import choose_mode, has_key
from rayrm.training.worker import REPORT, Job, eval_dataset_name, train_worker

logger = logging.getLogger(__name__)

_EVAL_PAIRS_A_STEP = 256
_RAY_SETTINGS = {
    # every report waits for the controller's next poll: 2 s by Ray's default
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.25",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
}


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
    settled = _with_absolute_paths(load_config(config, overrides))
    datasets = dict(datasets or {})
    _check_before_start(settled, datasets)
    folder = RunFolder(f"{settled.run.output_dir.rstrip('/')}/{settled.run.name}")
    if (finished := _finished(folder, settled)) is not None:
        return finished
    with _environment(_RAY_SETTINGS), _ray_running(settled), _quiet_ray_data():
        return _fit(settled, datasets, folder)


def _fit(config: RunConfig, datasets: dict[str, Any], folder: RunFolder) -> FitResult:
    resources = choose_resources(config.scaling, ray.cluster_resources(), ray.available_resources())
    streams = _open_streams(config, datasets, resources)
    folder.write_json("config.json", config.model_dump(mode="json"))
    streams, report = _survey(streams, config.data, folder)
    steps_per_epoch = ceil(report.num_pairs / config.train.batch_size)
    num_steps = config.train.max_steps
    if num_steps < 0:
        num_steps = ceil(config.train.num_train_epochs * steps_per_epoch)
    job = Job(
        config=config.model_dump(mode="json"),
        run_dir=folder.url,
        run_id=_run_id(folder),
        num_steps=num_steps,
        steps_per_epoch=steps_per_epoch,
        eval_sets=tuple(name for name in streams if name is not None),
        board=ray.remote(num_cpus=0)(Board).remote(),
    )
    value = _train(config, job, streams, resources, folder)
    result = {
        **value,
        "model_dir": folder.path("model"),
        "dropped": dict(report.dropped),
    }
    folder.write_json("result.json", result)
    return _as_fit_result(result, folder)


# --- before the start -----------------------------------------------------------------------------


def _check_before_start(config: RunConfig, datasets: dict[str, Any]) -> None:
    """Find what can be found wrong before Ray starts."""
    unknown = sorted(set(datasets) - {"train", "eval"})
    if unknown:
        raise ConfigError(f"datasets: unknown key {unknown[0]!r}; give train and eval")
    if not config.data.train and "train" not in datasets:
        raise ConfigError("data.train: no source; name one, or hand fit() a data set")
    has_eval = bool(config.data.eval) or bool(datasets.get("eval"))
    for field in ("eval_steps", "metric_for_best_model"):
        if getattr(config.train, field) is not None and not has_eval:
            raise ConfigError(f"train.{field}: has no effect without data.eval")
    metric = config.train.metric_for_best_model
    if metric is not None:
        known = _metric_names(_eval_names(config, datasets))
        if metric not in known:
            raise ConfigError(
                f"train.metric_for_best_model: evaluation gives no {metric!r}; it gives "
                + ", ".join(known)
            )
    section = config.tracking.wandb
    if section is not None and choose_mode(section) == "online" and not has_key():
        raise ConfigError(
            "tracking.wandb.mode: online needs a key: set WANDB_API_KEY, or use mode: offline"
        )
    load_model_config(config.model, load_tokenizer(config.model))


def _eval_names(config: RunConfig, datasets: dict[str, Any]) -> list[str]:
    given = datasets.get("eval")
    if given is None:
        return list(config.data.eval)
    return list(given) if isinstance(given, Mapping) else [""]


def _metric_names(sets: list[str]) -> list[str]:
    kinds = ("loss", "accuracy", "margin", "min_reward", "mean_reward", "max_reward", "ties")
    names = [f"{eval_dataset_name(name)}_{kind}" for name in sets for kind in kinds]
    return names if "" in sets else ["eval_loss", "eval_accuracy", *names]


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return the configuration with local paths made absolute: workers have another cwd."""
    plain = config.model_dump(mode="json")
    plain["run"]["output_dir"] = _absolute(plain["run"]["output_dir"])
    model = plain["model"]
    if os.path.exists(model["name_or_path"]):
        model["name_or_path"] = os.path.abspath(model["name_or_path"])
    if model["chat_template_path"] is not None:
        model["chat_template_path"] = os.path.abspath(model["chat_template_path"])
    for source in (*plain["data"]["train"], *plain["data"]["eval"].values()):
        source["path"] = _absolute(source["path"])
    return RunConfig.model_validate(plain)


def _absolute(path: str) -> str:
    has_scheme = "://" in path or path.startswith(("hub:", "quickstart:"))
    return path if has_scheme else os.path.abspath(os.path.expanduser(path))


def _finished(folder: RunFolder, config: RunConfig) -> FitResult | None:
    """Return the result of a finished run of this name, after checking that it may be taken up."""
    before = folder.read_json("config.json")
    if before is None:
        if config.run.resume == "must":
            raise ConfigError(f"run.resume: must, but there is no run at {folder.url}")
        return None
    if config.run.resume == "never":
        raise ConfigError(
            f"run.name: there is a run at {folder.url} already and run.resume is never; give "
            "another run.name, or remove the folder"
        )
    changed = [
        field
        for field in differing_fields(RunConfig.model_validate(before), config)
        if field not in ("run.resume", "scaling.max_failures")
    ]
    if changed:
        raise ConfigError(
            f"run.name: the run at {folder.url} was started with another configuration "
            f"({', '.join(changed)}); give another run.name, or go back to those settings"
        )
    result = folder.read_json("result.json")
    if result is None:
        return None
    logger.warning("%s is finished already; nothing to do", folder.url)
    return _as_fit_result(result, folder)


def _as_fit_result(result: dict[str, Any], folder: RunFolder) -> FitResult:
    return FitResult(result["metrics"], result["model_dir"], folder.url, result["dropped"])


def _run_id(folder: RunFolder) -> str:
    """Return an id that stays the same over restarts of this run."""
    known = folder.read_json("run.json")
    if known is None:
        known = {"wandb_run_id": uuid.uuid4().hex[:8]}
        folder.write_json("run.json", known)
    return known["wandb_run_id"]


# --- data -----------------------------------------------------------------------------------------


def _open_streams(
    config: RunConfig, datasets: dict[str, Any], resources: Resources
) -> dict[str | None, PairStream]:
    """Open the training rows (under None) and each evaluation set (under its name)."""
    raw: dict[str | None, RawRows] = {}
    if "train" in datasets:
        raw[None] = hand_over(datasets["train"], label="train")
    else:
        raw[None] = open_sources(_labelled(config.data.train), field="data.train")
    given = datasets.get("eval")
    if given is not None:
        sets = given if isinstance(given, Mapping) else {"": given}
        for name, rows in sets.items():
            raw[name] = hand_over(rows, label=eval_dataset_name(name))
    else:
        for name, source in config.data.eval.items():
            label = eval_dataset_name(name)
            raw[name] = open_sources([(label, source)], field=f"data.eval.{name}".rstrip("."))
    return {
        name: tokenize_rows(
            rows, model=config.model, data=config.data, num_cpus=resources.cpus_per_task
        )
        for name, rows in raw.items()
    }


def _labelled(sources: Sequence[Source]) -> list[tuple[str, Source]]:
    """Name each source by its file, made unique."""
    labels: list[tuple[str, Source]] = []
    for source in sources:
        stem = os.path.basename(source.path.rstrip("/*")).split(".")[0] or "source"
        stem = stem.replace(":", "-")
        taken = [label for label, _ in labels]
        number = sum(label == stem or label.startswith(f"{stem}-") for label in taken)
        labels.append((f"{stem}-{number + 1}" if stem in taken else stem, source))
    return labels


def _survey(
    streams: dict[str | None, PairStream], data: DataSection, folder: RunFolder
) -> tuple[dict[str | None, PairStream], DataReport]:
    """Account for every row before anything is trained, and write the account down.

    Evaluation sets are kept tokenized in the object store: they are read many times.
    """
    account: dict[str, Any] = {}
    reports: dict[str | None, DataReport] = {}
    for name, stream in streams.items():
        if name is not None:
            stream = streams[name] = PairStream(stream.files, stream.dataset.materialize())
        reports[name] = stream.survey()
        account |= reports[name].as_dict()
        for label, source in reports[name].sources.items():
            if source.kept_rows:
                folder.write_json_lines(f"dropped/{label}.jsonl", source.kept_rows)
    folder.write_json(REPORT, {"sources": account})
    for name, report in reports.items():
        field = "data.train" if name is None else f"data.eval.{name}".rstrip(".")
        check_report(report, data, field=field)
        if report.dropped:
            counts = ", ".join(f"{n} {reason}" for reason, n in report.dropped.most_common())
            logger.warning(
                "%s: %d of %d rows dropped (%s); see %s",
                field, report.dropped.total(), report.num_rows, counts, folder.path("dropped"),
            )  # fmt: skip
    return streams, reports[None]


# --- training -------------------------------------------------------------------------------------


def _train(
    config: RunConfig,
    job: Job,
    streams: dict[str | None, PairStream],
    resources: Resources,
    folder: RunFolder,
) -> dict[str, Any]:
    train = config.train
    plans = {
        "train": FeedPlan(
            batch_size=train.batch_size,
            max_tokens=train.max_tokens_per_micro_batch,
            seed=config.run.seed if config.data.shuffle else None,
            buffer_size=config.data.shuffle_buffer_size,
        )
    }
    eval_plan = FeedPlan(_EVAL_PAIRS_A_STEP, train.max_tokens_per_micro_batch)
    plans |= {eval_dataset_name(name): eval_plan for name in job.eval_sets}
    best = train.metric_for_best_model is not None
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"job": job},
        scaling_config=ray.train.ScalingConfig(
            num_workers=config.scaling.num_workers,
            use_gpu=resources.use_gpu,
            resources_per_worker=resources.per_worker,
        ),
        datasets={
            "train" if name is None else eval_dataset_name(name): stream.dataset
            for name, stream in streams.items()
        },
        dataset_config=FeedConfig(plans),
        run_config=ray.train.RunConfig(
            name="checkpoints",
            storage_path=folder.url,
            failure_config=ray.train.FailureConfig(
                max_failures=config.scaling.max_failures, controller_failure_limit=0
            ),
            checkpoint_config=ray.train.CheckpointConfig(
                num_to_keep=train.save_total_limit,
                checkpoint_score_attribute=SCORE if best else None,
            ),
        ),
    )
    with _showing(job.board):
        try:
            value = trainer.fit().return_value
        except ray.train.TrainingFailedError as error:
            raise _explained(error, job, resources) from error
    failure = ray.get(job.board.failure.remote())
    if failure is not None:
        raise failure
    return value


def _explained(error: Exception, job: Job, resources: Resources) -> Exception:
    """Return the error that a worker posted, or say what Ray says."""
    with contextlib.suppress(RayActorError):
        failure = ray.get(job.board.failure.remote())
        if failure is not None:
            return failure
    if "StartupTimeout" in repr(error) or "StartupTimeout" in str(error):
        return RayrmError(
            f"scaling: {resources.num_workers} workers x {resources.per_worker} were not placed in "
            f"time; the cluster has {ray.cluster_resources()}"
        )
    return RayrmError(f"training failed: {error}")


class Board:
    """Actor between the first worker and the driver: progress to show, and a failure to raise."""

    def __init__(self) -> None:
        self._notes: list[str] = []
        self._step = 0
        self._num_steps = 0
        self._line: dict[str, Any] = {}
        self._failure: RayrmError | None = None

    def start(self, headline: str, step: int, num_steps: int) -> None:
        """Training starts, or starts again from a checkpoint."""
        self._notes.append(headline if step == 0 else f"{headline}; going on from step {step}")
        self._step, self._num_steps = step, num_steps

    def note(self, text: str) -> None:
        """Take a line of text for the user."""
        self._notes.append(text)

    def update(self, line: dict[str, Any]) -> None:
        """Take a line of metrics."""
        self._step = line["step"]
        self._line = self._line | line

    def read(self) -> tuple[list[str], int, int, dict[str, Any]]:
        """Return the notes not read yet, the step, the number of steps and the latest metrics."""
        notes, self._notes = self._notes, []
        return notes, self._step, self._num_steps, self._line

    def fail(self, error: RayrmError) -> None:
        """Post an error that a restart would only meet again."""
        self._failure = error

    def failure(self) -> RayrmError | None:
        """Return what was posted."""
        return self._failure


@contextlib.contextmanager
def _showing(board: Any) -> Iterator[None]:
    """Show the board's progress while the block runs: a bar, or lines where there is no terminal."""
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(board, done), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join(timeout=5)


def _watch(board: Any, done: threading.Event) -> None:
    bar: tqdm[Any] | None = None
    shown = 0
    while True:
        finished = done.wait(0.5)
        try:
            notes, step, num_steps, line = ray.get(board.read.remote(), timeout=5)
        except Exception:  # the bar must never end a run
            return
        for note in notes:
            tqdm.write(note, file=sys.stderr)
        if bar is None and num_steps:
            bar = tqdm(total=num_steps, initial=step, unit="step", disable=not sys.stderr.isatty())
        if bar is not None and step != shown:
            shown = step
            if bar.disable and line:
                print(f"step {step}/{num_steps}  {_short(line)}", file=sys.stderr, flush=True)
            bar.n = step
            bar.set_postfix_str(_short(line))
        if finished:
            if bar is not None:
                bar.close()
            return


def _short(line: dict[str, Any]) -> str:
    names = ("loss", "accuracy", "eval_loss", "eval_accuracy", "pairs_per_second")
    return "  ".join(f"{name} {line[name]:.4g}" for name in names if name in line)


# --- Ray ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _ray_running(config: RunConfig) -> Iterator[None]:
    """Use the Ray that is there, or start one of our own and stop it at the end."""
    if ray.is_initialized():
        yield
        return
    try:
        ray.init(address="auto", log_to_driver=False)
    except ConnectionError:
        ray.init(
            address="local",
            num_cpus=local_cpus(config.scaling),
            include_dashboard=False,
            log_to_driver=False,
        )
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _quiet_ray_data() -> Iterator[None]:
    """Keep Ray Data's plans and bars off the terminal; its warnings stay."""
    context = ray.data.DataContext.get_current()
    bars, context.enable_progress_bars = context.enable_progress_bars, False
    data_logger = logging.getLogger("ray.data")
    level = data_logger.level
    data_logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        context.enable_progress_bars = bars
        data_logger.setLevel(level)


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Set environment variables that are unset, and unset them again."""
    own = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own:
            del os.environ[name]
