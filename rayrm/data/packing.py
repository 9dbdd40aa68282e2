"""From tokenized pairs to what one forward computes.

The compute is the point of rayrm. In a causal model both replies share the prompt's hidden states,
so a micro-batch is one flat row of texts without padding,

    [prompt] [prompt] ... [chosen] [rejected] [chosen] [rejected] ...

in which positions restart, each prompt sees itself, and each reply sees its prompt and itself.
``Segments`` says who sees whom, in the form that attention kernels take. ``model/shared_prompt.py``
computes it; models that cannot be computed so get right-padded rows instead.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rayrm.data.plan import Layout
from rayrm.data.tokenize import Ids, TokenizedPair

_CALL_COST = 2_500
"""What one more attention call costs, as entries of the attention matrix: rows of unlike length
share a call as long as their padding costs less."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of like length that attend in one call; a padded one is cut off by position."""

    num_rows: int
    num_queries: int
    """Queries a row, padding included."""
    num_keys: int
    """Keys a row, padding included."""
    first_position: Tensor | None
    """Place among the keys of each row's first query, ``[rows]``; null where queries are keys."""

    def mask(self, sliding_window: int | None) -> Tensor | None:
        """Return who sees whom, bool ``[rows or 1, 1, queries, keys]``; null is plainly causal."""
        if self.first_position is None:
            if sliding_window is None or sliding_window >= self.num_keys:
                return None
            first = torch.zeros(1, dtype=torch.int64)
        else:
            first = self.first_position
        query = first[:, None] + torch.arange(self.num_queries, device=first.device)
        key = torch.arange(self.num_keys, device=first.device)
        distance = query[:, None, :, None] - key
        seen = distance >= 0
        return seen if sliding_window is None else seen & (distance < sliding_window)


@dataclass(frozen=True, slots=True)
class Segments:
    """Who sees whom in a flat row, for kernels that take padded rows and for those that do not."""

    groups: tuple[RowGroup, ...]
    query_slots: Tensor
    """Flat position of each query of all groups, row by row; padding repeats some position."""
    key_slots: Tensor
    """The same for keys."""
    output_slots: Tensor
    """Place among the queries of each flat position's output ``[tokens]``."""
    segment_keys: Tensor
    """Flat positions of the keys of each segment, one segment after the other."""
    query_ends: Tensor
    """int32 ``[segments + 1]``: where each segment's queries end in the flat row."""
    key_ends: Tensor
    """int32 ``[segments + 1]``: where each segment's keys end in ``segment_keys``."""
    max_queries: int
    max_keys: int
    masks: dict[Any, list[Tensor | None]] = field(default_factory=dict[Any, Any], repr=False)
    """Masks of the groups, by window and dtype, once a layer has asked for them."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The tensors of one forward; only ``RewardModel`` looks inside ``inputs``.

    Rewards come out as ``[pairs, 2]``: chosen first, rejected second.
    """

    inputs: dict[str, Any]
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
        """Return the batch on a device; the copy is asynchronous, from pinned memory."""
        return self if device.type == "cpu" else _moved(self, device)


def pack_pairs(pairs: Sequence[TokenizedPair], layout: Layout) -> PackedBatch:
    """Pack pairs into the tensors of one forward.

    Without pairs it is a text of one token: a forward that every rank can run, without a reward.

    >>> pair = TokenizedPair(np.int32([5]), np.int32([6, 7]), np.int32([8]), 0.0)
    >>> inputs = pack_pairs([pair], "shared_prompt").inputs
    >>> inputs["input_ids"].tolist(), inputs["position_ids"].tolist()
    ([[5, 6, 7, 8]], [[0, 1, 2, 1]])
    >>> pack_pairs([pair], "padded").inputs["input_ids"].tolist()
    [[5, 6, 7], [5, 8, 0]]
    """
    sides = [
        np.concatenate([pair.prompt_ids, reply])
        for pair in pairs
        for reply in (pair.chosen_ids, pair.rejected_ids)
    ]
    num_full_tokens = num_tokens = sum(map(len, sides))
    match layout:
        case "padded":
            inputs = _pad(sides)
        case "packed":
            nothing = np.zeros(0, dtype=np.int32)
            inputs = pack_replies([nothing] * len(sides), [[side] for side in sides])
        case "shared_prompt":
            replies = [(pair.chosen_ids, pair.rejected_ids) for pair in pairs]
            inputs = pack_replies([pair.prompt_ids for pair in pairs], replies)
            num_tokens = sum(pair.num_tokens for pair in pairs)
    return PackedBatch(
        inputs=inputs,
        margin=torch.tensor([pair.margin for pair in pairs], dtype=torch.float32),
        num_tokens=num_tokens,
        num_slots=inputs["input_ids"].numel() if pairs else 0,
        num_full_tokens=num_full_tokens,
    )


