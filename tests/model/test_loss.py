import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rayrm.model.loss import bradley_terry_loss

ZERO = torch.zeros(1)


def loss_of(gap: float, margin: float = 0.0, **options: float) -> float:
    chosen, rejected = torch.tensor([gap / 2]), torch.tensor([-gap / 2])
    return bradley_terry_loss(chosen, rejected, torch.tensor([margin]), **options).item()


def test_equal_rewards_cost_log_two():
    assert loss_of(0.0) == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    ("gap", "loss"), [(2.0, 0.126928), (-2.0, 2.126928), (0.5, 0.474077), (-1.0, 1.313262)]
)
def test_it_is_minus_log_sigmoid_of_the_gap(gap: float, loss: float):
    assert loss_of(gap) == pytest.approx(loss, abs=1e-6)


def test_a_gap_of_minus_a_hundred_costs_a_hundred_and_has_a_gradient():
    chosen = torch.tensor([-50.0], requires_grad=True)
    loss = bradley_terry_loss(chosen, torch.tensor([50.0]), ZERO)
    loss.sum().backward()
    assert loss.item() == pytest.approx(100.0)
    assert chosen.grad is not None
    assert chosen.grad.item() == pytest.approx(-1.0)


def test_a_gap_of_a_thousand_costs_nothing():
    assert loss_of(1000.0) == 0.0


def test_a_margin_is_taken_off_the_gap_of_its_own_pair():
    gaps, margins = torch.tensor([2.0, 0.5, -1.0]), torch.tensor([0.0, 1.0, 3.0])
    losses = bradley_terry_loss(gaps, torch.zeros(3), margins)
    assert losses.tolist() == pytest.approx([0.126928, 0.974077, 4.018150], abs=1e-5)
    assert losses.mean().item() == pytest.approx(1.7064, abs=1e-4)


@pytest.mark.parametrize(
    ("chosen", "rejected", "margin"),
    [
        pytest.param((3,), (3,), (3, 1), id="margin is a column"),
        pytest.param((3, 1), (3, 1), (3,), id="rewards are columns"),
        pytest.param((3, 1), (3, 1), (3, 1), id="all are columns"),
        pytest.param((3,), (1,), (3,), id="one rejected for all"),
        pytest.param((3,), (3,), (1,), id="one margin for all"),
        pytest.param((), (), (), id="no dimension"),
    ],
)
def test_shapes_that_would_broadcast_are_refused(
    chosen: tuple[int, ...], rejected: tuple[int, ...], margin: tuple[int, ...]
):
    with pytest.raises(AssertionError):
        bradley_terry_loss(torch.ones(chosen), torch.ones(rejected), torch.ones(margin))


def test_centering_adds_the_square_of_the_sum():
    chosen, rejected = torch.tensor([3.0]), torch.tensor([1.0])
    plain = bradley_terry_loss(chosen, rejected, ZERO)
    centred = bradley_terry_loss(chosen, rejected, ZERO, center_rewards_coefficient=0.01)
    assert (centred - plain).item() == pytest.approx(0.16, abs=1e-6)


def test_centering_leaves_opposite_rewards_alone():
    assert loss_of(2.0, center_rewards_coefficient=5.0) == loss_of(2.0)


def test_label_smoothing_weighs_the_swapped_pair():
    # 0.9 * 0.126928 + 0.1 * 2.126928
    assert loss_of(2.0, label_smoothing=0.1) == pytest.approx(0.326928, abs=1e-6)


def test_label_smoothing_swaps_the_gap_with_its_margin():
    assert loss_of(3.0, 1.0, label_smoothing=0.1) == pytest.approx(0.326928, abs=1e-6)


def test_bfloat16_rewards_are_computed_in_float32():
    chosen, rejected = torch.tensor([20.0]).bfloat16(), torch.tensor([19.875]).bfloat16()
    loss = bradley_terry_loss(chosen, rejected, ZERO.bfloat16())
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(0.632599, abs=1e-6)


def test_no_pairs_have_no_losses():
    empty = torch.zeros(0)
    assert bradley_terry_loss(empty, empty, empty).shape == (0,)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("centering", [0.0, 0.5])
def test_values_and_gradients_are_those_of_the_formula(smoothing: float, centering: float):
    def formula(chosen: Tensor, rejected: Tensor, margin: Tensor) -> Tensor:
        gap = chosen - rejected - margin
        loss = (1 - smoothing) * torch.log1p(torch.exp(-gap))
        loss = loss + smoothing * torch.log1p(torch.exp(gap))
        return loss + centering * (chosen + rejected) ** 2

    def ours(chosen: Tensor, rejected: Tensor, margin: Tensor) -> Tensor:
        return bradley_terry_loss(
            chosen,
            rejected,
            margin,
            center_rewards_coefficient=centering,
            label_smoothing=smoothing,
        )

    rewards = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 5
    assert_same_with_gradients(ours, formula, rewards)


def assert_same_with_gradients(
    ours: Callable[..., Tensor], formula: Callable[..., Tensor], rewards: Tensor
) -> None:
    outcomes: list[list[Tensor]] = []
    for function, dtype in ((ours, torch.float32), (formula, torch.float64)):
        chosen, rejected, margin = (row.to(dtype).requires_grad_() for row in rewards)
        losses = function(chosen, rejected, margin)
        gradients = torch.autograd.grad(losses.sum(), [chosen, rejected, margin])
        outcomes.append([losses.detach().float(), *(g.float() for g in gradients)])
    torch.testing.assert_close(*outcomes, rtol=1e-4, atol=1e-5)
