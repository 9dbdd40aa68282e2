"""Evaluation: every pair once, the same numbers for any batch, rank count and tail."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch

from rayrm.config.schema import LossSection
from rayrm.data.feed import StepShare
from rayrm.model.metrics import PairStats
from rayrm.training.engine import Engine
from rayrm.training.loop import Shard, pair_losses, stats_of


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation set's result, alike on every rank but for ``rewards``."""

    metrics: dict[str, float]
    rewards: np.ndarray
    """Rewards of chosen and rejected, float32 ``[pairs, 2]`` in row order, on rank 0 only."""


def evaluate(engine: Engine, shard: Shard, loss: LossSection, *, prefix: str) -> Evaluation:
    """Score a set with the current weights; metric names get ``prefix`` (``eval_`` ...)."""
    stats = PairStats.zero(engine.device)
    row_ids: list[tuple[int, int]] = []
    rewards: list[torch.Tensor] = []
    with engine.evaluating():
        for share in shard.steps(engine.cutting):
            for positions in share.micro_batches:
                batch = engine.pack([share.pairs[i] for i in positions])
                chosen, rejected = engine.score(batch)
                losses = pair_losses(chosen, rejected, batch, loss)
                stats = stats + stats_of(chosen, rejected, losses, batch)
                rewards.append(torch.stack([chosen, rejected], dim=1))
                row_ids += [share.row_ids[i] for i in positions]
    total = reduce_stats(engine, stats)
    metrics = {f"{prefix}{name}": value for name, value in total.compute().items()}
    metrics[f"{prefix}num_pairs"] = total.num_pairs
    return Evaluation(metrics, _in_row_order(engine, row_ids, rewards))


def reward_moments(engine: Engine, shares: Iterable[StepShare]) -> tuple[float, float] | None:
    """Return mean and standard deviation of the finite rewards of both sides; collective.

    ``shares`` are this rank's parts of steps, those of the same steps on every rank. Null where no
    reward is finite.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=engine.device)
    with engine.evaluating():
        for share in shares:
            for positions in share.micro_batches:
                batch = engine.pack([share.pairs[i] for i in positions])
                rewards = torch.stack(engine.score(batch)).double()
                rewards = rewards[torch.isfinite(rewards)]
                sums += torch.stack([(rewards**power).sum() for power in (0, 1, 2)])
    count, total, squares = engine.reduce_sum(sums).tolist()
    if not count:
        return None
    mean = total / count
    return mean, sqrt(max(squares / count - mean**2, 0.0))


def reduce_stats(engine: Engine, stats: PairStats) -> PairStats:
    """Return the statistics over all ranks."""
    return PairStats(engine.reduce_sum(stats.sums), engine.reduce_max(stats.extremes))


def _in_row_order(
    engine: Engine, row_ids: list[tuple[int, int]], rewards: list[torch.Tensor]
) -> np.ndarray:
    own = torch.cat(rewards).cpu().numpy() if rewards else np.zeros((0, 2), dtype=np.float32)
    parts = engine.gather_objects((row_ids, own))
    if engine.rank != 0:
        return own
    ids = [row_id for part_ids, _ in parts for row_id in part_ids]
    order = sorted(range(len(ids)), key=ids.__getitem__)
    return np.concatenate([part for _, part in parts])[order]
