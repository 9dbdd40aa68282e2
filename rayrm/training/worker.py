"""What one training worker does, in order."""

import json
import logging
import os
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import ray
import ray.train
import torch
from ray.util.placement_group import get_current_placement_group

from rayrm.config.schema import RunConfig
from rayrm.data.feed import StepShare
from rayrm.errors import RayrmError
from rayrm.model.tokenizer import load_tokenizer
from rayrm.training.card import write_card
from rayrm.training.checkpoint import (
    best_checkpoint,
    load_checkpoint,
    restore_checkpoint,
    save_checkpoint,
)
from rayrm.training.engine import Engine
from rayrm.training.evaluate import evaluate, reward_moments
from rayrm.training.export import export_model, take_proof
from rayrm.training.job import MODEL, REPORT, Job
from rayrm.training.journal import Journal
from rayrm.training.judge import checkpoint_score, judge
from rayrm.training.loop import Progress, Shard, training_steps
from rayrm.training.preparation import (
    check_finite,
    prove_layout,
    settle_memory,
    slow_dtype,
    unusual_learning_rate,
)
from rayrm.training.storage import RunFolder
from rayrm.training.tracking import METRICS, RowLog, Tracker

logger = logging.getLogger(__name__)

PAIRS_FOR_MOMENTS = 256
"""The last so many training pairs tell the mean and standard deviation of the rewards."""


