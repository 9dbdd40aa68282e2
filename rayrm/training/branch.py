"""A run that begins with the checkpoint of another, under a configuration of its own."""

import os
import shutil
import time

from rayrm.config.schema import TrainSection
from rayrm.errors import CheckpointError
from rayrm.training.commits import CHECKPOINTS, SCHEDULE, complete_checkpoints
from rayrm.training.storage import RunFolder
from rayrm.training.tracking import METRICS

_LOOK_SECONDS = 0.1


def copy_progress(run: RunFolder, place: str, *, step: int, seconds: float) -> int:
    """Copy a run's first checkpoint from ``step`` on, and its metrics, while it goes on training.

    Args:
        run: a local folder.
        place: an empty folder, which gets ``checkpoints/`` and the metrics.
        step: of an evaluation; the checkpoint of this step may still be on its way.
        seconds: so long it is waited for.

    Returns:
        The step of the checkpoint.

    Raises:
        CheckpointError: there was none in time.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        saved = next((one for one in complete_checkpoints(run) if one.step >= step), None)
        if saved is None:
            time.sleep(_LOOK_SECONDS)
            continue
        inner = f"{CHECKPOINTS}/{saved.name}"
        try:
            shutil.copytree(run.local_path(inner), os.path.join(place, inner))
        except (OSError, shutil.Error):  # a newer one took its place meanwhile
            shutil.rmtree(os.path.join(place, CHECKPOINTS), ignore_errors=True)
            continue
        shutil.copy(run.local_path(METRICS), place)
        return saved.step
    raise CheckpointError(f"{run.url}: no checkpoint of step {step} in {seconds:g} seconds")


def begin_branch(place: str, run: RunFolder, *, before: TrainSection, now: TrainSection) -> None:
    """Let a new run begin with what ``copy_progress`` left in ``place``, at its own learning rate.

    Metrics after the checkpoint's step are cut when the run starts. One that has begun stays.
    """
    if complete_checkpoints(run):
        return
    run.create()
    shutil.copytree(place, run.local_path("."), dirs_exist_ok=True)
    for saved in complete_checkpoints(run):
        name = f"{CHECKPOINTS}/{saved.name}/{SCHEDULE}"
        schedule = run.read_json(name)
        for rates in schedule.keys() & {"base_lrs", "_last_lr"}:
            scaled = [rate * now.learning_rate / before.learning_rate for rate in schedule[rates]]
            schedule[rates] = scaled
        run.write_json(name, schedule)
