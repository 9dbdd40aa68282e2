"""The loop: a generator of optimizer steps. Whatever watches training is a consumer of it."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from rayrm.config.schema import LossSection
from rayrm.data.feed import StepShare
from rayrm.data.packing import PackedBatch
from rayrm.data.plan import Cutting
from rayrm.data.report import RowId
from rayrm.data.tokenize import TokenizedPair
from rayrm.errors import DataError, RayrmError
from rayrm.model.loss import bradley_terry_loss
from rayrm.model.metrics import PairStats

MAX_SKIPPED_IN_A_ROW = 3
"""Non-finite updates in a row after which the run stops."""


class TrainEngine(Protocol):
    """What the loop needs of ``rayrm.training.engine.Engine``."""

    device: Any
    learning_rate: Any
    grad_norm: Any
    step_was_applied: Any
    cutting: Any

    def pack(self, pairs: list[TokenizedPair]) -> PackedBatch:
        """Return the tensors of one forward, on the device."""
        ...

    def score(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return the rewards of chosen and rejected ``[pairs]``."""
        ...

    def backward(self, loss: Tensor, *, ends_step: bool) -> None:
        """Add a gradient; take the step with the last one."""
        ...

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's value."""
        ...


class Shard(Protocol):
    """What the loop needs of ``rayrm.data.feed.FeedShard``."""

    def steps(self, cutting: Cutting, *, epoch: int = 0, start: int = 0) -> Iterator[StepShare]:
        """Yield an epoch's steps."""
        ...


@dataclass
class Progress:
    """How far training has come; kept in every checkpoint."""

    step: int = 0
    """Optimizer steps taken."""
    epoch: int = 0
    step_in_epoch: int = 0
    num_pairs: int = 0
    """Pairs trained on over all ranks, once an epoch each."""
    num_tokens: int = 0
    """Tokens of both sides of these pairs, as TRL counts them, since the first start."""
    seconds: float = 0.0
    """Time in training steps, start-up and evaluation excluded."""
    skipped_steps: int = 0
    """Updates that were not applied because the gradient was not finite."""
    resumed: int = 0
    """Restarts from a checkpoint."""
    best_score: float | None = None
    """Score of the best evaluation, higher is better; None before there is one."""
    evaluations_without_gain: int = 0
    max_tokens: int | None = None
    """Most tokens of a forward, as the first start settled it."""
    gradient_checkpointing: bool | None = None
    """Whether activations are recomputed, as the first start settled it."""
    layout_proved_on: str | None = None
    """Device and versions on which flat rows were seen to score as padded ones do."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The last training line and the last evaluation."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step as this rank saw it."""

    share: StepShare
    """This rank's pairs, and what every rank is to do now."""
    stats: PairStats
    """Sums over this rank's pairs, still on the device."""
    learning_rate: float
    seconds: float
    rows_without_update: list[RowId] | None
    """File number and row of all pairs of a step whose update was not applied."""


def training_steps(
    engine: TrainEngine,
    shard: Shard,
    loss: LossSection,
    progress: Progress,
    *,
    num_steps: int,
    steps_per_epoch: int,
    before_first: Callable[[list[TokenizedPair]], None] = lambda pairs: None,
) -> Iterator[StepResult]:
    """Train until ``num_steps`` steps are taken, from where ``progress`` stands; yield each step.

    ``before_first`` is called once, on every rank, with a few pairs of the first step.

    Raises:
        RayrmError: several updates in a row were not finite.
        DataError: an epoch has fewer steps than were counted.
    """
    skipped_in_a_row = 0
    is_first = True
    while progress.step < num_steps:
        steps = shard.steps(engine.cutting, epoch=progress.epoch, start=progress.step_in_epoch)
        for share in steps:
            if is_first:
                before_first(share.pairs[:2])
                is_first = False
            started = time.perf_counter()
            learning_rate = engine.learning_rate
            stats = train_step(engine, share, loss)
            progress.step += 1
            progress.step_in_epoch += 1
            progress.num_pairs += share.num_pairs
            progress.num_tokens += share.num_tokens
            skipped = None
            if engine.step_was_applied:
                skipped_in_a_row = 0
            else:
                skipped = _rows_of_step(engine, share)
                skipped_in_a_row += 1
                progress.skipped_steps += 1
            seconds = time.perf_counter() - started
            progress.seconds += seconds
            if progress.step_in_epoch == steps_per_epoch:
                progress.epoch, progress.step_in_epoch = progress.epoch + 1, 0
            yield StepResult(share, stats, learning_rate, seconds, skipped)
            if skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
                raise RayrmError(
                    f"training: {MAX_SKIPPED_IN_A_ROW} updates in a row had a loss or gradient "
                    f"that is not finite, the last at step {progress.step}; none was applied. "
                    "Lower train.learning_rate, or look at the rows of these steps"
                )
            if progress.step == num_steps or progress.step_in_epoch == 0:
                break
        else:
            raise DataError(
                f"data.train: epoch {progress.epoch} ended after {progress.step_in_epoch} of "
                f"{steps_per_epoch} steps: the rows are no longer those that were counted at the "
                "start"
            )


def train_step(engine: TrainEngine, share: StepShare, loss: LossSection) -> PairStats:
    """Run one step's micro-batches; the loss is a sum over pairs divided by the step's pairs."""
    stats = PairStats.zero(engine.device)
    last = len(share.micro_batches) - 1
    for index, positions in enumerate(share.micro_batches):
        batch = engine.pack([share.pairs[position] for position in positions])
        chosen, rejected = engine.score(batch)
        losses = pair_losses(chosen, rejected, batch, loss)
        engine.backward(losses.sum() / share.num_pairs, ends_step=index == last)
        stats = stats + stats_of(chosen, rejected, losses, batch)
    return stats


def pair_losses(chosen: Tensor, rejected: Tensor, batch: PackedBatch, loss: LossSection) -> Tensor:
    """Return the configured objective of each pair ``[pairs]``."""
    return bradley_terry_loss(
        chosen,
        rejected,
        batch.margin,
        center_rewards_coefficient=loss.center_rewards_coefficient,
        label_smoothing=loss.label_smoothing,
    )


def stats_of(chosen: Tensor, rejected: Tensor, losses: Tensor, batch: PackedBatch) -> PairStats:
    """Return the statistics of one forward."""
    return PairStats.of(
        chosen,
        rejected,
        losses,
        tokens=batch.num_tokens,
        slots=batch.num_slots,
        full_tokens=batch.num_full_tokens,
    )


def _rows_of_step(engine: TrainEngine, share: StepShare) -> list[RowId]:
    return sorted(row for part in engine.gather_objects(share.row_ids) for row in part)
