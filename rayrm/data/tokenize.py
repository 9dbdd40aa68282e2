"""Pairs -> token ids; the one way in which training, evaluation and scoring turn text into ids.

Plain text gets the special tokens that the tokenizer adds, and an EOS token. A conversation is what
the chat template renders and nothing else. Either way a side is encoded as one text, prompt and
reply together, and what both sides share is found on their ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rayrm.data.pairs import Conversation, Drop, Message, Pair

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedPair:
    """Three arrays of ids: what both sides begin with, and how each goes on (never empty)."""

    prompt_ids: Ids
    chosen_ids: Ids
    rejected_ids: Ids
    margin: float

    @property
    def num_tokens(self) -> int:
        """Tokens to compute when the prompt is computed once."""
        return len(self.prompt_ids) + len(self.chosen_ids) + len(self.rejected_ids)

    @property
    def chosen_length(self) -> int:
        """Tokens of prompt and chosen reply."""
        return len(self.prompt_ids) + len(self.chosen_ids)

    @property
    def rejected_length(self) -> int:
        """Tokens of prompt and rejected reply."""
        return len(self.prompt_ids) + len(self.rejected_ids)


class PairTokenizer:
    """Tokenizes batches: pairs for training and evaluation, single sides for scoring."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> None:
        """Keep the tokenizer and the most tokens that a side may have."""
        self._tokenizer: Any = tokenizer  # its own annotations fit none of its uses
        self._max_length = max_length
        self._ends_text = _ends_text(tokenizer)

    def tokenize(self, pairs: Sequence[Pair | Drop]) -> list[TokenizedPair | Drop]:
        """Tokenize pairs; drops among them stay in their places."""
        sides = [side for pair in pairs if not isinstance(pair, Drop) for side in pair.sides]
        encoded = iter(self.encode(sides))
        return [
            pair
            if isinstance(pair, Drop)
            else _tokenized_pair(next(encoded), next(encoded), margin=pair.margin)
            for pair in pairs
        ]

    def encode(self, sides: Sequence[str | Conversation | list[int]]) -> list[Ids | Drop]:
        """Return the ids of each text, conversation or list of ids, or the reason for none."""
        encoded: dict[int, list[int] | Drop] = {}
        plain: dict[int, str] = {}
        rendered: dict[int, str] = {}
        for place, side in enumerate(map(self._as_text, sides)):
            match side:
                case _Rendered(text):
                    rendered[place] = text
                case str():
                    plain[place] = side
                case list():
                    encoded[place] = self._known(side)
                case Drop():
                    encoded[place] = side
        for place, ids in zip(plain, self._batch(plain.values(), special=True), strict=True):
            encoded[place] = self._ended(ids)
        encoded |= zip(rendered, self._batch(rendered.values(), special=False), strict=True)
        return [self._checked(encoded[place]) for place in range(len(sides))]

    def _as_text(self, side: str | Conversation | list[int]) -> str | _Rendered | list[int] | Drop:
        if not isinstance(side, Conversation):
            return side
        if self._tokenizer.chat_template is None:
            if side.transcript is not None:
                return side.transcript
            return Drop(
                "template_error",
                "the tokenizer has no chat template; name one in model.chat_template_path",
            )
        try:
            text = self._render(side, side.messages)
            *before, reply = side.messages
            if "tool_calls" in reply:
                said = {key: value for key, value in reply.items() if key != "tool_calls"}
                if self._render(side, [*before, said]) == text:
                    return Drop(
                        "template_error",
                        "the chat template leaves out the tool calls of the reply; give one that "
                        "renders them in model.chat_template_path",
                    )
        except Exception as error:  # a template is a program: what it raises is its own affair
            reason = str(error).strip().split("\n")[0][:200]
            return Drop("template_error", f"{type(error).__name__}: {reason}")
        return _Rendered(text)

    def _render(self, side: Conversation, messages: list[Message]) -> str:
        return self._tokenizer.apply_chat_template(
            messages, tools=side.tools or None, tokenize=False, **side.chat_template_kwargs
        )

    def _batch(self, texts: Iterable[str], *, special: bool) -> list[list[int]]:
        texts = list(texts)
        if not texts:
            return []
        if not self._tokenizer.is_fast:
            return self._tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]
        # What the tokenizer's own call does, less its offsets, which cost a third more on chats.
        backend = self._tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = self._tokenizer.split_special_tokens
        encodings = backend.encode_batch_fast(texts, add_special_tokens=special)
        return [encoding.ids for encoding in encodings]

    def _ended(self, ids: list[int]) -> list[int] | Drop:
        """Plain text with its one BOS, where the tokenizer adds it, and its one EOS."""
        bos, eos = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        if ids[:2] == [bos, bos]:
            ids = ids[1:]
        if eos is None and not self._ends_text:
            return Drop("no_eos", "the tokenizer ends no text; name a token in model.eos_token")
        return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]

    def _known(self, ids: list[int]) -> list[int] | Drop:
        largest = max(ids, default=0)
        if largest < len(self._tokenizer):
            return ids
        vocabulary = f"the tokenizer's vocabulary of {len(self._tokenizer)}"
        return Drop("wrong_type", f"token id {largest} is not in {vocabulary}")

    def _checked(self, ids: list[int] | Drop) -> Ids | Drop:
        if isinstance(ids, Drop):
            return ids
        if not ids:
            return Drop("empty_response", "nothing is left of it as tokens")
        if len(ids) > self._max_length:
            return Drop(
                "too_long", f"{len(ids)} tokens are more than data.max_length ({self._max_length})"
            )
        return np.array(ids, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class _Rendered:
    """What a template made: it has its special tokens already."""

    text: str


def _ends_text(tokenizer: Any) -> bool:
    """Whether the tokenizer itself puts a token behind each text, as BERT does with [SEP]."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    return bool(bare) and tokenizer("a")["input_ids"][-1] != bare[-1]


def _tokenized_pair(
    chosen: Ids | Drop, rejected: Ids | Drop, *, margin: float
) -> TokenizedPair | Drop:
    if isinstance(chosen, Drop):
        return replace(chosen, detail=f"chosen: {chosen.detail}")
    if isinstance(rejected, Drop):
        return replace(rejected, detail=f"rejected: {rejected.detail}")
    if np.array_equal(chosen, rejected):
        return Drop("identical_pair", "chosen and rejected are the same tokens")
    shared = _num_shared(chosen, rejected)
    return TokenizedPair(chosen[:shared], chosen[shared:], rejected[shared:], margin)


def _num_shared(chosen: Ids, rejected: Ids) -> int:
    """How many ids both begin with, less the last of the shorter side."""
    most = min(len(chosen), len(rejected)) - 1
    differs = chosen[:most] != rejected[:most]
    return int(differs.argmax()) if differs.any() else most
