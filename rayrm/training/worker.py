"""What one training worker does, in order."""

import logging
import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import ray.train
import torch

from rayrm.config.schema import RunConfig
from rayrm.errors import RayrmError
from rayrm.model.metrics import PairStats
from rayrm.model.tokenizer import load_tokenizer
from rayrm.training.card import model_card
from rayrm.training.checkpoint import (
    best_checkpoint,
    load_checkpoint,
    restore_checkpoint,
    save_checkpoint,
)
from rayrm.training.engine import Engine
from rayrm.training.evaluate import evaluate, reduce_stats
from rayrm.training.export import export_model, take_proof
from rayrm.training.judge import checkpoint_score, judge
from rayrm.training.loop import Progress, Shard, StepResult, training_steps
from rayrm.training.storage import RunFolder
from rayrm.training.tracking import Tracker

logger = logging.getLogger(__name__)

MODEL = "model"
REPORT = "data_report.json"


@dataclass(frozen=True)
class Job:
    """What the driver tells every worker."""

    config: dict[str, Any]
    """The resolved configuration as plain data."""
    run_dir: str
    run_id: str
    num_steps: int
    """Optimizer steps of the whole run."""
    steps_per_epoch: int
    eval_sets: tuple[str, ...]
    """Names of the evaluation sets; the single unnamed one is ''."""
    board: Any
    """Actor that shows progress and failures to the driver."""


def train_worker(loop_config: dict[str, Any]) -> dict[str, Any] | None:
    """Train, evaluate, save and export; return the result on rank 0.

    An error that another start would meet again is posted on the driver's board, so that the
    restarted workers find it there and stop. Any other may come from a lost peer: Ray Train restarts
    the workers from the last checkpoint, and the driver hears of it.
    """
    job: Job = loop_config["job"]
    if ray.get(job.board.failure.remote()) is not None:
        return None
    try:
        return _train(job)
    except RayrmError as error:
        ray.get(job.board.fail.remote(error))
        raise
    except Exception as error:
        rank = ray.train.get_context().get_world_rank()
        ray.get(job.board.note.remote(f"worker {rank} stopped: {type(error).__name__}: {error}"))
        raise


def _train(job: Job) -> dict[str, Any] | None:
    config = RunConfig.model_validate(job.config)
    train = config.train
    _use_all_cores()
    tokenizer = load_tokenizer(config.model)
    engine = Engine(config, tokenizer, num_steps=job.num_steps)
    progress = restore_checkpoint(engine)
    train_shard: Any = ray.train.get_dataset_shard("train")
    eval_shards: dict[str, Any] = {
        name: ray.train.get_dataset_shard(eval_dataset_name(name)) for name in job.eval_sets
    }
    folder = RunFolder(job.run_dir)
    journal = Journal(engine, folder, job, config, progress)

    def save(score: float) -> None:
        journal.sync()
        save_checkpoint(engine, progress, job.config, score=score)

    steps = training_steps(
        engine,
        train_shard,
        config.loss,
        progress,
        num_steps=job.num_steps,
        steps_per_epoch=job.steps_per_epoch,
    )
    for step in steps:
        is_last = progress.step == job.num_steps
        journal.add(step)
        if is_last or progress.step % train.logging_steps == 0:
            journal.write_line()
        score, is_best = float("-inf"), False
        if eval_shards and (is_last or _due(progress.step, train.eval_steps)):
            score = _evaluate(engine, eval_shards, config, progress, journal)
            is_best = train.metric_for_best_model is not None and judge(progress, score)
        is_enough = progress.evaluations_without_gain == train.early_stopping_patience
        if is_best or _due(progress.step, train.save_steps):
            save(score)
        if is_enough:
            logger.info("early stopping at step %d", progress.step)
            break

    journal.finish_training()
    if train.metric_for_best_model is not None and not _holds_best(progress):
        load_checkpoint(engine, best_checkpoint())
    return _export(engine, tokenizer, config, job, folder, progress, journal, train_shard)


def eval_dataset_name(name: str) -> str:
    """Return the Ray Train data set name of an evaluation set."""
    return f"eval_{name}" if name else "eval"


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _holds_best(progress: Progress) -> bool:
    return progress.best_score is None or progress.evaluations_without_gain == 0


def _use_all_cores() -> None:
    """Share this node's cores among its workers; Ray allows each a thread a CPU it asked for."""
    context = ray.train.get_context()
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // context.get_local_world_size()))


def _evaluate(
    engine: Engine,
    shards: dict[str, Shard],
    config: RunConfig,
    progress: Progress,
    journal: "Journal",
) -> float:
    """Evaluate every set, write the line, and return the score of these weights."""
    metrics: dict[str, float] = {}
    rewards: dict[str, np.ndarray] = {}
    for name, shard in shards.items():
        prefix = f"{eval_dataset_name(name)}_"
        evaluation = evaluate(engine, shard, config.loss, prefix=prefix)
        metrics |= evaluation.metrics
        rewards[eval_dataset_name(name)] = evaluation.rewards
    if "eval_loss" not in metrics:
        metrics |= _mean_over_sets(metrics, list(shards))
    journal.write_evaluation(metrics, rewards)
    return checkpoint_score(config.train.metric_for_best_model, metrics)


