"""Who computes which pairs of an optimizer step, and in which forward.

A function of its arguments alone, so that a step holds the same pairs for any number of ranks, and
every rank that asks learns how many forwards the others run.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from rayrm.data.tokenize import TokenizedPair

Layout = Literal["shared_prompt", "packed", "padded"]
"""One flat row with the prompt once; the same with a prompt for each reply; right-padded rows."""

MicroBatches = list[list[int]]
"""Positions of pairs, a list a forward; an empty one is a forward that counts for nothing."""


@dataclass(frozen=True, slots=True)
class Cutting:
    """How steps are cut into forwards; alike on all ranks."""

    layout: Layout
    max_tokens: int
    """Most tokens, padding included, that a forward computes; a single pair may exceed it."""


@dataclass(frozen=True, slots=True)
class PairLengths:
    """Tokens of each pair of a step, ``[pairs]`` each."""

    prompt: Sequence[int]
    """What both sides share."""
    chosen: Sequence[int]
    """The whole chosen side."""
    rejected: Sequence[int]
    """The whole rejected side."""

    @classmethod
    def of(cls, pairs: Sequence[TokenizedPair]) -> "PairLengths":
        """Return the lengths of pairs that are at hand."""
        return cls(
            prompt=[len(pair.prompt_ids) for pair in pairs],
            chosen=[pair.chosen_length for pair in pairs],
            rejected=[pair.rejected_length for pair in pairs],
        )


def plan_step(lengths: PairLengths, cutting: Cutting, *, num_ranks: int) -> list[MicroBatches]:
    """Share one step's pairs out over the ranks and cut each share into micro-batches.

    Every rank gets the same number of forwards (ZeRO-3 gathers parameters collectively, so a rank
    without pairs takes part as well), and tokens balance over forwards and ranks.

    Returns:
        For each rank its micro-batches of positions into ``lengths``.
    """
    sides = list(zip(lengths.prompt, lengths.chosen, lengths.rejected, strict=True))
    match cutting.layout:
        case "shared_prompt":
            costs = [chosen + rejected - prompt for prompt, chosen, rejected in sides]
            return _plan_flat(costs, max_tokens=cutting.max_tokens, num_ranks=num_ranks)
        case "packed":
            costs = [chosen + rejected for _, chosen, rejected in sides]
            return _plan_flat(costs, max_tokens=cutting.max_tokens, num_ranks=num_ranks)
        case "padded":
            widths = [max(chosen, rejected) for _, chosen, rejected in sides]
            return _plan_padded(widths, max_tokens=cutting.max_tokens, num_ranks=num_ranks)


def _plan_flat(costs: Sequence[int], *, max_tokens: int, num_ranks: int) -> list[MicroBatches]:
    """Take the fewest forwards that hold the step, and deal the pairs evenly onto them."""
    # a pair that is longer than a forward may be takes one of its own
    num_tokens = sum(min(cost, max_tokens) for cost in costs)
    num_forwards = max(1, ceil(num_tokens / (num_ranks * max_tokens)))
    while True:
        forwards = _deal(costs, num_forwards * num_ranks)
        loads = [sum(costs[position] for position in forward) for forward in forwards]
        if all(
            load <= max_tokens or len(forward) == 1
            for load, forward in zip(loads, forwards, strict=True)
        ):
            break
        num_forwards += 1
    shares = _deal(loads, num_ranks, most=num_forwards)
    # in the order of the step's pairs, so that sums do not depend on how they were dealt
    return [[sorted(forwards[i]) for i in share] for share in shares]


def _plan_padded(widths: Sequence[int], *, max_tokens: int, num_ranks: int) -> list[MicroBatches]:
    """Let pairs of like length share a forward: the longest of a forward sets its width."""
    plan: list[MicroBatches] = []
    for share in _deal(widths, num_ranks):
        micro_batches: MicroBatches = []
        width = 0
        for position in share:  # longest first, so the first of a micro-batch sets its width
            if micro_batches and 2 * width * (len(micro_batches[-1]) + 1) <= max_tokens:
                micro_batches[-1].append(position)
            else:
                micro_batches.append([position])
                width = widths[position]
        plan.append(micro_batches)
    num_forwards = max(map(len, plan))
    return [micro_batches + [[]] * (num_forwards - len(micro_batches)) for micro_batches in plan]


def _deal(costs: Sequence[int], num_hands: int, *, most: int | None = None) -> list[list[int]]:
    """Deal positions, the costliest first, each to the hand with the least (at most ``most``)."""
    hands: list[list[int]] = [[] for _ in range(num_hands)]
    loads = [(0, hand) for hand in range(num_hands)]
    for position in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, hand = heapq.heappop(loads)
        hands[hand].append(position)
        if most is None or len(hands[hand]) < most:
            heapq.heappush(loads, (load + costs[position], hand))
    return hands
