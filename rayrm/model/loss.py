"""Pairwise losses: rewards in, one loss a pair out, all in float32."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry_loss(
    chosen: Tensor,
    rejected: Tensor,
    margin: Tensor,
    *,
    center_rewards_coefficient: float | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the negative log-likelihood of each pair, ``[pairs]``.

    With ``gap = chosen - rejected - margin`` it is ``-log sigmoid(gap)`` (Bradley and Terry, 1952;
    the margin as in Llama 2, section 3.2.2). Label smoothing ``s`` gives the swapped label weight
    ``s`` (conservative loss of DPO's authors). Centering adds ``c * (chosen + rejected)^2``
    (Eisenstein et al., 2023), which fixes the free constant of the rewards near zero.

    Args:
        chosen: rewards ``[pairs]``.
        rejected: rewards ``[pairs]``.
        margin: required gaps ``[pairs]``; zero where a pair has none.
        center_rewards_coefficient: weight ``c`` of the centering term.
        label_smoothing: probability ``s`` that a label is the wrong way round.
    """
    # [pairs] against [pairs, 1] would broadcast to a square and average to a plausible number
    assert chosen.ndim == 1, chosen.shape
    assert chosen.shape == rejected.shape == margin.shape, (chosen.shape, rejected.shape)
    chosen, rejected = chosen.float(), rejected.float()
    gap = chosen - rejected - margin.float()
    loss = -logsigmoid(gap)
    if label_smoothing:
        loss = torch.lerp(loss, -logsigmoid(-gap), label_smoothing)
    if center_rewards_coefficient:
        loss = loss + center_rewards_coefficient * (chosen + rejected).square()
    return loss
