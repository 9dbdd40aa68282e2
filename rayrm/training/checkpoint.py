"""Checkpoints through Ray Train: complete, or not there at all."""

import dataclasses
import json
import os
import shutil
import tempfile
from functools import partial
from glob import glob
from typing import Any

import ray.train
from pyarrow.fs import LocalFileSystem

from rayrm.errors import CheckpointError
from rayrm.training.commits import ASIDE, CHECKPOINTS, PROGRESS, Saved, complete_checkpoints
from rayrm.training.engine import Engine
from rayrm.training.job import SCORE, Job
from rayrm.training.loop import Progress
from rayrm.training.storage import RunFolder


def save_checkpoint(engine: Engine, progress: Progress, job: Job, *, score: float) -> None:
    """Write every rank's state aside; it is uploaded, merged and committed in the background.

    All ranks must call this at the same step. Training goes on while the files travel; what is not
    committed when a worker is lost was never there. ``score`` is that of these weights.

    Raises:
        CheckpointError: the state cannot be written here. An upload that fails ends the run, too.
    """
    folder = tempfile.mkdtemp(prefix=_local_prefix(job))
    try:
        engine.save(folder)
        if engine.rank == 0:
            _write_json(os.path.join(folder, "config.json"), job.config)
            state = {**dataclasses.asdict(progress), "world_size": engine.world_size}
            _write_json(os.path.join(folder, PROGRESS), {**state, "score": score})
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise _not_written(progress.step, folder, engine, job, error) from error
    upload = partial(_upload, step=progress.step, engine=engine, job=job)
    ray.train.report(
        {SCORE: score, "step": progress.step},
        checkpoint=ray.train.Checkpoint.from_directory(folder),
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
        checkpoint_upload_fn=upload,
        delete_local_checkpoint_after_upload=True,
    )
    if engine.rank == 0:
        job.board.saved.remote()


def _upload(
    checkpoint: ray.train.Checkpoint, name: str, *, step: int, engine: Engine, job: Job
) -> ray.train.Checkpoint:
    """Upload this rank's files; on a disk the last rank puts the whole in its place.

    What fails for want of space fails again after a restart.
    """
    storage: Any = ray.train.get_context().get_storage()
    place = f"{storage.experiment_fs_path}/{name}"
    filesystem = storage.storage_filesystem
    try:
        if not isinstance(filesystem, LocalFileSystem):  # object stores cannot move folders
            return storage.persist_current_checkpoint(checkpoint, name)
        aside = storage.persist_current_checkpoint(checkpoint, ASIDE + name).path
        if ray.get(job.board.arrive.remote(name)) == engine.world_size:
            filesystem.move(aside, place)
    except OSError as error:
        told = _not_written(step, place, engine, job, error)
        ray.get(job.board.fail.remote(told))
        raise told from error
    return ray.train.Checkpoint(place, filesystem)


def _not_written(
    step: int, place: str, engine: Engine, job: Job, error: OSError
) -> CheckpointError:
    saved = complete_checkpoints(RunFolder(job.run_dir))
    stands = f"that of step {saved[-1].step} stands" if saved else "there is none before it"
    return CheckpointError(
        f"checkpoint of step {step}: cannot be written to {place} ({error}); it takes "
        f"{engine.state_bytes / 1e6:,.1f} MB; {stands}: make room and start again"
    )


def _local_prefix(job: Job) -> str:
    return f"rayrm-checkpoint-{job.run_id}-"


def restore_checkpoint(engine: Engine, job: Job) -> Progress:
    """Load the run's last complete checkpoint, or return fresh progress where there is none.

    Raises:
        CheckpointError: it is incomplete, or of another model.
    """
    for left in glob(os.path.join(tempfile.gettempdir(), f"{_local_prefix(job)}*")):
        shutil.rmtree(left, ignore_errors=True)  # of a killed worker; nobody saves before all load
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None and job.earlier:
        checkpoint = _earlier_checkpoint(job, job.earlier[-1])
    if checkpoint is None:
        return Progress()
    progress = load_checkpoint(engine, checkpoint)
    progress.resumed += 1
    return progress


def load_checkpoint(engine: Engine, checkpoint: ray.train.Checkpoint) -> Progress:
    """Load one checkpoint into the engine and return the progress it was written at.

    Raises:
        CheckpointError: it is incomplete, or of another model.
    """
    with checkpoint.as_directory() as folder:
        try:
            with open(os.path.join(folder, PROGRESS), encoding="utf-8") as file:
                state = json.load(file)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{checkpoint.path}: not a complete checkpoint") from error
        engine.load(folder, world_size=state.pop("world_size"))
    del state["score"]
    return Progress(**state)


def _write_json(path: str, value: Any) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)


def best_checkpoint(job: Job) -> ray.train.Checkpoint:
    """Return the run's checkpoint with the highest score."""
    reported = [
        (entry.metrics[SCORE], entry.checkpoint)
        for entry in ray.train.get_all_reported_checkpoints()
    ]
    earlier = [(saved.score, _earlier_checkpoint(job, saved)) for saved in job.earlier]
    _, best = max(earlier + reported, key=lambda scored: scored[0])
    return best


def _earlier_checkpoint(job: Job, saved: Saved) -> ray.train.Checkpoint:
    return ray.train.Checkpoint(f"{job.run_dir.rstrip('/')}/{CHECKPOINTS}/{saved.name}")
