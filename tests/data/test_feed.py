from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrm.data.feed import Feeder, FeedPlan, Order, steps_of
from rayrm.data.pipeline import PAIR_SCHEMA, pairs_of
from rayrm.data.plan import Cutting
from rayrm.data.report import FIRST_ROW, DataReport, RowId

CUTTING = Cutting("padded", 12)
SHUFFLED = FeedPlan(batch_size=4, seed=7, buffer_size=1000)
IN_ORDER = FeedPlan(batch_size=4)


def rows_of(numbers: range, *, file: int = 0, dropped: tuple[int, ...] = ()) -> pa.Table:
    """A tokenized table: row n is the prompt [n] with a chosen reply of 1 to 5 tokens."""
    rows: list[dict[str, Any]] = []
    for number in numbers:
        row: dict[str, Any] = {"file": file, "row": number, "digest": 0}
        if number in dropped:
            row |= {"reason": "tie", "detail": "a tie", "raw": b"{}"}
        else:
            chosen = [1] * (1 + number % 5)
            row |= {"prompt_ids": [number], "chosen_ids": chosen, "rejected_ids": [2]}
            row |= {"prompt_length": 1, "chosen_length": 1 + len(chosen), "rejected_length": 2}
            row |= {"margin": number / 2}
        rows.append(row)
    return pa.Table.from_pylist(rows, schema=PAIR_SCHEMA)


def steps(tables: list[pa.Table], plan: FeedPlan, *, epoch: int = 0) -> list[list[int]]:
    """The row numbers of each step."""
    return [table["row"].to_pylist() for table in steps_of(tables, plan, epoch=epoch)]


def flat(lists: list[list[int]]) -> list[int]:
    return [number for numbers in lists for number in numbers]


def cut(table: pa.Table, sizes: list[int]) -> list[pa.Table]:
    """The table in pieces, with an empty one between any two."""
    pieces: list[pa.Table] = []
    for size in sizes:
        pieces += [table.slice(0, size), table.slice(0, 0)]
        table = table.slice(size)
    return [*pieces, table]


def test_an_epoch_holds_each_row_once_and_ends_in_a_shorter_step():
    found = steps([rows_of(range(10))], SHUFFLED)
    assert [len(rows) for rows in found] == [4, 4, 2]
    assert sorted(flat(found)) == list(range(10))
    assert flat(found) != list(range(10))


def test_an_epoch_of_whole_steps_has_no_tail():
    assert [len(rows) for rows in steps([rows_of(range(8))], SHUFFLED)] == [4, 4]


@pytest.mark.parametrize("plan", [SHUFFLED, IN_ORDER])
@pytest.mark.parametrize("tables", [[], [rows_of(range(0))], [rows_of(range(2), dropped=(0, 1))]])
def test_no_rows_are_no_steps(plan: FeedPlan, tables: list[pa.Table]):
    assert steps(tables, plan) == []


def test_without_a_seed_the_order_is_that_of_the_sources():
    tables = [rows_of(range(3), dropped=(1,)), rows_of(range(3, 9))]
    assert steps(tables, IN_ORDER) == [[0, 2, 3, 4], [5, 6, 7, 8]]
    assert steps(tables, IN_ORDER, epoch=5) == [[0, 2, 3, 4], [5, 6, 7, 8]]


def test_epoch_and_seed_change_the_order_and_nothing_else_does():
    table = rows_of(range(50))
    other_seed = FeedPlan(batch_size=4, seed=8, buffer_size=1000)
    other_batch = FeedPlan(batch_size=7, seed=7, buffer_size=1000)
    first = flat(steps([table], SHUFFLED))
    assert flat(steps([table], SHUFFLED)) == first
    assert flat(steps([table], other_batch)) == first
    assert flat(steps([table], SHUFFLED, epoch=1)) != first
    assert flat(steps([table], other_seed)) != first


def test_rows_of_one_number_in_two_files_are_two_rows():
    tables = [rows_of(range(6)), rows_of(range(6), file=1)]
    found = pa.concat_tables(steps_of(tables, SHUFFLED, epoch=0))
    ids = list(zip(found["file"].to_pylist(), found["row"].to_pylist(), strict=True))
    assert sorted(ids) == [(file, row) for file in (0, 1) for row in range(6)]
    orders = [[row for file, row in ids if file == number] for number in (0, 1)]
    assert orders[0] != orders[1]


