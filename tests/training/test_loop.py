from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rayrm.config.schema import LossSection
from rayrm.data.feed import StepShare
from rayrm.data.packing import PackedBatch, pack_pairs
from rayrm.data.plan import Cutting, MicroBatches
from rayrm.data.tokenize import TokenizedPair
from rayrm.errors import DataError, RayrmError
from rayrm.training.loop import Progress, train_step, training_steps
from tests.builders import pair_of

LOSS = LossSection(center_rewards_coefficient=0.1, label_smoothing=0.1)
PAIRS = [pair_of([i], [i + 1] * (1 + i % 3), [i + 2], margin=i / 10) for i in range(10)]


class FakeEngine:
    """A model of one number a token id, trained by SGD: what the loop needs, without DeepSpeed."""

    def __init__(self, *, not_applied: tuple[int, ...] = ()) -> None:
        """`not_applied` are the steps, from 1, whose update is skipped."""
        self.device = torch.device("cpu")
        self.step_was_applied = True
        self.grad_norm = 0.0
        self.cutting = Cutting("padded", 100)
        self.num_steps = 0
        self.learning_rates: list[float] = []
        self.values = nn.Parameter(torch.linspace(-1, 1, 32))
        self._optimizer = torch.optim.SGD([self.values], lr=0.5)
        self._not_applied = not_applied

    @property
    def learning_rate(self) -> float:
        return 1 / (1 + self.num_steps)

    def pack(self, pairs: list[TokenizedPair]) -> PackedBatch:
        return pack_pairs(pairs, self.cutting.layout)

    def score(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        ids = batch.inputs["input_ids"].flatten()[batch.inputs["last_token"]]
        chosen, rejected = self.values[ids].view(-1, 2).unbind(1)
        return chosen, rejected

    def backward(self, loss: Tensor, *, ends_step: bool) -> None:
        loss.backward()
        if not ends_step:
            return
        self.num_steps += 1
        self.step_was_applied = self.num_steps not in self._not_applied
        if self.step_was_applied:
            self._optimizer.step()
        self._optimizer.zero_grad()

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]


class FakeShard:
    """Six pairs in steps of two, of which each epoch has three; remembers what it was asked."""

    def __init__(self, *, num_steps: int = 3) -> None:
        self.asked: list[tuple[int, int]] = []
        self._num_steps = num_steps

    def steps(self, cutting: Cutting, *, epoch: int = 0, start: int = 0) -> Iterator[StepShare]:
        self.asked.append((epoch, start))
        for step in range(start, self._num_steps):
            first = (2 * step + epoch) % len(PAIRS)
            pairs = PAIRS[first : first + 2]
            rows = [(0, 2 * step), (0, 2 * step + 1)]
            yield StepShare(pairs, [[0], [1]], 2, rows, 9)


def run(
    engine: FakeEngine, progress: Progress, *, num_steps: int, steps_that_are_there: int = 3
) -> FakeShard:
    asked = FakeShard(num_steps=steps_that_are_there)
    steps = training_steps(engine, asked, LOSS, progress, num_steps=num_steps, steps_per_epoch=3)
    for _ in steps:
        pass
    return asked


def share_of(pairs: list[TokenizedPair], micro_batches: MicroBatches, num_pairs: int) -> StepShare:
    return StepShare(pairs, micro_batches, num_pairs, [(0, 0)] * len(pairs), 0)


def gradient(pairs: list[TokenizedPair], micro_batches: MicroBatches, num_pairs: int) -> Tensor:
    """What a step's micro-batches add up to."""
    engine = FakeEngine()
    gradients: list[Tensor] = []
    backward = engine.backward

    def before_step(loss: Tensor, *, ends_step: bool) -> None:
        backward(loss, ends_step=False)
        if ends_step:
            assert engine.values.grad is not None
            gradients.append(engine.values.grad.clone())

    engine.backward = before_step
    train_step(engine, share_of(pairs, micro_batches, num_pairs), LOSS)
    (whole,) = gradients
    return whole


@pytest.mark.parametrize(
    "micro_batches",
    [
        pytest.param([[i] for i in range(10)], id="one by one"),
        pytest.param([[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]], id="two by two"),
        pytest.param([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]], id="the last one short"),
        pytest.param([[9, 0, 8], [7, 1, 2, 3, 4, 5, 6]], id="in another order"),
        pytest.param([list(range(10)), [], []], id="with weightless forwards"),
    ],
)
def test_any_cutting_gives_the_gradient_of_one_batch(micro_batches: MicroBatches):
    whole = gradient(PAIRS, [list(range(10))], 10)
    assert whole.abs().max() > 0.01
    torch.testing.assert_close(gradient(PAIRS, micro_batches, 10), whole, rtol=1e-5, atol=1e-7)


def test_the_gradients_of_ranks_add_up_to_that_of_one_batch():
    whole = gradient(PAIRS, [list(range(10))], 10)
    ranks = [(PAIRS[:7], [[0, 1, 2], [3, 4, 5], [6]]), (PAIRS[7:], [[0], [1, 2], []]), ([], [[]])]
    added = sum((gradient(pairs, cut, 10) for pairs, cut in ranks), torch.zeros(32))
    torch.testing.assert_close(added, whole, rtol=1e-5, atol=1e-7)


