"""What can be found wrong, and made plain, before Ray starts."""

import os
from typing import Any

from rayrm.config.schema import RunConfig
from rayrm.data.columns import COLUMNS
from rayrm.data.intake import eval_names
from rayrm.data.sources import list_files
from rayrm.errors import ConfigError
from rayrm.model.reward import load_config
from rayrm.model.tokenizer import load_tokenizer
from rayrm.training.tracking import choose_mode, has_key


def check_before_start(config: RunConfig, datasets: dict[str, Any]) -> None:
    """Find what can be found wrong before Ray starts."""
    unknown = sorted(set(datasets) - {"train", "eval"})
    if unknown:
        raise ConfigError(f"datasets: unknown key {unknown[0]!r}; give train and eval")
    if not config.data.train and "train" not in datasets:
        raise ConfigError("data.train: no source; name one, or hand fit() a data set")
    _check_data(config, datasets)
    eval_sets = eval_names(config, datasets)
    for field in ("eval_steps", "metric_for_best_model"):
        if getattr(config.train, field) is not None and not eval_sets:
            raise ConfigError(f"train.{field}: has no effect without data.eval")
    metric = config.train.metric_for_best_model
    if metric is not None:
        known = _metric_names(list(eval_sets))
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
    load_config(config.model, load_tokenizer(config.model))


def _check_data(config: RunConfig, datasets: dict[str, Any]) -> None:
    for name in config.data.columns:
        if name not in COLUMNS:
            raise ConfigError(
                f"data.columns: there is no standard column {name!r} to rename; there are "
                + ", ".join(sorted(COLUMNS))
            )
    sources = [] if "train" in datasets else [("data.train", one) for one in config.data.train]
    if "eval" not in datasets:
        sources += [(f"data.eval.{name}".rstrip("."), s) for name, s in config.data.eval.items()]
    for field, source in sources:
        if not source.path.startswith("hub:"):
            list_files(source.path, label="", field=field)


def _metric_names(sets: list[str]) -> list[str]:
    kinds = ("loss", "accuracy", "margin", "min_reward", "mean_reward", "max_reward", "ties")
    names = [f"{name}_{kind}" for name in sets for kind in kinds]
    return names if "eval" in sets else ["eval_loss", "eval_accuracy", *names]


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return the configuration with local paths made absolute: workers have another cwd."""
    plain = config.model_dump(mode="json")
    plain["run"]["output_dir"] = _absolute(plain["run"]["output_dir"])
    model = plain["model"]
    own_folder = _absolute(model["name_or_path"])
    if model["name_or_path"] != "quickstart" and os.path.exists(own_folder):
        model["name_or_path"] = own_folder
    if model["chat_template_path"] is not None:
        model["chat_template_path"] = _absolute(model["chat_template_path"])
    for source in (*plain["data"]["train"], *plain["data"]["eval"].values()):
        source["path"] = _absolute(source["path"])
    return RunConfig.model_validate(plain)


def _absolute(path: str) -> str:
    has_scheme = "://" in path or path.startswith(("hub:", "quickstart:"))
    return path if has_scheme else os.path.abspath(os.path.expanduser(path))
