"""Conversations as data sets hold them -> lists of messages as chat templates take them."""

import re
from collections.abc import Sequence

from rayrm.data.columns import decode, in_words, without_nulls
from rayrm.data.pairs import Json, Message, refuse

# Roles that ask. Every other role replies: assistant, and what else a template may know (bot ...).
_ASKING_ROLES = frozenset({"system", "developer", "user", "tool"})
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
_TRANSCRIPT = re.compile(r"\s*Human:.*?\n\nAssistant:", re.DOTALL)
_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant):")


def read_messages(value: Json, place: str, *, role: str) -> list[Message]:
    """Read messages, a single message, or text, which is one turn of `role`."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, dict) and value.keys() & {"role", "from"}:
        value = [value]
    if not isinstance(value, list):
        refuse("wrong_type", f"{place} is {in_words(value)}, not text or a list of messages")
    return [_read_message(item, f"{place}, turn {turn}") for turn, item in enumerate(value)]


def _read_message(value: Json, place: str) -> Message:
    message = without_nulls(value)
    if not isinstance(message, dict):
        refuse("wrong_type", f"{place} is {in_words(value)}, not a message")
    if "role" not in message and "from" in message:
        message = _from_sharegpt(message, place)
    role, content, calls = (message.get(key) for key in ("role", "content", "tool_calls"))
    if not isinstance(role, str) or not role:
        refuse("wrong_type", f"{place}: role is {in_words(role)}, not a name")
    if not isinstance(calls, list | None):
        refuse("wrong_type", f"{place}: tool_calls is {in_words(calls)}, not a list")
    if not calls:
        message.pop("tool_calls", None)
    elif content is None:
        content = ""
    return message | {"content": _read_content(content, place)}


def _read_content(content: Json, place: str) -> str:
    """Join the text parts [{type: text, text}], because many templates take only text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        refuse("wrong_type", f"{place}: content is {in_words(content)}, not text")
    texts: list[str] = []
    for part in content:
        text = None
        if isinstance(part, dict) and part.get("type", "text") == "text":
            text = part.get("text", part.get("value"))
        if not isinstance(text, str):
            refuse("wrong_type", f"{place}: content has a part that is no text")
        texts.append(text)
    return "".join(texts)


def _from_sharegpt(message: Message, place: str) -> Message:
    """{from, value} -> {role, content}; a function call -> an assistant turn with tool calls."""
    speaker, value = message.pop("from"), message.pop("value", None)
    if speaker != "function_call":
        role = _SHAREGPT_ROLES.get(speaker, speaker) if isinstance(speaker, str) else speaker
        return {"role": role, "content": value, **message}
    try:
        calls = decode(value) if isinstance(value, str) else value
    except ValueError:
        refuse("wrong_type", f"{place}: the function call is not JSON")
    functions = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(function, dict) and "name" in function for function in functions):
        refuse("wrong_type", f"{place}: the function call is not an object with a name")
    tool_calls: list[Json] = [{"type": "function", "function": call} for call in functions]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls, **message}


def is_transcript(text: str) -> bool:
    r"""Whether the text is laid out as in HH-RLHF: "\n\nHuman: ...\n\nAssistant: ..."."""
    return _TRANSCRIPT.match(text) is not None


def opens_as_transcript(text: str) -> bool:
    """Whether the text begins as a transcript does, though nobody may have answered yet."""
    return text.lstrip().startswith("Human:")


def read_transcript(text: str) -> list[Message]:
    """Cut a transcript at its speakers."""
    _, *parts = _SPEAKER.split(text.lstrip())
    return [
        {"role": "user" if speaker == "Human" else "assistant", "content": content.strip()}
        for speaker, content in zip(parts[::2], parts[1::2], strict=True)
    ]


def asks_first(side: Sequence[Message]) -> bool:
    """Whether a side brings its own prompt: it opens with a turn that asks."""
    return bool(side) and side[0]["role"] in _ASKING_ROLES


def asks_last(side: Sequence[Message]) -> bool:
    """Whether a side ends in a turn that asks, and so waits for a reply."""
    return bool(side) and side[-1]["role"] in _ASKING_ROLES


def check_ends_in_reply(side: Sequence[Message], name: str) -> None:
    """Refuse a side whose last turn is no reply, or says nothing and calls no tool."""
    if not side:
        refuse("empty_response", f"{name} has no messages")
    if asks_last(side):
        refuse("wrong_type", f"{name} ends in a {side[-1]['role']} turn, not in a reply")
    if not _words(side[-1])[1] and "tool_calls" not in side[-1]:
        refuse("empty_response", f"{name} ends in an empty reply")


def put_behind_prompt(
    prompt: list[Message], chosen: list[Message], rejected: list[Message]
) -> tuple[list[Message], list[Message]]:
    """Join prompt and sides, or leave sides as they are that both hold the prompt already."""
    sides = (chosen, rejected)
    if all(side[: len(prompt)] == prompt for side in sides):
        return sides
    if all(asks_first(side) for side in sides):
        said = [{_words(turn) for turn in side} for side in sides]
        if all(_words(turn) in words for turn in prompt for words in said):
            return sides
        if prompt[-1]["role"] == "user":
            refuse("different_prompt", "both sides open with turns that are not the prompt")
    return prompt + chosen, prompt + rejected


def num_shared_turns(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """How many turns both begin with, less the last one of the shorter side, which is its reply."""
    if [_stripped(turn) for turn in chosen] == [_stripped(turn) for turn in rejected]:
        refuse("identical_pair", "chosen and rejected are the same conversation")
    most = min(len(chosen), len(rejected)) - 1
    shared = next((turn for turn in range(most) if chosen[turn] != rejected[turn]), most)
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        if side[shared]["role"] in _ASKING_ROLES:
            role = side[shared]["role"]
            refuse("different_prompt", f"{name}, turn {shared}: a {role} turn that is not in both")
    return shared


def _words(message: Message) -> tuple[str, str]:
    """Who says what, less the white space around it."""
    return str(message["role"]), str(message["content"]).strip()


def _stripped(message: Message) -> Message:
    return message | {"content": _words(message)[1]}
