"""The Ray that a run uses: found or started, and what workers and data tasks ask of it."""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import ray

from rayrm.config.schema import ScalingSection
from rayrm.errors import ConfigError, RayrmError, own_error

logger = logging.getLogger(__name__)

_SETTINGS = {
    # every report waits for the controller's next poll: 2 s by Ray's default
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.25",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    # an actor a run that tells workers of a node to be lost; they save when they are told to stop
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}


_HEALTH_SECONDS = 600
"""Ray Train's own limit for a worker that does not answer."""
_PATIENCE_SECONDS = 10
"""After so long the user is told what is waited for."""
_START_SECONDS = 60
"""Ray Train's own limit for one attempt to place all workers."""
_WORKERS_A_CPU = 10

KEEP_FREED_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Environment of workers that train on their CPU: glibc keeps what is freed, in huge pages.

By default it gives large blocks back to the kernel and asks for them again, cleared, some thousand
times a step, and always in a thread such as Ray Train runs: measured, a quarter of a step's time.
"""


@contextlib.contextmanager
def ray_running(scaling: ScalingSection) -> Iterator[bool]:
    """Use the Ray that is there, or start one of our own and stop it at the end.

    Yields:
        Whether it may grow: our own has what this machine has, and never more.
    """
    health = min(_HEALTH_SECONDS, 60 * scaling.timeout_minutes)
    settings = {
        **_SETTINGS,
        "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": str(health),
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(_start_seconds(scaling)),
    }
    with _environment(settings), _quiet_ray_data():
        if ray.is_initialized():
            yield True
            return
        may_grow = _start(scaling)
        try:
            yield may_grow
        finally:
            ray.shutdown()


def _start(scaling: ScalingSection) -> bool:
    """Connect to the cluster of RAY_ADDRESS or of ``ray start``; without one, start our own.

    Returns:
        Whether there was a cluster.
    """
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
    _check_answers(os.environ.get("RAY_ADDRESS", ""))
    with children_in_own_group():
        try:
            ray.init(num_cpus=_local_cpus(scaling), include_dashboard=False, **quiet)
            return False
        except ValueError:  # there is a cluster, and its CPUs are not ours to choose
            ray.init(**quiet)
            return True
        except SystemExit:  # so it answers SIGTERM while it starts, with 1; later with the signal
            sys.exit(signal.SIGTERM)


def _check_answers(address: str) -> None:
    """Refuse a cluster that is not there: Ray itself would go on trying for ten minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_PATIENCE_SECONDS).close()
    except OSError as error:
        raise ConfigError(
            f"RAY_ADDRESS: nothing answers at {address} ({error}); start the cluster, or unset the "
            "variable to train on this machine alone"
        ) from error


@contextlib.contextmanager
def children_in_own_group() -> Iterator[None]:
    """Start processes in a process group apart, in which a signal to this one's does not end them.

    ``timeout``, systemd and batch systems send SIGTERM to a whole group: Ray would die under a
    driver that is finishing its step.
    """
    own = os.getpgid(0)
    founder = subprocess.Popen(["true"], process_group=0)
    try:
        with contextlib.suppress(PermissionError):  # the leader of a session stays where it is
            os.setpgid(0, founder.pid)
        yield
    finally:
        with contextlib.suppress(PermissionError):
            os.setpgid(0, own)
        founder.wait()


@contextlib.contextmanager
def _quiet_ray_data() -> Iterator[None]:
    """Keep Ray Data's plans and statistics off the terminal; its bars and warnings stay.

    So do the tracebacks of errors that are told in a sentence.
    """
    data_logger = logging.getLogger("ray.data")
    level, handlers = data_logger.level, [*data_logger.handlers]
    data_logger.setLevel(logging.WARNING)
    for handler in handlers:
        handler.addFilter(_is_not_ours)
    try:
        yield
    finally:
        data_logger.setLevel(level)
        for handler in handlers:
            handler.removeFilter(_is_not_ours)


def _is_not_ours(record: logging.LogRecord) -> bool:
    """Whether a log record is about no error of ours, which it may be while it is handled."""
    told = record.exc_info or sys.exc_info()
    return own_error(told[1]) is None


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


@dataclass(frozen=True, slots=True)
class Resources:
    """Ray resources of a run."""

    num_workers: int | tuple[int, int]
    """A number, or the fewest and the most."""
    use_gpu: bool
    per_worker: dict[str, float]
    cpus_per_task: float
    """Logical CPUs of one tokenizing task."""

    def __str__(self) -> str:
        """Tell what the workers need."""
        number = self.num_workers
        told = str(number) if isinstance(number, int) else f"{number[0]} to {number[1]}"
        return f"{told} worker(s) x {self.per_worker}"


def start_attempts(scaling: ScalingSection) -> int:
    """Return how often Ray Train may try again to place the workers until the timeout is over."""
    attempts = ceil(60 * scaling.timeout_minutes / _start_seconds(scaling))
    return max(scaling.max_failures, attempts - 1)


def _start_seconds(scaling: ScalingSection) -> float:
    """Return the limit of one attempt, of which there are as many as restarts at least."""
    share = 60 * scaling.timeout_minutes / (scaling.max_failures + 1)
    return max(min(_START_SECONDS, share), 1.0)


