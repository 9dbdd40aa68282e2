import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrm.data.packing import MicroBatches, pack_pairs, plan_step
from tests.builders import pair_of


def test_sides_become_right_padded_rows_chosen_first():
    batch = pack_pairs([pair_of([5], [6, 7], [8], 0.5), pair_of([1, 2], [3], [4], -1.0)])
    assert batch.inputs["input_ids"].tolist() == [[5, 6, 7], [1, 2, 3], [5, 8, 0], [1, 2, 4]]
    assert batch.inputs["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 1, 1]]
    assert batch.inputs["last_token"].tolist() == [2, 5, 7, 11]
    assert batch.margin.tolist() == [0.5, -1.0]
    assert batch.margin.dtype == torch.float32
    assert (batch.num_pairs, batch.num_tokens, batch.num_slots) == (2, 11, 12)
    assert batch.num_full_tokens == 11


def test_last_tokens_are_found_by_length_and_not_by_id():
    pad = eos = 0
    batch = pack_pairs([pair_of([pad, eos], [3, pad, pad], [eos, 4, eos, eos, 5])])
    assert batch.inputs["last_token"].tolist() == [4, 7 + 6]
    assert batch.inputs["attention_mask"].sum(1).tolist() == [5, 7]


def test_no_pairs_are_one_forward_of_one_token_without_a_reward():
    batch = pack_pairs([])
    assert batch.inputs["input_ids"].tolist() == [[0]]
    assert batch.inputs["attention_mask"].tolist() == [[1]]
    assert batch.inputs["last_token"].shape == (0,)
    assert batch.inputs["last_token"].dtype == torch.int64
    assert (batch.num_pairs, batch.num_tokens, batch.num_slots) == (0, 0, 0)
    assert batch.num_full_tokens == 0


def test_a_pair_without_a_prompt_is_packed():
    batch = pack_pairs([pair_of([], [6], [8, 9])])
    assert batch.inputs["input_ids"].tolist() == [[6, 0], [8, 9]]
    assert batch.inputs["last_token"].tolist() == [0, 3]


def test_ids_are_copied_so_that_a_batch_cannot_change_its_pairs():
    pair = pair_of([5], [6], [7])
    pack_pairs([pair]).inputs["input_ids"].fill_(9)
    assert (pair.prompt_ids.tolist(), pair.chosen_ids.tolist()) == ([5], [6])


def test_the_cpu_needs_no_copy():
    batch = pack_pairs([pair_of([5], [6], [7])])
    assert batch.to(torch.device("cpu")) is batch


def test_pairs_of_like_length_share_a_forward():
    # two sides of 10 slots fill 40 with two pairs, sides of 4 with five
    plan = plan_step([10, 4, 10, 4, 4], num_ranks=1, max_tokens=40)
    assert plan == [[[0, 2], [1, 3, 4]]]


def test_the_longest_pairs_are_dealt_first_to_the_rank_with_the_least_to_do():
    plan = plan_step([1, 9, 3, 5], num_ranks=2, max_tokens=1000)
    assert plan == [[[1]], [[3, 2, 0]]]


def test_a_pair_that_exceeds_a_forward_gets_its_own():
    assert plan_step([3, 50, 3], num_ranks=1, max_tokens=12) == [[[1], [0, 2]]]


def test_ranks_without_pairs_run_weightless_forwards():
    assert plan_step([7], num_ranks=3, max_tokens=100) == [[[0]], [[]], [[]]]


def test_every_rank_runs_as_many_forwards_as_the_busiest():
    # the long pair is one forward; the other rank's short ones would be one as well
    plan = plan_step([6, 5, 5, 5], num_ranks=2, max_tokens=12)
    assert plan == [[[0], [3]], [[1], [2]]]
    plan = plan_step([30, 10, 10, 10], num_ranks=2, max_tokens=20)
    assert plan == [[[0], [], []], [[1], [2], [3]]]


@pytest.mark.parametrize("lengths", [[4, 4, 4, 4, 4], [9, 2, 2, 2]])
def test_the_same_arguments_give_the_same_plan(lengths: list[int]):
    first = plan_step(lengths, num_ranks=2, max_tokens=16)
    assert plan_step(tuple(lengths), num_ranks=2, max_tokens=16) == first


@settings(deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    num_ranks=st.integers(1, 5),
    max_tokens=st.integers(1, 200),
)
def test_any_plan_is_complete_even_and_within_its_bounds(
    lengths: list[int], num_ranks: int, max_tokens: int
):
    plan: list[MicroBatches] = plan_step(lengths, num_ranks=num_ranks, max_tokens=max_tokens)
    assert len(plan) == num_ranks
    assert len({len(micro_batches) for micro_batches in plan}) == 1
    forwards = [positions for micro_batches in plan for positions in micro_batches]
    assert sorted(i for positions in forwards for i in positions) == list(range(len(lengths)))
    for positions in forwards:
        batch = pack_pairs([pair_of([], [1] * lengths[i], [2]) for i in positions])
        assert batch.num_slots <= max_tokens or batch.num_pairs == 1
    if len(lengths) >= num_ranks:
        assert all(any(micro_batches) for micro_batches in plan)
