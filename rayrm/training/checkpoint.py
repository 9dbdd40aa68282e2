"""Checkpoints through Ray Train: complete, or not there at all."""

import dataclasses
import json
import os
import shutil
import tempfile
from typing import Any

import ray.train

from rayrm.errors import CheckpointError
from rayrm.training.engine import Engine
from rayrm.training.job import SCORE
from rayrm.training.loop import Progress


def save_checkpoint(
    engine: Engine, progress: Progress, config: dict[str, Any], *, score: float
) -> None:
    """Write every rank's state aside and report it; Ray Train merges and commits it.

    All ranks must call this at the same step: the report is a barrier.
    """
    folder = tempfile.mkdtemp(prefix="rayrm-checkpoint-")
    try:
        engine.save(folder)
        if engine.rank == 0:
            _write_json(os.path.join(folder, "config.json"), config)
            state = {**dataclasses.asdict(progress), "world_size": engine.world_size}
            _write_json(os.path.join(folder, "progress.json"), state)
        checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({SCORE: score, "step": progress.step}, checkpoint=checkpoint)
    except OSError as error:
        raise CheckpointError(f"checkpoint of step {progress.step}: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def restore_checkpoint(engine: Engine) -> Progress:
    """Load the run's last committed checkpoint, or return fresh progress where there is none.

    Raises:
        CheckpointError: it is incomplete, or was written by another number of workers.
    """
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return Progress()
    progress = load_checkpoint(engine, checkpoint)
    progress.resumed += 1
    return progress


def load_checkpoint(engine: Engine, checkpoint: ray.train.Checkpoint) -> Progress:
    """Load one checkpoint into the engine and return the progress it was written at.

    Raises:
        CheckpointError: it is incomplete, or was written by another number of workers.
    """
    with checkpoint.as_directory() as folder:
        try:
            with open(os.path.join(folder, "progress.json"), encoding="utf-8") as file:
                state = json.load(file)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{checkpoint.path}: not a complete checkpoint") from error
        world_size = state.pop("world_size")
        if world_size != engine.world_size:
            raise CheckpointError(
                f"{checkpoint.path}: written by {world_size} workers, but there are "
                f"{engine.world_size}; set scaling.num_workers={world_size} to go on with it"
            )
        engine.load(folder)
    return Progress(**state)


def _write_json(path: str, value: Any) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)


def best_checkpoint() -> ray.train.Checkpoint:
    """Return the reported checkpoint with the highest score."""
    reported = ray.train.get_all_reported_checkpoints()
    return max(reported, key=lambda entry: entry.metrics[SCORE]).checkpoint
