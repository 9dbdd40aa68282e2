"""The columns of a row: their names, and the values that all layouts read alike."""

import json
from collections.abc import Mapping
from typing import TypeAlias, TypeGuard

from rayrm.data.pairs import Json, refuse

Row: TypeAlias = Mapping[str, Json]

COLUMNS = frozenset(
    {"prompt", "chosen", "rejected", "margin", "tools", "chat_template_kwargs"}
    | {"messages", "conversations"}
    | {f"{part}_{ids}" for part in ("prompt", "chosen", "rejected") for ids in ("ids", "input_ids")}
    | {"conversation_a", "conversation_b", "response_a", "response_b"}
    | {"winner", "winner_model_a", "winner_model_b", "winner_tie"}
    | {"instruction", "completions", "scores"}
)
"""The standard column names: what the keys of `data.columns` may be."""

MAX_MARGIN = 10_000


def with_standard_names(row: Row, columns: Mapping[str, str]) -> Row:
    """Rename the columns that the user called by their own names; each must be there."""
    for standard, own in columns.items():
        if own not in row:
            what = f"there is no {own}, which data.columns names for {standard}"
            refuse("missing_field", f"{what}; {columns_of(row)}")
    hidden = {*columns, *columns.values()}
    kept = {name: value for name, value in row.items() if name not in hidden}
    return kept | {standard: row[own] for standard, own in columns.items()}


def columns_of(row: Row) -> str:
    """Tell which columns the row has."""
    names = ", ".join(name[:40] for name in list(row)[:12])
    return f"the row has {names or 'no columns'}{' and more' if len(row) > 12 else ''}"


def read_margin(row: Row) -> float:
    """Return the margin, 0 where there is none."""
    margin = row.get("margin")
    if margin is None:
        return 0.0
    if not is_number(margin):
        refuse("bad_margin", f"margin is {in_words(margin)}, not a number")
    if not abs(margin) <= MAX_MARGIN:  # true for NaN
        refuse("bad_margin", f"margin is {str(margin)[:20]}, not between -10,000 and 10,000")
    return float(margin)


def read_tools(row: Row) -> list[Json]:
    """Return the tools that a row offers: a list, JSON text of one, or nothing."""
    tools = _structure(row, "tools")
    if tools is None:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        refuse("wrong_type", "tools is not a list of objects")
    return tools


def read_chat_template_kwargs(row: Row) -> dict[str, Json]:
    """Return what a row hands to the chat template: an object, JSON text of one, or nothing."""
    kwargs = _structure(row, "chat_template_kwargs")
    if kwargs is None:
        return {}
    if not isinstance(kwargs, dict):
        refuse("wrong_type", f"chat_template_kwargs is {in_words(kwargs)}, not an object")
    return kwargs


def _structure(row: Row, name: str) -> Json:
    value = row.get(name)
    if isinstance(value, str):
        try:
            value = decode(value) if value.strip() else None
        except ValueError as error:
            refuse("wrong_type", f"{name} is text, but not JSON: {error}")
    return without_nulls(value)


def read_ids(row: Row, name: str) -> list[int]:
    """Return a list of token ids."""
    if name not in row:
        refuse("missing_field", f"there is no {name}; {columns_of(row)}")
    value = row[name]
    if not isinstance(value, list):
        refuse("wrong_type", f"{name} is {in_words(value)}, not a list of token ids")
    ids = [item for item in value if isinstance(item, int) and not isinstance(item, bool)]
    if len(ids) < len(value) or min(ids, default=0) < 0:
        refuse("wrong_type", f"{name} holds something else than token ids")
    return ids


def decode(text: str) -> Json:
    """Parse JSON text that may later be encoded as UTF-8; ValueError where it is no JSON."""
    try:
        text.encode()
        value: Json = json.loads(text)
        if "\\ud" in text or "\\uD" in text:  # an escape that stands for one half of a character
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        refuse("unparsable", "it holds half of a surrogate pair, which is no text")
    return value


def in_words(value: Json) -> str:
    """What kind of JSON value this is, for messages to the user."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case list():
            return "a list"
        case dict():
            return "an object"


def without_nulls(value: Json) -> Json:
    """Take out keys whose value is null: Arrow adds them so that all rows have the same keys."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def is_number(value: Json) -> TypeGuard[int | float]:
    """Whether the value is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)