def wait_for_data_task(resources: Resources, *, seconds: float) -> None:
    """Wait until a data task finds its CPU: others may hold all, or a cluster is only growing.

    Raises:
        RayrmError: none was free in time.
    """
    cpus = resources.cpus_per_task
    task: Any = ray.remote(num_cpus=cpus)(_do_nothing)
    found = task.remote()
    patience = min(_PATIENCE_SECONDS, seconds)
    done, _ = ray.wait([found], timeout=patience)
    if not done:
        logger.warning("waiting until %g CPU is free for a data task", cpus)
        done, _ = ray.wait([found], timeout=seconds - patience)
    if done:
        ray.get(found)
        return
    ray.cancel(found)
    raise RayrmError(
        f"scaling: no {cpus:g} CPU was free for a data task in {seconds / 60:g} minutes; the "
        f"cluster has {ray.cluster_resources().get('CPU', 0):g}, of which "
        f"{ray.available_resources().get('CPU', 0):g} are free (scaling.timeout_minutes)"
    )


def _do_nothing() -> None:
    pass


def choose_resources(
    scaling: ScalingSection,
    cluster: Mapping[str, float],
    available: Mapping[str, float],
    *,
    may_grow: bool = True,
) -> Resources:
    """Return what to ask for: as given, or what leaves a data task its place.

    Tokenizing goes on while the workers train. On a cluster where workers hold every CPU it would
    wait for ever, and the workers for it.

    Args:
        scaling: the user's wishes.
        cluster: Ray's total resources.
        available: what of them is free; a caller that runs in a task holds some.
        may_grow: whether what is missing may still come.

    Raises:
        ConfigError: the given resources leave no CPU to a data task, there are too few GPUs, or
            far more workers than CPUs.
    """
    fewest, workers = _bounds(scaling)
    num_workers = workers if fewest == workers else (fewest, workers)
    gpus = cluster.get("GPU", 0.0)
    if scaling.use_gpu is True and gpus == 0 and not may_grow:
        raise ConfigError(
            "scaling.use_gpu: true, but this machine has no GPU that Ray sees; take auto, or "
            "connect to a cluster that has (RAY_ADDRESS)"
        )
    if scaling.use_gpu is True and 0 < gpus < fewest:
        raise ConfigError(
            f"scaling: {fewest} workers need {fewest} GPUs, but the cluster has {gpus:g}; lower "
            "scaling.num_workers"
        )
    use_gpu = gpus >= fewest if scaling.use_gpu == "auto" else scaling.use_gpu
    if scaling.resources_per_worker is not None:
        per_worker = dict(scaling.resources_per_worker)
        if scaling.use_gpu == "auto" and "GPU" in per_worker:
            use_gpu = per_worker["GPU"] > 0
        _check_room(fewest, per_worker.get("CPU", 0.0), cluster.get("CPU", 0.0))
        if not may_grow:
            _check_there(fewest, per_worker, cluster)
        return Resources(num_workers, use_gpu, per_worker, cpus_per_task=1.0)
    if fewest > _WORKERS_A_CPU * cluster.get("CPU", 0.0) > 0:
        raise ConfigError(
            f"scaling.num_workers: {fewest} workers on {cluster['CPU']:g} CPUs would each have "
            "less than a tenth of one; lower it, or say in scaling.resources_per_worker what one "
            "is to have"
        )
    budget = max(available.get("CPU", 0.0), 0.5)
    task = 1.0 if budget >= 2 else budget / 2
    cpus = min(1.0, (budget - task) / workers)
    per_worker = {"CPU": max(int(cpus * 100) / 100, 0.01)}
    if use_gpu:
        per_worker["GPU"] = 1.0
    return Resources(num_workers, use_gpu, per_worker, cpus_per_task=task)


def _bounds(scaling: ScalingSection) -> tuple[int, int]:
    """Return the fewest and the most workers."""
    asked = scaling.num_workers
    return (asked, asked) if isinstance(asked, int) else (asked.min, asked.max)


def _check_room(workers: int, cpus: float, total: float) -> None:
    taken = workers * cpus
    if taken <= total < taken + 1:
        raise ConfigError(
            f"scaling: {workers} workers x {cpus:g} CPU + 1 CPU for data tasks = {taken + 1:g} "
            f"CPUs, but the Ray cluster has {total:g}; lower scaling.resources_per_worker or "
            "scaling.num_workers"
        )


def _check_there(
    workers: int, per_worker: Mapping[str, float], cluster: Mapping[str, float]
) -> None:
    for name, amount in per_worker.items():
        if workers * amount > (there := cluster.get(name, 0.0)):
            raise ConfigError(
                f"scaling.resources_per_worker: {workers} workers x {amount:g} {name} are more "
                f"than this machine has ({there:g}); lower it, or connect to a cluster that has "
                "them (RAY_ADDRESS)"
            )


def _local_cpus(scaling: ScalingSection) -> int:
    """Return the logical CPUs of a Ray of our own: this machine's, or as many as are asked for."""
    asked = (scaling.resources_per_worker or {}).get("CPU", 0.0) * _bounds(scaling)[1]
    return max(os.cpu_count() or 1, int(asked) + 1, 2)
