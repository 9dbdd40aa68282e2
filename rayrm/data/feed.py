"""From a stream of tokenized rows to optimizer steps, dealt out to the ranks.

One actor a data set draws the epoch's order, cuts it into steps of ``batch_size`` pairs and shares
each step out, so that a step holds the same pairs for any number of workers, no pair is dropped to
make shards equal, and every rank knows how many forwards the others run.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from math import ceil
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import ray
from ray.exceptions import GetTimeoutError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayrm.data.pipeline import PairStream, pairs_of
from rayrm.data.plan import Cutting, MicroBatches, PairLengths, plan_step
from rayrm.data.report import FIRST_ROW, ROWS_A_MARK, Mark, RowId
from rayrm.data.tokenize import TokenizedPair
from rayrm.errors import DataError, own_error

_COLUMNS = ["file", "row", "prompt_ids", "chosen_ids", "rejected_ids", "margin",
            "prompt_length", "chosen_length", "rejected_length"]  # fmt: skip


Order = Literal["go on", "save", "stop"]
"""What the driver wants of the ranks: a checkpoint, or a checkpoint and the end."""


def go_on() -> Order:
    """Want nothing."""
    return "go on"


@dataclass(frozen=True, slots=True)
class FeedPlan:
    """How a data set becomes steps."""

    batch_size: int
    """Pairs a step, over all ranks."""
    seed: int | None = None
    """Seed of the order; null keeps the order of the sources."""
    buffer_size: int = 1
    """Source rows that are shuffled among each other."""
    marks: tuple[Mark, ...] = ()
    """Where the stream may be entered; each stretch is of whole buffers."""

    @property
    def rows_a_mark(self) -> int:
        """Rows of a stretch: some ten thousand, in whole buffers."""
        return self.buffer_size * ceil(ROWS_A_MARK / self.buffer_size)

    def entry(self, step: int) -> tuple[RowId, int]:
        """Return the row to read from for ``step``, and the pairs to leave out from there on."""
        left_out = step * self.batch_size
        first = FIRST_ROW
        for mark in self.marks:
            first = mark.first
            if left_out < mark.num_pairs or mark is self.marks[-1]:
                break
            left_out -= mark.num_pairs
        return first, left_out


@dataclass(frozen=True, slots=True)
class StepShare:
    """One rank's part of one step."""

    pairs: list[TokenizedPair]
    micro_batches: MicroBatches
    """Positions into ``pairs``, as many lists on every rank."""
    num_pairs: int
    """Pairs of the step over all ranks."""
    row_ids: list[RowId]
    """File number and row of each of ``pairs``."""
    num_tokens: int
    """Tokens of both sides of the step's pairs, over all ranks."""
    order: Order = "go on"
    """What every rank is to do after this step."""


def steps_of(
    tables: Iterable[pa.Table], plan: FeedPlan, *, epoch: int, left_out: int = 0
) -> Iterator[pa.Table]:
    """Yield the steps of an epoch: tables of ``batch_size`` kept rows, the last one shorter.

    The first ``left_out`` pairs are not in them.

    The order depends on seed, epoch and the rows' places alone. It is drawn within windows of
    ``buffer_size`` source rows: those whose kept rows go together through the shuffle.
    """
    waiting: list[pa.Table] = []
    num_waiting = 0
    for window in _windows(tables, plan):
        kept = window.filter(window["reason"].is_null()).select(_COLUMNS)
        if plan.seed is not None:
            kept = kept.take(np.argsort(_keys(kept, plan.seed, epoch), kind="stable"))
        num_passed = min(left_out, kept.num_rows)
        left_out -= num_passed
        kept = kept.slice(num_passed)
        waiting.append(kept)
        num_waiting += kept.num_rows
        if num_waiting >= plan.batch_size:
            rows = pa.concat_tables(waiting)
            end = num_waiting - num_waiting % plan.batch_size
            for start in range(0, end, plan.batch_size):
                yield rows.slice(start, plan.batch_size)
            waiting, num_waiting = [rows.slice(end)], num_waiting - end
    if num_waiting:
        yield pa.concat_tables(waiting)


