"""Metrics of pairs as sums and counts, so that they add over batches, ranks and steps exactly."""

from dataclasses import dataclass

import torch
from torch import Tensor

_SUMS = ("pairs", "correct", "ties", "loss", "margin", "reward", "tokens", "slots", "full_tokens")


@dataclass(frozen=True)
class PairStats:
    """Sums over pairs, and the extreme rewards; ``a + b`` is the statistics of both.

    ``sums`` holds, in the order of ``_SUMS``: pairs, pairs with chosen above rejected, ties, and
    the sums of loss, margin (chosen minus rejected) and reward (two a pair); then tokens computed
    once, slots of the batch (tokens and padding) and the tokens of two full copies of each pair.
    """

    sums: Tensor
    """float64 ``[9]``."""
    extremes: Tensor
    """float64 ``[2]``: minus the smallest reward, and the largest; -inf without pairs."""

    @classmethod
    def zero(cls, device: torch.device | str = "cpu") -> "PairStats":
        """Return the statistics of no pairs."""
        return cls(
            torch.zeros(len(_SUMS), dtype=torch.float64, device=device),
            torch.full((2,), -torch.inf, dtype=torch.float64, device=device),
        )

    @classmethod
    def of(
        cls,
        chosen: Tensor,
        rejected: Tensor,
        loss: Tensor,
        *,
        tokens: int = 0,
        slots: int = 0,
        full_tokens: int = 0,
    ) -> "PairStats":
        """Return the statistics of one batch of rewards and losses, all ``[pairs]``."""
        chosen, rejected, loss = (x.detach().double() for x in (chosen, rejected, loss))
        if chosen.numel() == 0:
            return cls.zero(chosen.device)
        sums = torch.stack(
            [
                torch.full_like(chosen, 1.0).sum(),
                (chosen > rejected).sum().double(),
                (chosen == rejected).sum().double(),
                loss.sum(),
                (chosen - rejected).sum(),
                (chosen + rejected).sum(),
            ]
        )
        counts = torch.tensor([tokens, slots, full_tokens], dtype=torch.float64)
        extremes = torch.stack(
            [-torch.minimum(chosen, rejected).min(), torch.maximum(chosen, rejected).max()]
        )
        return cls(torch.cat([sums, counts.to(sums.device, non_blocking=True)]), extremes)

    def __add__(self, other: "PairStats") -> "PairStats":
        return PairStats(self.sums + other.sums, torch.maximum(self.extremes, other.extremes))

    def compute(self) -> dict[str, float]:
        """Return the means, each a sum divided once by its count; a tie counts as half correct."""
        sums = self.sums.cpu().unbind()
        value = {name: float(total) for name, total in zip(_SUMS, sums, strict=True)}
        pairs = value["pairs"]
        if pairs == 0:
            return {}
        lowest, highest = (-self.extremes[0]).item(), self.extremes[1].item()
        metrics = {
            "loss": value["loss"] / pairs,
            "accuracy": (value["correct"] + value["ties"] / 2) / pairs,
            "margin": value["margin"] / pairs,
            "min_reward": lowest,
            "mean_reward": value["reward"] / (2 * pairs),
            "max_reward": highest,
            "ties": value["ties"] / pairs,
        }
        if value["slots"]:
            metrics["padding_share"] = 1 - value["tokens"] / value["slots"]
            metrics["shared_prompt_share"] = 1 - value["tokens"] / value["full_tokens"]
        return metrics

    @property
    def num_pairs(self) -> int:
        """Pairs counted."""
        return int(self.sums[0].item())

    @property
    def num_tokens(self) -> int:
        """Tokens of both sides of each pair."""
        return int(self.sums[8].item())
