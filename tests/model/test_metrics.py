from functools import reduce
from operator import add

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrm.model.metrics import PairStats


def stats_of(chosen: list[float], rejected: list[float], **counts: int) -> PairStats:
    rewards = torch.tensor(chosen), torch.tensor(rejected)
    return PairStats.of(*rewards, torch.ones(len(chosen)), **counts)


def judged(*correct: bool) -> PairStats:
    """Pairs that are told apart rightly or wrongly."""
    return stats_of([float(right) for right in correct], [float(not right) for right in correct])


def test_every_number_of_three_pairs():
    stats = PairStats.of(
        torch.tensor([2.0, 1.0, -3.0]),
        torch.tensor([1.0, 1.0, 1.0]),
        torch.tensor([0.5, 0.75, 4.0]),
        tokens=30,
        slots=40,
        full_tokens=60,
    )
    assert stats.compute() == pytest.approx(
        {
            "loss": 1.75,
            "accuracy": 0.5,
            "margin": -1.0,
            "min_reward": -3.0,
            "mean_reward": 0.5,
            "max_reward": 2.0,
            "ties": 1 / 3,
            "padding_share": 0.25,
            "shared_prompt_share": 0.5,
        }
    )
    assert (stats.num_pairs, stats.num_tokens) == (3, 60)


def test_a_tie_counts_half_and_is_reported():
    metrics = stats_of([1.0, 2.0], [1.0, 1.0]).compute()
    assert (metrics["accuracy"], metrics["ties"]) == (0.75, 0.5)


def test_nine_pairs_at_batch_eight_are_a_third_right():
    eight = judged(True, True, *[False] * 6)
    one = judged(True)  # the mean of the batches' means is 0.625
    assert (eight + one).compute()["accuracy"] == pytest.approx(3 / 9)


def test_thirteen_pairs_at_batch_four_on_two_ranks_are_nine_thirteenths_right():
    batches = [judged(*[True] * 4), judged(True, True, False, False), judged(*[False] * 2, True)]
    ranks = [batches[0] + batches[2], batches[1]]
    assert (ranks[0] + ranks[1] + judged(True, True)).compute()["accuracy"] == 9 / 13


def test_a_rank_all_right_and_a_rank_all_wrong_are_half_right():
    assert (judged(True, True) + judged(False, False)).compute()["accuracy"] == 0.5


def test_extremes_are_those_of_all_pairs_and_not_means_of_batches():
    stats = stats_of([1.0, 5.0], [0.0, 4.0]) + stats_of([2.0], [-7.0])
    metrics = stats.compute()
    assert (metrics["min_reward"], metrics["max_reward"]) == (-7.0, 5.0)


@pytest.mark.parametrize("reward", [-4.0, 4.0])
def test_extremes_have_no_hidden_start_at_zero(reward: float):
    metrics = stats_of([reward], [reward]).compute()
    assert (metrics["min_reward"], metrics["max_reward"]) == (reward, reward)


def test_no_pairs_have_no_metrics_and_change_nothing():
    empty = PairStats.of(torch.zeros(0), torch.zeros(0), torch.zeros(0))
    assert (empty.compute(), empty.num_pairs, empty.num_tokens) == ({}, 0, 0)
    some = stats_of([3.0], [1.0], tokens=5, slots=6, full_tokens=7)
    assert (PairStats.zero() + some + empty).compute() == some.compute()


def test_shares_are_left_out_where_no_tokens_were_counted():
    assert "padding_share" not in stats_of([1.0], [0.0]).compute()


def test_statistics_hold_no_graph():
    chosen = torch.tensor([1.0], requires_grad=True)
    stats = PairStats.of(chosen, torch.zeros(1), chosen * 2)
    assert not stats.sums.requires_grad
    assert not stats.extremes.requires_grad


def test_a_nan_reward_shows():
    metrics = stats_of([float("nan"), 1.0], [0.0, 0.0]).compute()
    assert metrics["mean_reward"] != metrics["mean_reward"]


reward = st.floats(-100, 100, width=32)
pairs = st.tuples(reward, reward, st.floats(0, 100, width=32))


@settings(deadline=None, derandomize=True)
@given(data=st.data(), rows=st.lists(pairs, min_size=1, max_size=30))
def test_any_cutting_of_the_pairs_gives_the_same_numbers(
    data: st.DataObject, rows: list[tuple[float, float, float]]
):
    def of(part: list[tuple[float, float, float]]) -> PairStats:
        chosen, rejected, loss = torch.tensor(part).reshape(-1, 3).T
        counts = {"tokens": 2 * len(part), "slots": 3 * len(part), "full_tokens": 4 * len(part)}
        return PairStats.of(chosen, rejected, loss, **counts)

    places = sorted(data.draw(st.lists(st.integers(0, len(rows)))))
    parts = [rows[a:b] for a, b in zip([0, *places], [*places, len(rows)], strict=True)]
    cut = reduce(add, [of(part) for part in data.draw(st.permutations(parts))])
    assert cut.compute() == pytest.approx(of(rows).compute(), rel=1e-9, abs=1e-9)
