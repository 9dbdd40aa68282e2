import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrm.data.packing import pack_pairs
from rayrm.data.plan import Cutting, Layout, MicroBatches, PairLengths, plan_step
from tests.builders import pair_of

LAYOUTS: list[Layout] = ["shared_prompt", "packed", "padded"]


def plan(lengths: list[int], *, num_ranks: int, max_tokens: int, layout: Layout = "shared_prompt"):
    """Plan pairs of so many tokens: half on each side, no prompt; sides so long where padded."""
    halves = lengths if layout == "padded" else [length // 2 for length in lengths]
    others = halves if layout == "padded" else [n - h for n, h in zip(lengths, halves, strict=True)]
    return plan_step(
        PairLengths([0] * len(lengths), halves, others),
        Cutting(layout, max_tokens),
        num_ranks=num_ranks,
    )


def test_a_shared_prompt_counts_once():
    lengths = PairLengths(prompt=[8, 8], chosen=[10, 10], rejected=[11, 11])
    assert plan_step(lengths, Cutting("shared_prompt", 26), num_ranks=1) == [[[0, 1]]]
    assert plan_step(lengths, Cutting("packed", 26), num_ranks=1) == [[[0], [1]]]


def test_a_step_takes_the_fewest_forwards_that_hold_it_and_fills_them_alike():
    assert plan([6, 4, 6, 4], num_ranks=1, max_tokens=20) == [[[0, 1, 2, 3]]]
    assert plan([6, 4, 6, 4], num_ranks=1, max_tokens=19) == [[[0, 1], [2, 3]]]
    assert plan([6, 4, 6, 4], num_ranks=2, max_tokens=19) == [[[0, 1]], [[2, 3]]]


def test_another_forward_is_taken_where_pairs_do_not_fit():
    # 36 tokens are two forwards of 18, but no two of these pairs fit into one
    assert plan([12, 12, 12], num_ranks=1, max_tokens=18) == [[[0], [1], [2]]]


def test_padded_pairs_of_like_length_share_a_forward():
    # two sides of 10 slots fill 40 with two pairs, sides of 4 with five
    found = plan([10, 4, 10, 4, 4], num_ranks=1, max_tokens=40, layout="padded")
    assert found == [[[0, 2], [1, 3, 4]]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_longest_pairs_are_dealt_first_to_the_rank_with_the_least_to_do(layout: Layout):
    found = plan([1, 9, 3, 5], num_ranks=2, max_tokens=1000, layout=layout)
    assert [[sorted(forward) for forward in rank] for rank in found] == [[[1]], [[0, 2, 3]]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pair_that_exceeds_a_forward_gets_its_own(layout: Layout):
    (found,) = plan([3, 50, 3], num_ranks=1, max_tokens=12, layout=layout)
    assert sorted(found) == [[0, 2], [1]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_without_pairs_run_weightless_forwards(layout: Layout):
    found = plan([7], num_ranks=3, max_tokens=100, layout=layout)
    assert sorted(found) == [[[]], [[]], [[0]]]


def test_every_rank_runs_as_many_forwards_as_the_busiest():
    found = plan([30, 10, 10, 10], num_ranks=2, max_tokens=20)
    assert [len(rank) for rank in found] == [2, 2]
    found = plan([30, 10, 10, 10], num_ranks=2, max_tokens=20, layout="padded")
    assert found == [[[0], [], []], [[1], [2], [3]]]


@settings(deadline=None, derandomize=True)
@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 60), st.integers(1, 60)),
        min_size=1,
        max_size=40,
    ),
    num_ranks=st.integers(1, 5),
    max_tokens=st.integers(1, 400),
    layout=st.sampled_from(LAYOUTS),
)
def test_any_plan_is_complete_even_and_within_its_bounds(
    lengths: list[tuple[int, int, int]], num_ranks: int, max_tokens: int, layout: Layout
):
    pairs = [pair_of([1] * p, [2] * c, [3] * r) for p, c, r in lengths]
    told = PairLengths(
        [p for p, _, _ in lengths], [p + c for p, c, _ in lengths], [p + r for p, _, r in lengths]
    )
    cutting = Cutting(layout, max_tokens)
    found: list[MicroBatches] = plan_step(told, cutting, num_ranks=num_ranks)
    assert plan_step(told, cutting, num_ranks=num_ranks) == found
    assert len(found) == num_ranks
    assert len({len(micro_batches) for micro_batches in found}) == 1
    forwards = [positions for micro_batches in found for positions in micro_batches]
    assert sorted(i for positions in forwards for i in positions) == list(range(len(lengths)))
    for positions in forwards:
        batch = pack_pairs([pairs[i] for i in positions], layout)
        assert batch.num_slots <= max_tokens or batch.num_pairs == 1
    if len(lengths) >= num_ranks:
        assert all(any(micro_batches) for micro_batches in found)