def test_rows_are_shuffled_within_windows_of_source_rows_dropped_ones_included():
    plan = FeedPlan(batch_size=1, seed=7, buffer_size=10)
    found = flat(steps([rows_of(range(30), dropped=(3, 4, 5, 15))], plan))
    assert set(found[:7]) == {0, 1, 2, 6, 7, 8, 9}
    assert set(found[7:16]) == set(range(10, 20)) - {15}
    assert set(found[16:]) == set(range(20, 30))


def test_a_window_without_kept_rows_is_passed_over():
    plan = FeedPlan(batch_size=4, seed=7, buffer_size=3)
    assert steps([rows_of(range(4), dropped=(0, 1, 2))], plan) == [[3]]


@settings(deadline=None, derandomize=True)
@given(
    num_rows=st.integers(20, 40),
    dropped=st.sets(st.integers(0, 40), max_size=9),
    sizes=st.lists(st.integers(1, 9), min_size=1),
    batch_size=st.integers(1, 12),
    buffer_size=st.integers(1, 25),
    seed=st.sampled_from([None, 0, 7, 2**31 - 1]),
)
def test_block_boundaries_change_nothing(
    num_rows: int,
    dropped: set[int],
    sizes: list[int],
    batch_size: int,
    buffer_size: int,
    seed: int | None,
):
    plan = FeedPlan(batch_size=batch_size, seed=seed, buffer_size=buffer_size)
    table = rows_of(range(num_rows), dropped=tuple(dropped))
    whole = steps([table], plan)
    assert steps(cut(table, sizes), plan) == whole
    assert sorted(flat(whole)) == sorted(set(range(num_rows)) - dropped)
    assert all(len(rows) == batch_size for rows in whole[:-1])
    assert all(0 < len(rows) <= batch_size for rows in whole[-1:])


class FakeStream:
    """Stands for a stream and its Ray data set: an epoch is one call of ``iter_batches``."""

    def __init__(self, *tables: pa.Table) -> None:
        self.tables = tables
        self.num_epochs = 0
        self.num_read = 0

    def dataset(self, first: RowId = FIRST_ROW) -> Any:
        self.first = first
        return self

    def iter_batches(self, **_: Any) -> Iterator[pa.Table]:
        self.num_epochs += 1
        for table in self.tables:
            ids = zip(table["file"].to_pylist(), table["row"].to_pylist(), strict=True)
            later = table.filter(pa.array([row_id >= self.first for row_id in ids], pa.bool_()))
            self.num_read += later.num_rows
            yield later


def feeder_of(num_rows: int) -> tuple[Feeder, FakeStream]:
    dataset: Any = FakeStream(rows_of(range(num_rows)))
    return Feeder(dataset, SHUFFLED), dataset


def share(
    feeder: Feeder, rank: int, epoch: int, step: int, *, num_ranks: int = 2
) -> list[int] | None:
    """The row numbers that a rank gets; None after the last step."""
    found = feeder.share(rank, num_ranks, epoch, step, CUTTING)
    return None if found is None else found[0]["row"].to_pylist()


def epoch_of(feeder: Feeder, *, epoch: int, num_ranks: int = 2, start: int = 0) -> list[list[int]]:
    """Drive an epoch as ranks in lockstep do; each step's rows over all ranks."""
    found: list[list[int]] = []
    while True:
        shares = [
            share(feeder, rank, epoch, start, num_ranks=num_ranks) for rank in range(num_ranks)
        ]
        rows = [numbers for numbers in shares if numbers is not None]
        if not rows:
            return found
        assert len(rows) == num_ranks
        found.append(flat(rows))
        start += 1


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_step_holds_the_same_rows_for_any_number_of_ranks(num_ranks: int):
    feeder, _ = feeder_of(10)
    expected = [sorted(rows) for rows in steps([rows_of(range(10))], SHUFFLED)]
    found = epoch_of(feeder, epoch=0, num_ranks=num_ranks)
    assert [sorted(rows) for rows in found] == expected


def test_a_share_is_a_ranks_rows_with_its_micro_batches_and_the_size_of_the_step():
    dataset: Any = FakeStream(rows_of(range(4)))
    plan = FeedPlan(batch_size=4)
    feeder = Feeder(dataset, plan)
    # the chosen sides have 2, 3, 4 and 5 tokens, each rejected one has 2
    for rank, rows in enumerate(([3, 0], [2, 1])):
        found = feeder.share(rank, 2, 0, 0, CUTTING)
        assert found is not None
        table, micro_batches, num_pairs, num_tokens, order = found
        assert table["row"].to_pylist() == rows
        assert micro_batches == [[0], [1]]
        assert (num_pairs, num_tokens, order) == (4, 22, "go on")
        pairs = pairs_of(table)
        assert [pair.prompt_ids.tolist() for pair in pairs] == [[row] for row in rows]
        assert [pair.margin for pair in pairs] == [row / 2 for row in rows]


