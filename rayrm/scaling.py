"""What workers and data tasks ask of the cluster, so that neither starves the other."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from rayrm.config.schema import ScalingSection
from rayrm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Resources:
    """Ray resources of a run."""

    num_workers: int
    use_gpu: bool
    per_worker: dict[str, float]
    cpus_per_task: float
    """Logical CPUs of one tokenizing task."""


def choose_resources(
    scaling: ScalingSection, cluster: Mapping[str, float], available: Mapping[str, float]
) -> Resources:
    """Return what to ask for: as given, or what leaves a data task its place.

    Tokenizing goes on while the workers train. On a cluster where workers hold every CPU it would
    wait for ever, and the workers for it.

    Args:
        scaling: the user's wishes.
        cluster: Ray's total resources.
        available: what of them is free; a caller that runs in a task holds some.

    Raises:
        ConfigError: the given resources leave no CPU to a data task, or there are too few GPUs.
    """
    workers = scaling.num_workers
    gpus = cluster.get("GPU", 0.0)
    if scaling.use_gpu is True and 0 < gpus < workers:
        raise ConfigError(
            f"scaling: {workers} workers need {workers} GPUs, but the cluster has {gpus:g}; lower "
            "scaling.num_workers"
        )
    use_gpu = gpus >= workers if scaling.use_gpu == "auto" else scaling.use_gpu
    if scaling.resources_per_worker is not None:
        per_worker = dict(scaling.resources_per_worker)
        _check_room(workers, per_worker.get("CPU", 0.0), cluster.get("CPU", 0.0))
        return Resources(workers, use_gpu, per_worker, cpus_per_task=1.0)
    budget = max(available.get("CPU", 0.0), 0.5)
    task = 1.0 if budget >= 2 else budget / 2
    cpus = min(1.0, (budget - task) / workers)
    per_worker = {"CPU": max(int(cpus * 100) / 100, 0.01)}
    if use_gpu:
        per_worker["GPU"] = 1.0
    return Resources(workers, use_gpu, per_worker, cpus_per_task=task)


def _check_room(workers: int, cpus: float, total: float) -> None:
    taken = workers * cpus
    if taken <= total < taken + 1:
        raise ConfigError(
            f"scaling: {workers} workers x {cpus:g} CPU + 1 CPU for data tasks = {taken + 1:g} "
            f"CPUs, but the Ray cluster has {total:g}; lower scaling.resources_per_worker or "
            "scaling.num_workers"
        )


def local_cpus(scaling: ScalingSection) -> int:
    """Return the logical CPUs of a Ray of our own: this machine's, or as many as are asked for."""
    asked = (scaling.resources_per_worker or {}).get("CPU", 0.0) * scaling.num_workers
    return max(os.cpu_count() or 1, int(asked) + 1, 2)