def _windows(tables: Iterable[pa.Table], plan: FeedPlan) -> Iterator[pa.Table]:
    if plan.seed is None:
        yield from (table for table in tables if table.num_rows)
        return
    held: list[pa.Table] = []
    num_held = 0
    for table in tables:
        while table.num_rows:
            part = table.slice(0, plan.buffer_size - num_held)
            table = table.slice(part.num_rows)
            held.append(part)
            num_held += part.num_rows
            if num_held == plan.buffer_size:
                yield pa.concat_tables(held).combine_chunks()
                held, num_held = [], 0
    if held:
        yield pa.concat_tables(held).combine_chunks()


def _keys(table: pa.Table, seed: int, epoch: int) -> np.ndarray:
    """Return a pseudo-random uint64 a row (splitmix64, Steele et al. 2014), without state."""
    file, row = (table[name].to_numpy().astype(np.uint64) for name in ("file", "row"))
    keys = np.full(table.num_rows, seed, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for word in (np.uint64(epoch), file, row):
            keys = (keys ^ word) + np.uint64(0x9E3779B97F4A7C15)
            keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            keys ^= keys >> np.uint64(31)
    return keys


Share = tuple[pa.Table, MicroBatches, int, int, Order]
"""A rank's rows and micro-batches; the step's pairs and tokens; what to do after it."""


class Feeder:
    """Cuts an epoch into steps and hands each rank its share.

    Ranks ask for (epoch, step), so that a restarted worker group simply asks for the step it needs,
    whether this feeder is the same, or as many ranks ask as before.
    """

    def __init__(
        self,
        stream: PairStream,
        plan: FeedPlan,
        order: Callable[[], Order] = go_on,
    ) -> None:
        """``order`` is called once a step: all ranks then learn it with the same step."""
        self._stream = stream
        self._order = order
        self._plan = plan
        self._num_ranks = 0
        self._epoch = -1
        self._steps: Iterator[pa.Table] = iter(())
        self._next_step = 0
        self._num_steps: dict[int, int] = {}
        self._shares: dict[tuple[int, int], Share] = {}

    def read_ahead(self) -> None:
        """Have the first rows of the first epoch tokenized while the workers load."""
        self._start(0, 0)
        first = self._draw()
        self._steps = self._steps if first is None else chain([first], self._steps)

    def share(
        self, rank: int, num_ranks: int, epoch: int, step: int, cutting: Cutting
    ) -> Share | None:
        """Return a rank's rows and micro-batches, the step's pairs and tokens; None at the end.

        The first rank that asks for a step has it cut; all give the same ``cutting``.
        """
        if step == self._num_steps.get(epoch):  # a rank may ask after others are in the next epoch
            return None
        is_there = (rank, step) in self._shares and num_ranks == self._num_ranks
        if epoch != self._epoch or (step != self._next_step and not is_there):
            self._start(epoch, step)
        self._num_ranks = num_ranks
        if step == self._next_step:
            table = self._draw()
            if table is None:
                self._num_steps[epoch] = step
                return None
            self._deal(table, step, cutting)
            self._next_step += 1
        return self._shares.pop((rank, step))

    def _start(self, epoch: int, step: int) -> None:
        """Begin an epoch at a step; rows of steps that were taken before are not tokenized."""
        first, left_out = self._plan.entry(step)
        tables = self._stream.dataset(first).iter_batches(
            batch_size=None, batch_format="pyarrow", prefetch_batches=2
        )
        self._steps = steps_of(tables, self._plan, epoch=epoch, left_out=left_out)
        self._epoch, self._next_step, self._shares = epoch, step, {}

    def _draw(self) -> pa.Table | None:
        try:
            return next(self._steps, None)
        except BaseException:
            self._epoch = -1  # a stream that broke looks like one that ended; begin it again
            raise

    def _deal(self, table: pa.Table, step: int, cutting: Cutting) -> None:
        lengths = PairLengths(
            prompt=table["prompt_length"].to_pylist(),
            chosen=table["chosen_length"].to_pylist(),
            rejected=table["rejected_length"].to_pylist(),
        )
        num_tokens = sum(lengths.chosen) + sum(lengths.rejected)
        told = (table.num_rows, num_tokens, self._order())
        plan = plan_step(lengths, cutting, num_ranks=self._num_ranks)
        for rank, micro_batches in enumerate(plan):
            mine = [position for micro_batch in micro_batches for position in micro_batch]
            place = {position: index for index, position in enumerate(mine)}
            rows = table.take(pa.array(mine, pa.int64()))
            local = [[place[position] for position in part] for part in micro_batches]
            self._shares[rank, step] = (rows, local, *told)


@dataclass(frozen=True)
class Recipe:
    """What a feeder is made of, anew if it has to be."""

    stream: ray.ObjectRef
    plan: FeedPlan
    order: Callable[[], Order]


class FeederActor:
    """A feeder in a process of its own; each call brings the recipe, which a new process needs."""

    def __init__(self) -> None:
        self._feeder: Feeder | None = None

    def read_ahead(self, recipe: Recipe) -> None:
        """See ``Feeder.read_ahead``."""
        self._open(recipe).read_ahead()

    def share(self, recipe: Recipe, *asked: Any) -> Share | None:
        """See ``Feeder.share``."""
        return self._open(recipe).share(*asked)

    def _open(self, recipe: Recipe) -> Feeder:
        if self._feeder is None:
            self._feeder = Feeder(ray.get(recipe.stream), recipe.plan, recipe.order)
        return self._feeder


@dataclass(frozen=True)
class Feed:
    """A data set's feeder, as driver and workers hold it; it ends when nobody does."""

    actor: Any
    recipe: Recipe

    @classmethod
    def start(
        cls,
        stream: PairStream,
        plan: FeedPlan,
        *,
        order: Callable[[], Order] = go_on,
    ) -> Self:
        """Start the actor that cuts ``stream`` into steps, on this node; Ray restarts one if lost.

        Ray Train's own split makes shards of equal size by dropping rows, and which rows a rank
        gets depends on block boundaries.
        """
        here: Any = NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=True
        )
        actor = ray.remote(
            num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=here
        )(FeederActor)
        return cls(actor.remote(), Recipe(ray.put(stream), plan, order))

    def read_ahead(self) -> None:
        """Have the first rows tokenized while the workers load; returns at once."""
        self.actor.read_ahead.remote(self.recipe)

    def shard(
        self, rank: int, num_ranks: int, *, timeout_minutes: float | None = None
    ) -> "FeedShard":
        """Return a rank's end, which waits so long for a step's rows at most."""
        return FeedShard(self, rank, num_ranks, timeout_minutes)


