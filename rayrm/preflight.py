"""What can be found wrong, and made plain, before Ray starts."""

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from rayrm.config.loader import AnyConfig
from rayrm.config.schema import RunConfig, SearchSection, SweepConfig
from rayrm.config.space import check_space
from rayrm.data.columns import COLUMNS
from rayrm.data.intake import eval_names
from rayrm.data.sources import list_files
from rayrm.errors import ConfigError
from rayrm.model.build import check_reward_model
from rayrm.model.tokenizer import load_tokenizer
from rayrm.training.schedule import check_schedule
from rayrm.training.tracking import choose_mode, has_key

_HANDED = ("ray", "datasets")
"""Packages whose data sets are taken."""
_IN_FLIGHT = (
    "train.learning_rate",
    "train.weight_decay",
    "train.max_grad_norm",
    "loss.center_rewards_coefficient",
    "loss.label_smoothing",
)


def check_arguments(overrides: Any, datasets: Any) -> None:
    """Tell of arguments of ``fit`` and ``sweep`` that are of another type than asked for.

    Raises:
        ConfigError: one is.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"overrides: {overrides!r} is one text; give a list of them")
    if not isinstance(datasets, Mapping | None):
        raise ConfigError(
            f"datasets: a {type(datasets).__name__}; give {{'train': rows, 'eval': rows}}"
        )


def check_before_start(config: RunConfig, datasets: dict[str, Any]) -> None:
    """Find what can be found wrong before Ray starts, and tell it all at once.

    Raises:
        ConfigError: a line a fault.
    """
    faults = [
        *_faults_of_data(config, datasets),
        *_faults_of_evaluation(config, datasets),
        *_faults_of_tracking(config),
        *_faults_of_model(config),
        *_fault_of(partial(check_schedule, config.train)),
    ]
    if faults:
        raise ConfigError("\n".join(faults))


def check_search(config: SweepConfig, datasets: Mapping[str, Any]) -> None:
    """Find what is wrong with what a sweep tries and how it judges, and tell it all at once.

    Raises:
        ConfigError: a line a fault.
    """
    faults = [*_fault_of(partial(check_space, config)), *_faults_of_search(config, datasets)]
    if faults:
        raise ConfigError("\n".join(faults))


def _faults_of_search(config: SweepConfig, datasets: Mapping[str, Any]) -> Iterator[str]:
    metric, eval_sets = config.search.metric, eval_names(config, datasets)
    if not eval_sets:
        yield f"search.metric: there is no {metric} without data.eval"
    else:
        yield from _faults_of_metric("search.metric", metric, list(eval_sets))
    scheduler = config.search.scheduler
    if scheduler != "none" and config.train.eval_steps is None:
        yield (
            f"search.scheduler: {scheduler} compares trials while they train: set "
            "train.eval_steps, or take scheduler: none"
        )
    if scheduler == "pbt":
        yield from _faults_of_population(config.search)


def _faults_of_population(search: SearchSection) -> Iterator[str]:
    for field in search.space:
        if field not in _IN_FLIGHT:
            yield (
                f"search.space.{field}: pbt changes values while it trains, and cannot change "
                f"this one; it can {', '.join(_IN_FLIGHT)}"
            )
    if search.searcher != "random":
        yield f"search.searcher: pbt draws its population at random, not by {search.searcher}"
    if search.repeats > 1:
        yield "search.repeats: pbt judges a population, not configurations; leave it at 1"
    if search.num_samples < 2:
        yield "search.num_samples: a population has at least 2 trials"


def _faults_of_data(config: RunConfig, datasets: dict[str, Any]) -> Iterator[str]:
    for name in sorted(set(datasets) - {"train", "eval"}):
        yield f"datasets: unknown key {name!r}; give train and eval"
    given = {**eval_names(config, datasets)} if "eval" in datasets else {}
    given |= {"train": datasets["train"]} if "train" in datasets else {}
    for name, rows in given.items():
        if (
            not isinstance(rows, list | tuple)
            and type(rows).__module__.split(".")[0] not in _HANDED
        ):
            yield (
                f"datasets: {name!r} is a {type(rows).__name__}; hand over a ray.data.Dataset, a "
                "datasets.Dataset or a list of rows; a path goes into data.train or data.eval"
            )
    if not config.data.train and "train" not in datasets:
        yield "data.train: no source; name one, or hand fit() a data set"
    for name in config.data.columns:
        if name not in COLUMNS:
            yield (
                f"data.columns: there is no standard column {name!r} to rename; there are "
                + ", ".join(sorted(COLUMNS))
            )
    sources = [] if "train" in datasets else [("data.train", one) for one in config.data.train]
    if "eval" not in datasets:
        sources += [(f"data.eval.{name}".rstrip("."), s) for name, s in config.data.eval.items()]
    for field, source in sources:
        if not source.path.startswith("hub:"):
            yield from _fault_of(partial(list_files, source.path, label="", field=field))


def _faults_of_evaluation(config: RunConfig, datasets: dict[str, Any]) -> Iterator[str]:
    eval_sets = eval_names(config, datasets)
    for field in ("eval_steps", "metric_for_best_model"):
        if getattr(config.train, field) is not None and not eval_sets:
            yield f"train.{field}: has no effect without data.eval; set it to null"
    metric = config.train.metric_for_best_model
    if eval_sets and metric is not None:
        yield from _faults_of_metric("train.metric_for_best_model", metric, list(eval_sets))


def _faults_of_metric(field: str, metric: str, eval_sets: list[str]) -> Iterator[str]:
    known = _metric_names(eval_sets)
    if metric not in known:
        yield f"{field}: evaluation gives no {metric!r}; it gives {', '.join(known)}"


def _faults_of_tracking(config: RunConfig) -> Iterator[str]:
    section = config.tracking.wandb
    if section is not None and choose_mode(section) == "online" and not has_key():
        yield "tracking.wandb.mode: online needs a key: set WANDB_API_KEY, or use mode: offline"


def _faults_of_model(config: RunConfig) -> Iterator[str]:
    def build_without_weights() -> None:
        tokenizer = load_tokenizer(config.model)
        check_reward_model(config.model, tokenizer, shared_prompt=config.train.shared_prompt)

    yield from _fault_of(build_without_weights)


def _fault_of(check: Callable[[], object]) -> Iterator[str]:
    try:
        check()
    except ConfigError as error:
        yield str(error)


def _metric_names(sets: list[str]) -> list[str]:
    kinds = ("loss", "accuracy", "margin", "min_reward", "mean_reward", "max_reward", "ties")
    names = [f"{name}_{kind}" for name in sets for kind in kinds]
    return names if "eval" in sets else ["eval_loss", "eval_accuracy", *names]


def with_absolute_paths(config: AnyConfig) -> AnyConfig:
    """Return the configuration with local paths made absolute: workers have another cwd."""
    plain = config.model_dump(mode="json")
    plain["run"]["output_dir"] = _absolute(plain["run"]["output_dir"])
    model = plain["model"]
    own_folder = _absolute(model["name_or_path"])
    if model["name_or_path"] != "quickstart" and os.path.exists(own_folder):
        model["name_or_path"] = own_folder
    for field in ("chat_template_path", "adapter_path"):
        if model[field] is not None:
            model[field] = _absolute(model[field])
    for source in (*plain["data"]["train"], *plain["data"]["eval"].values()):
        source["path"] = _absolute(source["path"])
    return type(config).model_validate(plain)


def _absolute(path: str) -> str:
    has_scheme = "://" in path or path.startswith(("hub:", "quickstart:"))
    return path if has_scheme else os.path.abspath(os.path.expanduser(path))