def test_all_ranks_learn_with_the_same_step_that_they_are_to_stop():
    orders: list[Order] = ["go on", "stop"]
    asked = iter(orders)
    dataset: Any = FakeStream(rows_of(range(8)))
    feeder = Feeder(dataset, FeedPlan(batch_size=4), lambda: next(asked))
    ahead = [feeder.share(0, 2, 0, step, CUTTING) for step in (0, 1)]
    behind = [feeder.share(1, 2, 0, step, CUTTING) for step in (0, 1)]
    assert [[found and found[-1] for found in rank] for rank in (ahead, behind)] == [
        ["go on", "stop"]
    ] * 2


def test_ranks_may_ask_in_any_order_and_far_ahead():
    feeder, dataset = feeder_of(10)
    ahead = [share(feeder, 1, 0, step) for step in range(4)]
    behind = [share(feeder, 0, 0, step) for step in range(4)]
    lockstep, _ = feeder_of(10)
    expected = epoch_of(lockstep, epoch=0)
    assert ahead[3] is behind[3] is None
    for step, rows in enumerate(expected):
        assert (behind[step] or []) + (ahead[step] or []) == rows
    assert dataset.num_epochs == 1


def test_a_resumed_run_gets_the_rest_of_the_undisturbed_epoch():
    undisturbed = epoch_of(feeder_of(30)[0], epoch=3)
    resumed, dataset = feeder_of(30)
    assert epoch_of(resumed, epoch=3, num_ranks=2, start=5) == undisturbed[5:]
    assert dataset.num_epochs == 1


def test_restarted_ranks_ask_an_old_feeder_for_steps_that_it_gave_away():
    feeder, _ = feeder_of(30)
    undisturbed = epoch_of(feeder, epoch=0)
    for step in range(3):
        share(feeder, 0, 0, step)
        share(feeder, 1, 0, step)
    share(feeder, 0, 0, 3)  # then the workers are lost, and restart from step 2
    assert epoch_of(feeder, epoch=0, num_ranks=2, start=2) == undisturbed[2:]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_another_number_of_ranks_gets_the_rest_of_the_same_steps(num_ranks: int):
    undisturbed = [sorted(rows) for rows in epoch_of(feeder_of(30)[0], epoch=0)]
    feeder, _ = feeder_of(30)
    for step in range(3):
        share(feeder, 0, 0, step)
        share(feeder, 1, 0, step)
    share(feeder, 0, 0, 3)  # then the workers are lost, and others restart from step 3
    found = epoch_of(feeder, epoch=0, num_ranks=num_ranks, start=3)
    assert [sorted(rows) for rows in found] == undisturbed[3:]


def test_reading_ahead_changes_nothing_and_reads_nothing_twice():
    feeder, dataset = feeder_of(10)
    feeder.read_ahead()
    assert epoch_of(feeder, epoch=0) == epoch_of(feeder_of(10)[0], epoch=0)
    assert dataset.num_epochs == 1
    resumed, _ = feeder_of(10)
    resumed.read_ahead()
    assert epoch_of(resumed, epoch=1, start=1) == epoch_of(feeder_of(10)[0], epoch=1, start=1)
    empty, _ = feeder_of(0)
    empty.read_ahead()
    assert epoch_of(empty, epoch=0) == []


class BreakingStream(FakeStream):
    """Breaks off after its first table, the first three times."""

    def iter_batches(self, **_: Any) -> Iterator[pa.Table]:
        self.num_epochs += 1
        yield self.tables[0]
        if self.num_epochs <= 3:
            raise OSError("a node was lost")
        yield from self.tables[1:]


def test_a_resumed_run_does_not_read_what_lies_before_though_the_feeder_read_ahead():
    table = rows_of(range(30))
    report = DataReport(["a"], ["a.jsonl"], rows_a_mark=10)
    report.add(table)
    stream: Any = FakeStream(table)
    feeder = Feeder(stream, FeedPlan(4, 7, buffer_size=10, marks=tuple(report.marks)))
    undisturbed = epoch_of(feeder, epoch=0)
    feeder.read_ahead()
    stream.num_read = 0
    assert epoch_of(feeder, epoch=0, start=5) == undisturbed[5:]
    assert stream.num_read == 10