@dataclass(frozen=True, slots=True)
class FeedShard:
    """One rank's end of a feed."""

    feed: Feed
    rank: int
    num_ranks: int
    timeout_minutes: float | None = None

    def steps(self, cutting: Cutting, *, epoch: int = 0, start: int = 0) -> Iterator[StepShare]:
        """Yield this rank's shares of an epoch's steps, the next one fetched ahead.

        Raises:
            DataError: the rows of a step did not come in time.
        """
        step = start
        coming = self._ask(epoch, step, cutting)
        while (share := self._wait(coming, epoch, step)) is not None:
            step += 1
            coming = self._ask(epoch, step, cutting)
            table, micro_batches, num_pairs, num_tokens, order = share
            row_ids = list(zip(table["file"].to_pylist(), table["row"].to_pylist(), strict=True))
            pairs = pairs_of(table)
            yield StepShare(pairs, micro_batches, num_pairs, row_ids, num_tokens, order)

    def _wait(self, coming: Any, epoch: int, step: int) -> Share | None:
        limit = self.timeout_minutes
        try:
            return ray.get(coming, timeout=None if limit is None else 60 * limit)
        except RayTaskError as error:
            raise (own_error(error) or error) from None
        except GetTimeoutError:
            raise DataError(
                f"data: worker {self.rank} waited {limit:g} minutes for the rows of step "
                f"{step + 1} of epoch {epoch + 1}: no data task finds a CPU, or a source does not "
                "answer (scaling.timeout_minutes)"
            ) from None

    def _ask(self, epoch: int, step: int, cutting: Cutting) -> Any:
        feed = self.feed
        return feed.actor.share.remote(feed.recipe, self.rank, self.num_ranks, epoch, step, cutting)