def train_worker(job: Job) -> dict[str, Any] | None:
    """Train, evaluate, save and export; return the result on rank 0.

    An error that another start would meet again is posted on the driver's board, so that the
    restarted workers find it there and stop. Any other may come from a lost peer: Ray Train
    restarts the workers from the last checkpoint, and the driver hears of it.
    """
    place, worker = get_current_placement_group(), ray.get_runtime_context().current_actor
    if ray.get(job.board.enter.remote(place, worker)) is not None:
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
    workers_on_node = ray.train.get_context().get_local_world_size()
    _share_cores(workers_on_node)
    tokenizer = load_tokenizer(config.model)
    engine = Engine(config, tokenizer, num_steps=job.num_steps)
    progress = restore_checkpoint(engine, job)
    if progress.step == 0:
        check_finite(engine, config.model.name_or_path)
    longest_pair = job.longest_pair[engine.cutting.layout]
    settle_memory(
        engine, config, progress, longest_pair=longest_pair, workers_on_node=workers_on_node
    )
    place = (engine.rank, engine.world_size)
    patience = config.scaling.timeout_minutes
    train_shard = job.train_feed.shard(*place, timeout_minutes=patience)
    eval_shards = {
        name: feed.shard(*place, timeout_minutes=patience) for name, feed in job.eval_feeds.items()
    }
    folder = RunFolder(job.run_dir)
    tracker = None if engine.rank else _start_tracker(engine, folder, job, config, progress)
    row_log = None
    if config.tracking.log_rows:
        row_log = RowLog(folder, *place, step=progress.step)
    journal = Journal(
        engine,
        progress,
        tracker,
        board=job.board,
        steps_per_epoch=job.steps_per_epoch,
        files=job.train_files,
        row_log=row_log,
    )

    def save(score: float) -> None:
        journal.sync()
        save_checkpoint(engine, progress, job, score=score)

    steps = training_steps(
        engine,
        train_shard,
        config.loss,
        progress,
        num_steps=job.num_steps,
        steps_per_epoch=job.steps_per_epoch,
        before_first=partial(prove_layout, engine, progress, dtype=config.model.dtype),
    )
    recent = deque[StepShare](maxlen=-(-PAIRS_FOR_MOMENTS // train.batch_size))
    for step in steps:
        is_last = progress.step == job.num_steps
        recent.append(step.share)
        journal.add(step)
        if is_last or progress.step % train.logging_steps == 0:
            journal.write_line()
        score, is_best = float("-inf"), False
        if eval_shards and (is_last or _due(progress.step, train.eval_steps)):
            score = _evaluate(engine, eval_shards, config, progress, journal)
            is_best = train.metric_for_best_model is not None and judge(progress, score)
        is_enough = progress.evaluations_without_gain == train.early_stopping_patience
        is_due = _due(progress.step, train.save_steps) or (is_last and train.save_steps is not None)
        if is_best or is_due or step.share.order != "go on":
            save(score)
        if step.share.order == "stop" and not is_last:
            journal.finish_training()
            return None
        if is_enough:
            logger.info("early stopping at step %d", progress.step)
            break

    journal.finish_training()
    if train.metric_for_best_model is not None and not _holds_best(progress):
        best = load_checkpoint(engine, best_checkpoint(job))
        progress.metrics = best.metrics  # what is told is told of the model that is exported
    if not recent:  # a restart after the last step
        recent.append(next(train_shard.steps(engine.cutting)))
    return _export(engine, tokenizer, config, folder, progress, journal, recent)


def _start_tracker(
    engine: Engine, folder: RunFolder, job: Job, config: RunConfig, progress: Progress
) -> Tracker:
    """Open the logs, and tell the driver what starts."""
    trained, total = engine.num_parameters()
    because = engine.model.padded_because
    layout = "prompts shared" if because is None else f"padded rows ({because})"
    checkpointing = "on" if progress.gradient_checkpointing else "off"
    job.board.start.remote(
        f"training {trained:,} of {total:,} parameters on {engine.world_size} worker(s), "
        f"{engine.device.type}, ZeRO stage {config.zero.stage}, {layout}, up to "
        f"{progress.max_tokens:,} tokens a forward, gradient checkpointing {checkpointing}",
        progress.step,
        job.num_steps,
    )
    tracker = Tracker(
        folder, config.tracking.wandb, config=job.config, run_id=job.run_id, step=progress.step
    )
    for notice in (
        engine.model.origin if progress.step == 0 else None,
        tracker.notice,
        slow_dtype(config.model.dtype, engine.device),
        unusual_learning_rate(config, total),
    ):
        if notice is not None:
            job.board.note.remote(notice)
    return tracker


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _holds_best(progress: Progress) -> bool:
    return progress.best_score is None or progress.evaluations_without_gain == 0


def _share_cores(workers_on_node: int) -> None:
    """Share this node's cores among its workers; Ray allows each a thread a CPU it asked for."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workers_on_node))


def _evaluate(
    engine: Engine,
    shards: Mapping[str, Shard],
    config: RunConfig,
    progress: Progress,
    journal: Journal,
) -> float:
    """Evaluate every set, write the line, and return the score of these weights."""
    metrics: dict[str, float] = {}
    rewards: dict[str, np.ndarray] = {}
    for name, shard in shards.items():
        evaluation = evaluate(engine, shard, config.loss, prefix=f"{name}_")
        metrics |= evaluation.metrics
        rewards[name] = evaluation.rewards
    if "eval_loss" not in metrics:
        metrics |= _mean_over_sets(metrics, list(shards))
    journal.write_evaluation(metrics, rewards)
    return checkpoint_score(config.train.metric_for_best_model, metrics)


def _mean_over_sets(metrics: dict[str, float], names: list[str]) -> dict[str, float]:
    """Return loss and accuracy over the pairs of all sets together."""
    counts = [metrics[f"{name}_num_pairs"] for name in names]
    return {
        f"eval_{metric}": sum(
            count * metrics.get(f"{name}_{metric}", 0.0)
            for name, count in zip(names, counts, strict=True)
        )
        / max(sum(counts), 1)
        for metric in ("loss", "accuracy")
    }


def _export(
    engine: Engine,
    tokenizer: Any,
    config: RunConfig,
    folder: RunFolder,
    progress: Progress,
    journal: Journal,
    recent: Sequence[StepShare],
) -> dict[str, Any] | None:
    """Export the model, prove it on real pairs, and return the run's result on rank 0."""
    pairs = [pair for share in recent for pair in share.pairs][-4:]
    with engine.evaluating():
        proof = take_proof(lambda batch: engine.score(engine.pack(batch)), pairs)
    moments = reward_moments(engine, recent)
    state = engine.gather_state(trained_only=config.model.trains_adapter)
    if engine.rank != 0:
        return None
    engine.leave_zero()
    with folder.building(MODEL) as place:
        difference = export_model(
            engine.model,
            state,
            tokenizer,
            config.model,
            folder=place,
            final_path=folder.path(MODEL),
            proof=proof,
            reward_moments=moments,
        )
        write_card(
            place,
            config,
            is_adapter=config.model.trains_adapter,
            report=folder.read_json(REPORT),
            lines=[json.loads(line) for line in folder.read_lines(METRICS)],
            metrics=progress.metrics,
            tokenizer=tokenizer,
            reward_moments=moments,
            reload_difference=difference,
        )
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