def test_rows_that_break_off_are_an_error_each_time_and_never_the_end_of_the_epoch():
    dataset: Any = BreakingStream(rows_of(range(6)), rows_of(range(6, 10)))
    feeder = Feeder(dataset, IN_ORDER)
    assert share(feeder, 0, 0, 0) is not None
    for rank in (0, 1, 0):
        with pytest.raises(OSError, match="lost"):
            share(feeder, rank, 0, 1)
    expected = steps([*dataset.tables], IN_ORDER)
    assert [sorted(rows) for rows in epoch_of(feeder, epoch=0)] == expected


def test_a_rank_that_hears_of_the_end_late_does_not_restart_the_epoch():
    feeder, dataset = feeder_of(8)
    for step in (0, 1):
        assert share(feeder, 0, 0, step) is not None
        assert share(feeder, 1, 0, step) is not None
    assert share(feeder, 0, 0, 2) is None
    first = share(feeder, 0, 1, 0)
    assert share(feeder, 1, 0, 2) is None
    assert dataset.num_epochs == 2
    assert sorted((first or []) + (share(feeder, 1, 1, 0) or [])) == sorted(
        steps([rows_of(range(8))], SHUFFLED, epoch=1)[0]
    )
    assert dataset.num_epochs == 2


def test_an_evaluation_set_is_read_again_from_the_start():
    feeder, dataset = feeder_of(10)
    first = epoch_of(feeder, epoch=0)
    assert epoch_of(feeder, epoch=0) == first
    assert dataset.num_epochs == 2


def test_a_set_of_one_step_is_read_again_by_one_rank_after_the_other():
    feeder, dataset = feeder_of(3)
    for _ in range(3):
        found = [(share(feeder, rank, 0, 0), share(feeder, rank, 0, 1)) for rank in (1, 0)]
        assert sorted(flat([rows or [] for rows, _ in found])) == [0, 1, 2]
        assert [end for _, end in found] == [None, None]
    assert dataset.num_epochs == 3


def test_ranks_without_rows_get_empty_shares():
    feeder, _ = feeder_of(1)
    assert [share(feeder, rank, 0, 0, num_ranks=3) for rank in range(3)] == [[0], [], []]


def test_an_empty_set_ends_at_once():
    feeder, _ = feeder_of(0)
    assert [share(feeder, rank, 0, 0) for rank in range(2)] == [None, None]


@settings(deadline=None, derandomize=True)
@given(
    num_rows=st.integers(1, 60),
    dropped=st.sets(st.integers(0, 60), max_size=20),
    sizes=st.lists(st.integers(1, 9), min_size=1),
    batch_size=st.integers(1, 9),
    buffer_size=st.integers(1, 25),
    stretch=st.integers(1, 3),
    seed=st.sampled_from([None, 7]),
    start=st.integers(0, 12),
)
def test_a_stream_that_is_entered_in_the_middle_gives_the_rest_of_the_epoch(
    num_rows: int,
    dropped: set[int],
    sizes: list[int],
    batch_size: int,
    buffer_size: int,
    stretch: int,
    seed: int | None,
    start: int,
):
    table = rows_of(range(num_rows), dropped=tuple(dropped))
    report = DataReport(["a"], ["a.jsonl"], rows_a_mark=stretch * buffer_size)
    for piece in cut(table, sizes):
        report.add(piece)
    plan = FeedPlan(batch_size, seed, buffer_size, marks=tuple(report.marks))
    stream: Any = FakeStream(*cut(table, sizes))
    whole = epoch_of(Feeder(stream, plan), epoch=2)
    stream.num_read = 0
    assert epoch_of(Feeder(stream, plan), epoch=2, start=start) == whole[start:]
    gone = sum(map(len, whole[:start]))
    kept_read = stream.num_read - len(dropped & set(range(num_rows)))
    assert kept_read <= sum(map(len, whole)) - gone + stretch * buffer_size


def test_the_stretches_of_a_plan_are_of_whole_buffers():
    assert FeedPlan(4, 7, buffer_size=3).rows_a_mark == 10_002
    assert FeedPlan(4, 7, buffer_size=20_000).rows_a_mark == 20_000
