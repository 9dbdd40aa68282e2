"""From tokenized pairs to what one forward computes, and who computes it.

``plan_step`` shares the pairs of one optimizer step out over the ranks and cuts each share into
micro-batches; ``pack_pairs`` turns a micro-batch into tensors. Both are functions of their
arguments alone, so every rank that asks gets the same answer without talking to the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rayrm.data.tokenize import TokenizedPair

MicroBatches = list[list[int]]
"""Positions of pairs, a list a forward; an empty one is a forward that counts for nothing."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The tensors of one forward; only ``RewardModel`` looks inside ``inputs``.

    Rewards come out as ``[2, pairs]``: chosen first, rejected second.
    """

    inputs: dict[str, Tensor]
    """Keyword arguments of ``RewardModel.forward``."""
    margin: Tensor
    """Required gap of each pair, float32 ``[pairs]``."""
    num_tokens: int
    """Real tokens that the forward computes."""
    num_slots: int
    """Tokens and padding that the forward computes."""
    num_full_tokens: int
    """Tokens of two full copies of each pair."""

    @property
    def num_pairs(self) -> int:
        """Pairs in the batch."""
        return self.margin.numel()

    def to(self, device: torch.device) -> "PackedBatch":
        """Return the batch on a device; the copy is asynchronous from pinned memory."""
        if device.type == "cpu":
            return self
        inputs = {
            name: tensor.pin_memory().to(device, non_blocking=True)
            for name, tensor in self.inputs.items()
        }
        return PackedBatch(
            inputs,
            self.margin.to(device, non_blocking=True),
            self.num_tokens,
            self.num_slots,
            self.num_full_tokens,
        )


def pack_pairs(pairs: Sequence[TokenizedPair]) -> PackedBatch:
    """Pack pairs into right-padded rows ``[2 * pairs, tokens]``, chosen first.

    Without pairs it is one row of one token: a forward that every rank can run, without a reward.

    >>> pair = TokenizedPair(np.int32([5]), np.int32([6, 7]), np.int32([8]), 0.0)
    >>> pack_pairs([pair]).inputs["input_ids"].tolist()
    [[5, 6, 7], [5, 8, 0]]
    """
    rows = [np.concatenate([pair.prompt_ids, pair.chosen_ids]) for pair in pairs]
    rows += [np.concatenate([pair.prompt_ids, pair.rejected_ids]) for pair in pairs]
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    width = int(lengths.max(initial=1))
    input_ids = np.zeros((max(len(rows), 1), width), dtype=np.int64)
    attention_mask = np.zeros_like(input_ids)
    attention_mask[len(rows) :] = 1
    for index, row in enumerate(rows):
        input_ids[index, : len(row)] = row
        attention_mask[index, : len(row)] = 1
    num_tokens = int(lengths.sum())
    return PackedBatch(
        inputs={
            "input_ids": torch.from_numpy(input_ids),
            "attention_mask": torch.from_numpy(attention_mask),
            "last_token": torch.from_numpy(np.arange(len(rows)) * width + lengths - 1),
        },
        margin=torch.tensor([pair.margin for pair in pairs], dtype=torch.float32),
        num_tokens=num_tokens,
        num_slots=input_ids.size if rows else 0,
        num_full_tokens=num_tokens,
    )


def plan_step(lengths: Sequence[int], *, num_ranks: int, max_tokens: int) -> list[MicroBatches]:
    """Share one step's pairs out over the ranks and cut each share into micro-batches.

    The longest pairs are dealt first, each to the rank with the least to do. Within a rank, pairs
    of like length share a forward, and every rank gets the same number of forwards (ZeRO-3 gathers
    parameters collectively, so a rank without pairs has to take part as well).

    Args:
        lengths: slots that one side of each pair needs (its longer side) ``[pairs]``.
        num_ranks: workers.
        max_tokens: most slots a forward may compute; a pair that alone needs more gets its own.

    Returns:
        For each rank its micro-batches of positions into ``lengths``.
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for position in longest_first:
        rank = min(range(num_ranks), key=loads.__getitem__)
        shares[rank].append(position)
        loads[rank] += lengths[position]
    plan = [_cut(share, lengths, max_tokens) for share in shares]
    num_forwards = max(len(micro_batches) for micro_batches in plan)
    return [micro_batches + [[]] * (num_forwards - len(micro_batches)) for micro_batches in plan]


def _cut(share: list[int], lengths: Sequence[int], max_tokens: int) -> MicroBatches:
    micro_batches: MicroBatches = []
    width = 0
    for position in share:  # longest first, so the first of a micro-batch sets its width
        if micro_batches and 2 * width * (len(micro_batches[-1]) + 1) <= max_tokens:
            micro_batches[-1].append(position)
        else:
            micro_batches.append([position])
            width = lengths[position]
    return micro_batches