def _pad(texts: Sequence[Ids]) -> dict[str, Any]:
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    width = int(lengths.max(initial=1))
    input_ids = np.zeros((max(len(texts), 1), width), dtype=np.int64)
    attention_mask = np.zeros_like(input_ids)
    attention_mask[len(texts) :] = 1
    for index, text in enumerate(texts):
        input_ids[index, : len(text)] = text
        attention_mask[index, : len(text)] = 1
    return {
        "input_ids": torch.from_numpy(input_ids),
        "attention_mask": torch.from_numpy(attention_mask),
        "last_token": torch.from_numpy(np.arange(len(texts)) * width + lengths - 1),
    }


Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of an attention matrix: flat positions of its queries and keys."""

    queries: Places
    keys: Places
    is_causal: bool
    """Whether queries are keys; else they are the last of the keys."""

    @property
    def sort_key(self) -> tuple[bool, int, int]:
        return self.is_causal, len(self.keys), len(self.queries)


def pack_replies(prompts: Sequence[Ids], replies: Sequence[Sequence[Ids]]) -> dict[str, Any]:
    """Pack prompts, each with any number of replies, into one flat row.

    Args:
        prompts: token ids; an empty prompt is none.
        replies: the replies to each prompt; an empty one is scored where its prompt ends.

    Returns:
        Arguments of ``RewardModel.forward``: ``input_ids`` and ``position_ids`` ``[1, tokens]``,
        ``last_token`` ``[all replies]`` in the order given, and the ``segments``.
    """
    all_replies = [reply for group in replies for reply in group]
    texts = [text for text in (*prompts, *all_replies) if len(text)]
    texts = texts or [np.zeros(1, dtype=np.int32)]
    starts = list(accumulate(map(len, (*prompts, *all_replies)), initial=0))
    prompt_places = [start + np.arange(len(p)) for start, p in zip(starts, prompts, strict=False)]
    reply_starts = iter(starts[len(prompts) :])
    rows: list[_Row] = []
    last_token: list[int] = []
    positions = [np.arange(len(prompt)) for prompt in prompts]
    segment_keys = [place for place in prompt_places if len(place)]
    for prompt, group in zip(prompt_places, replies, strict=True):
        places = [next(reply_starts) + np.arange(len(reply)) for reply in group]
        sides = [np.concatenate([prompt, place]) for place in places]
        last_token += [int(side[-1]) for side in sides]
        positions += [len(prompt) + np.arange(len(reply)) for reply in group]
        segment_keys += [side for side, place in zip(sides, places, strict=True) if len(place)]
        rows += _rows_of(prompt, places, sides)
    if not rows:
        rows, segment_keys, positions = [_causal(np.arange(1))], [np.arange(1)], [np.arange(1)]
    return {
        "input_ids": torch.from_numpy(np.concatenate(texts).astype(np.int64))[None],
        "position_ids": torch.from_numpy(np.concatenate(positions).astype(np.int64))[None],
        "last_token": torch.tensor(last_token, dtype=torch.int64),
        "segments": _segments(rows, [len(text) for text in texts], segment_keys),
    }


def _causal(places: Places) -> _Row:
    return _Row(places, places, is_causal=True)


def _rows_of(prompt: Places, places: Sequence[Places], sides: Sequence[Places]) -> list[_Row]:
    """Return rows that together hold every query of a prompt and its replies.

    Either each side is a causal row, and the prompt's attention is computed once a reply; or the
    prompt is a row of its own, and the replies are queries to prompt and reply, half of which a
    mask hides. What computes fewer entries is taken.
    """
    whole = sum(len(side) ** 2 for side in sides) / 2
    parts = len(prompt) ** 2 / 2 + sum((len(side) - len(prompt)) * len(side) for side in sides)
    if not len(prompt) or whole <= parts:
        return [_causal(side) for side in sides]
    rows = [_Row(place, side, is_causal=False) for place, side in zip(places, sides, strict=True)]
    return [_causal(prompt), *(row for row in rows if len(row.queries))]


def _segments(rows: list[_Row], text_lengths: list[int], keys: list[Places]) -> Segments:
    groups: list[RowGroup] = []
    query_slots: list[Places] = []
    key_slots: list[Places] = []
    for part in _grouped(sorted(rows, key=lambda row: row.sort_key, reverse=True)):
        num_queries = max(len(row.queries) for row in part)
        num_keys = len(part[0].keys)
        first = [len(row.keys) - len(row.queries) for row in part]
        group = RowGroup(
            num_rows=len(part),
            num_queries=num_queries,
            num_keys=num_keys,
            first_position=None if part[0].is_causal else torch.tensor(first),
        )
        groups.append(group)
        query_slots += [_filled(row.queries, num_queries) for row in part]
        key_slots += [_filled(row.keys, num_keys) for row in part]
    queries = np.concatenate(query_slots)
    output_slots = np.zeros(sum(text_lengths), dtype=np.int64)
    # padding repeats a row's last position: of all slots of a position the first one holds it
    output_slots[queries[::-1]] = np.arange(len(queries))[::-1]
    return Segments(
        groups=tuple(groups),
        query_slots=torch.from_numpy(queries),
        key_slots=torch.from_numpy(np.concatenate(key_slots)),
        output_slots=torch.from_numpy(output_slots),
        segment_keys=torch.from_numpy(np.concatenate(keys)),
        query_ends=_ends(text_lengths),
        key_ends=_ends([len(places) for places in keys]),
        max_queries=max(text_lengths),
        max_keys=max(len(places) for places in keys),
    )


def _grouped(rows: list[_Row]) -> Iterable[list[_Row]]:
    """Cut sorted rows where padding them to one size costs more than another call."""
    group: list[_Row] = []
    num_queries = 0
    for row in rows:
        width = max(num_queries, len(row.queries))
        if group:
            num_keys = len(group[0].keys)
            more = width * num_keys - len(row.queries) * len(row.keys)
            more += (width - num_queries) * num_keys * len(group)
            share = 0.5 if row.is_causal else 1.0
            if row.is_causal != group[0].is_causal or share * more > _CALL_COST:
                yield group
                group, width = [], len(row.queries)
        group.append(row)
        num_queries = width
    yield group


def _filled(places: Places, length: int) -> Places:
    return np.concatenate([places, np.full(length - len(places), places[-1])])


def _ends(lengths: Iterable[int]) -> Tensor:
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32)


T = TypeVar("T")


def _moved(value: T, device: torch.device) -> T:
    """Return tensors, and whatever holds them, on a device."""
    match value:
        case Tensor():
            return value.pin_memory().to(device, non_blocking=True)  # type: ignore[return-value]
        case dict():
            return {name: _moved(item, device) for name, item in value.items()}  # type: ignore[return-value]
        case tuple():
            return tuple(_moved(item, device) for item in value)  # type: ignore[return-value]
        case PackedBatch() | Segments() | RowGroup():
            moved = {f.name: _moved(getattr(value, f.name), device) for f in fields(value)}
            return replace(value, **moved)
        case _:
            return value