def test_one_backward_a_step_ends_it():
    ends: list[bool] = []
    engine = FakeEngine()
    engine.backward = lambda loss, *, ends_step: ends.append(ends_step)
    train_step(engine, share_of(PAIRS, [[0, 1], [2], []], 3), LOSS)
    assert ends == [False, False, True]


def test_the_loss_of_a_step_is_the_mean_over_its_pairs():
    pair = pair_of([], [31], [0], margin=1.0)  # the gap is 2
    stats = train_step(FakeEngine(), share_of([pair, pair], [[0], [1]], 2), LossSection())
    assert stats.compute() == pytest.approx(
        {
            "loss": 0.313262,
            "accuracy": 1.0,
            "margin": 2.0,
            "min_reward": -1.0,
            "mean_reward": 0.0,
            "max_reward": 1.0,
            "ties": 0.0,
            "padding_share": 0.0,
            "shared_prompt_share": 0.0,
        },
        abs=1e-6,
    )
    assert (stats.num_pairs, stats.num_tokens) == (2, 4)


@pytest.mark.parametrize(
    ("num_steps", "epochs", "place"),
    [
        pytest.param(2, [(0, 0)], (0, 2), id="part of an epoch"),
        pytest.param(3, [(0, 0)], (1, 0), id="one epoch"),
        pytest.param(7, [(0, 0), (1, 0), (2, 0)], (2, 1), id="two epochs and a step"),
    ],
)
def test_as_many_steps_are_taken_as_asked(
    num_steps: int, epochs: list[tuple[int, int]], place: tuple[int, int]
):
    engine, progress = FakeEngine(), Progress()
    shard = run(engine, progress, num_steps=num_steps)
    assert shard.asked == epochs
    assert engine.num_steps == progress.step == num_steps
    assert (progress.num_pairs, progress.num_tokens) == (2 * num_steps, 9 * num_steps)
    assert (progress.epoch, progress.step_in_epoch) == place


def test_no_steps_are_left_of_a_finished_run():
    progress = Progress(step=3, epoch=1)
    assert run(FakeEngine(), progress, num_steps=3).asked == []


def test_a_step_tells_its_pairs_and_the_learning_rate_that_it_used():
    steps = training_steps(
        FakeEngine(), FakeShard(), LOSS, Progress(), num_steps=3, steps_per_epoch=3
    )
    told = [(step.share.pairs, step.learning_rate) for step in steps]
    assert told == [(PAIRS[0:2], 1.0), (PAIRS[2:4], 1 / 2), (PAIRS[4:6], 1 / 3)]


def test_progress_stands_behind_a_step_when_that_is_seen():
    progress = Progress()
    steps = training_steps(
        FakeEngine(), FakeShard(), LOSS, progress, num_steps=4, steps_per_epoch=3
    )
    seen = [(progress.step, progress.epoch, progress.step_in_epoch) for _ in steps]
    assert seen == [(1, 0, 1), (2, 0, 2), (3, 1, 0), (4, 1, 1)]


@pytest.mark.parametrize(
    ("stopped_at", "asked"),
    [(2, [(0, 2), (1, 0), (2, 0)]), (3, [(1, 0), (2, 0)]), (4, [(1, 1), (2, 0)])],
)
def test_a_resumed_run_takes_the_steps_that_are_left_and_ends_alike(
    stopped_at: int, asked: list[tuple[int, int]]
):
    undisturbed = FakeEngine()
    run(undisturbed, Progress(), num_steps=8)
    engine, progress = FakeEngine(), Progress()
    run(engine, progress, num_steps=stopped_at)
    restored = Progress(
        step=progress.step,
        epoch=progress.epoch,
        step_in_epoch=progress.step_in_epoch,
        num_pairs=progress.num_pairs,
    )
    assert run(engine, restored, num_steps=8).asked == asked
    assert torch.equal(engine.values, undisturbed.values)
    assert (restored.step, restored.num_pairs) == (8, 16)


def test_updates_that_are_not_finite_are_counted_and_training_goes_on():
    engine, progress = FakeEngine(not_applied=(2, 3, 5, 6)), Progress()
    run(engine, progress, num_steps=6)
    assert (progress.step, progress.skipped_steps) == (6, 4)


def test_each_skipped_update_is_told_with_its_rows_and_three_in_a_row_stop_the_run():
    engine, progress = FakeEngine(not_applied=(2, 4, 5, 6)), Progress()
    told: list[list[tuple[int, int]] | None] = []
    steps = training_steps(engine, FakeShard(), LOSS, progress, num_steps=9, steps_per_epoch=3)
    with pytest.raises(RayrmError, match=r"3 updates in a row .*the last at step 6"):
        told.extend(step.rows_without_update for step in steps)
    rows = [[(0, 0), (0, 1)], [(0, 2), (0, 3)], [(0, 4), (0, 5)]]
    assert told == [None, rows[1], None, rows[0], rows[1], rows[2]]
    assert progress.skipped_steps == 4


def test_three_in_a_row_count_across_epochs():
    with pytest.raises(RayrmError, match="last at step 4"):
        run(FakeEngine(not_applied=(2, 3, 4)), Progress(), num_steps=9)


def test_an_epoch_that_ends_early_is_an_error_and_no_endless_loop():
    with pytest.raises(DataError, match=r"epoch 0 ended after 2 of 3 steps"):
        run(FakeEngine(), Progress(), num_steps=9, steps_that_are_there=2)
