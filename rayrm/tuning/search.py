"""``sweep``: trials of ``fit`` on Ray Tune, and what they answer."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray import tune

from rayrm.cluster import Resources, ray_running
from rayrm.config.loader import Source, differing_fields, dump_config, load_sweep
from rayrm.config.schema import SweepConfig, WorkerRange
from rayrm.config.space import Values, draw_trials, trial_config
from rayrm.data.intake import Rows, check_reports
from rayrm.errors import ConfigError
from rayrm.launch import read_rows_with, resources_for, write_reports
from rayrm.preflight import (
    check_arguments,
    check_before_start,
    check_search,
    with_absolute_paths,
)
from rayrm.training.storage import RunFolder
from rayrm.tuning.answer import ANSWER, SweepResult, answer, read_answer
from rayrm.tuning.progress import Told
from rayrm.tuning.proposals import Proposals, strategy_of
from rayrm.tuning.runners import start_runners
from rayrm.tuning.schedulers import scheduler_for
from rayrm.tuning.trial import SweepJob, Trial, trial_name

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)

_TUNE = "tune"
_MAY_CHANGE = ("run.resume", "scaling.", "search.max_concurrent")
_SAME_TOKENS = ("train.", "loss.", "model.lora.", "model.peft.", "model.disable_dropout")
"""Fields by which trials may differ that train on the same tokens."""


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
    if store.exists(ANSWER) and store.exists("config.json"):
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
        return answer(replace(job, config=settled), trials, len(draws))


def _nothing_to_do(folder: str) -> SweepResult:
    result = read_answer(folder)
    logger.warning("%s is finished already; nothing to do", folder)
    if failed := list(result.trials["status"]).count("failed"):
        logger.warning("%d trials failed; to try them again, remove %s/%s", failed, folder, ANSWER)
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
            callbacks=[Told(search)],
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
