"""What a row becomes: one of three kinds of preference pair, or the reason why it is none."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NoReturn, TypeAlias

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Message: TypeAlias = dict[str, Json]

Reason = Literal[
    "unparsable",
    "missing_field",
    "wrong_type",
    "empty_response",
    "identical_pair",
    "tie",
    "different_prompt",
    "not_a_pair",
    "bad_margin",
    "template_error",
    "no_eos",
    "too_long",
]

REASONS: Mapping[Reason, str] = {
    "unparsable": "the line is not one JSON object of well-formed text",
    "missing_field": "a column that the pair needs is missing",
    "wrong_type": "a value is null, or of another type than its place needs",
    "empty_response": "a reply is empty or only white space",
    "identical_pair": "both replies are the same",
    "tie": "neither reply was preferred",
    "different_prompt": "the two replies do not answer one and the same prompt",
    "not_a_pair": "the row judges single replies, not one against another",
    "bad_margin": "the margin is not a number between -10,000 and 10,000",
    "template_error": "the chat template does not accept the conversation",
    "no_eos": "plain text, and the tokenizer has no token to end it with",
    "too_long": "prompt and reply together exceed data.max_length",
}
"""The closed list of reasons for which a row is dropped, and what each means."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Why a row is left out: the reason that is counted, and what was wrong with this very row."""

    reason: Reason
    detail: str


class Refusal(Exception):
    """Raised where a row turns out to make no pair; its one argument is the `Drop`."""


def refuse(reason: Reason, detail: str) -> NoReturn:
    """Give up the row at hand."""
    raise Refusal(Drop(reason, detail))


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat template renders; `transcript` is the text it was parsed from, if it was."""

    messages: list[Message]
    tools: list[Json] = field(default_factory=list[Json])
    chat_template_kwargs: dict[str, Json] = field(default_factory=dict[str, Json])
    transcript: str | None = None


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts with a common start; the prompt is empty where the row does not set it apart."""

    prompt: str
    chosen: str
    rejected: str
    margin: float = 0.0

    @property
    def sides(self) -> tuple[str, str]:
        """Chosen and rejected in full."""
        return self.prompt + self.chosen, self.prompt + self.rejected


@dataclass(frozen=True, slots=True)
class ConversationPair:
    """A conversation and two ways in which it goes on, each from a reply to a reply."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    margin: float = 0.0
    tools: list[Json] = field(default_factory=list[Json])
    chat_template_kwargs: dict[str, Json] = field(default_factory=dict[str, Json])
    transcripts: tuple[str, str] | None = None

    @property
    def sides(self) -> tuple[Conversation, Conversation]:
        """Chosen and rejected in full."""
        chosen_text, rejected_text = self.transcripts or (None, None)
        return (
            self._whole(self.chosen, transcript=chosen_text),
            self._whole(self.rejected, transcript=rejected_text),
        )

    def _whole(self, reply: list[Message], *, transcript: str | None) -> Conversation:
        messages = self.prompt + reply
        return Conversation(messages, self.tools, self.chat_template_kwargs, transcript)


@dataclass(frozen=True, slots=True)
class TokenPair:
    """Token ids that were made elsewhere; they are used as they are."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    margin: float = 0.0

    @property
    def sides(self) -> tuple[list[int], list[int]]:
        """Chosen and rejected in full."""
        return self.prompt + self.chosen, self.prompt + self.rejected


Pair: TypeAlias = TextPair | ConversationPair | TokenPair