def _mean_over_sets(metrics: dict[str, float], names: list[str]) -> dict[str, float]:
    """Return loss and accuracy over the pairs of all sets together."""
    counts = [metrics[f"eval_{name}_num_pairs"] for name in names]
    return {
        f"eval_{metric}": sum(
            count * metrics.get(f"eval_{name}_{metric}", 0.0)
            for name, count in zip(names, counts, strict=True)
        )
        / max(sum(counts), 1)
        for metric in ("loss", "accuracy")
    }


class Journal:
    """Adds up steps between log lines and writes them, on rank 0, to the tracker and the board."""

    def __init__(
        self, engine: Engine, folder: RunFolder, job: Job, config: RunConfig, progress: Progress
    ) -> None:
        self._engine = engine
        self._job = job
        self._progress = progress
        self._stats = PairStats.zero(engine.device)
        self._seconds = 0.0
        self._learning_rate = 0.0
        self._tracker = None
        if engine.rank == 0:
            self._tracker = Tracker(
                folder,
                config.tracking.wandb,
                config=job.config,
                run_id=job.run_id,
                step=progress.step,
            )
            trained, total = engine.num_parameters()
            job.board.start.remote(
                f"{trained:,} of {total:,} parameters are trained, on {engine.world_size} "
                f"worker(s), ZeRO stage {config.zero.stage}",
                progress.step,
                job.num_steps,
            )

    @property
    def wandb_run_id(self) -> str | None:
        """Id of the W&B run, if there is one."""
        return None if self._tracker is None else self._tracker.wandb_run_id

    def add(self, step: StepResult) -> None:
        """Take a step into the current line."""
        self._stats = self._stats + step.stats
        self._seconds += step.seconds
        self._learning_rate = step.learning_rate

    def write_line(self) -> None:
        """Reduce the steps since the last line over all ranks and write them; collective."""
        stats = reduce_stats(self._engine, self._stats)
        seconds = max(self._seconds, 1e-9)
        self._progress.num_tokens += stats.num_tokens
        line = {
            "step": self._progress.step,
            "epoch": self._progress.epoch
            + self._progress.step_in_epoch / self._job.steps_per_epoch,
            **stats.compute(),
            "learning_rate": self._learning_rate,
            "grad_norm": self._engine.grad_norm,
            "num_tokens": self._progress.num_tokens,
            "pairs_per_second": stats.num_pairs / seconds,
            "tokens_per_second": stats.num_tokens / seconds,
            "skipped_steps": self._progress.skipped_steps,
        }
        self._progress.metrics |= line
        self._stats, self._seconds = PairStats.zero(self._engine.device), 0.0
        if self._tracker is not None:
            self._tracker.log(line)
            self._job.board.update.remote(line)

    def write_evaluation(
        self, metrics: dict[str, float], rewards: dict[str, np.ndarray]
    ) -> None:
        """Write an evaluation of all sets."""
        self._progress.metrics |= metrics
        if self._tracker is not None:
            line = {"step": self._progress.step, **metrics}
            self._tracker.log_evaluation(line, rewards)
            self._job.board.update.remote(line)

    def sync(self) -> None:
        """Bring files behind a URL up to date with the checkpoint that follows."""
        if self._tracker is not None:
            self._tracker.sync()

    def finish_training(self) -> None:
        """Close the tracker; what follows is export."""
        if self._tracker is not None:
            self._tracker.finish()


def _export(
    engine: Engine,
    tokenizer: Any,
    config: RunConfig,
    job: Job,
    folder: RunFolder,
    progress: Progress,
    journal: Journal,
    train_shard: Shard,
) -> dict[str, Any] | None:
    """Export the model, prove it, and return the run's result on rank 0."""
    started = time.perf_counter()
    share = next(train_shard.steps(epoch=0))
    proof = take_proof(engine, share.pairs[:4])
    common = {"tokenizer": tokenizer, "model": config.model, "final_path": folder.path(MODEL)}
    if engine.rank != 0:
        export_model(engine, folder=None, proof=proof, **common)
        return None
    with folder.building(MODEL) as place:
        difference = export_model(engine, folder=place, proof=proof, **common)
        card = model_card(
            config,
            report=folder.read_json(REPORT),
            metrics=progress.metrics,
            pad_token=str(tokenizer.pad_token),
            reload_difference=difference,
        )
        with open(f"{place}/README.md", "w", encoding="utf-8") as file:
            file.write(card)
    logger.info("exported and proved in %.1f s", time.perf_counter() - started)
    return {
        "metrics": progress.metrics,
        "steps": progress.step,
        "pairs": progress.num_pairs,
        "pairs_per_second": progress.num_pairs / max(progress.seconds, 1e-9),
        "tokens_per_second": progress.num_tokens / max(progress.seconds, 1e-9),
        "seconds_in_steps": progress.seconds,
        "skipped_steps": progress.skipped_steps,
        "resumed": progress.resumed,
        "wandb_run_id": journal.wandb_run_id,
    }
