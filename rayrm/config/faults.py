"""What pydantic found wrong, a line a fault, in the words of whoever wrote the config."""

import json
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rayrm.config.fields import is_secret_name, secret_remedy
from rayrm.config.reference import child, dotted_fields, fields_of, root, tags_of, type_in_words

_QUOTE = "put it in quotes if it is text"


def dotted(path: Iterable[str | int]) -> str:
    """The path as it is typed; the name of the only evaluation set is empty and left out."""
    return ".".join(str(part) for part in path if part != "")


def faults_of(error: ValidationError) -> dict[str, str]:
    """Every fault's dotted path and what to say of it; no refused value of an unknown key in it."""
    faults: dict[str, str] = {}
    for details in error.errors(include_url=False):
        path, text = _fault(details)
        faults.setdefault(path, text)
    return faults


def shown(value: Any) -> str:
    """The value as YAML has it, cut when long."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _fault(details: ErrorDetails) -> tuple[str, str]:
    loc, kind, given = details["loc"], details["type"], details["input"]
    if kind == "extra_forbidden":
        path = [*_locate(loc[:-1])[0], loc[-1]]
        return dotted(path), _unknown_key(loc, dotted(path))
    path, node = _locate(loc)
    context = details.get("ctx", {})
    if kind.startswith("union_tag"):
        path, tags = [*path, "type"], ", ".join(tags_of(node))
        found = f'got "{context["tag"]}",' if "tag" in context else "missing;"
        return dotted(path), f"{found} expected one of {tags}"
    expected = type_in_words(node)
    if kind == "value_error":
        text = str(context["error"])
    elif kind == "missing" and loc == ("search",):
        text = "missing: a sweep has this section; a single run is trained by python -m rayrm.train"
    elif kind == "missing":
        text = f"missing; expected {expected}"
    elif kind == "invalid_key" or loc[-1:] == ("[key]",):
        remedy = f"it should match {context['pattern']}" if "pattern" in context else _QUOTE
        text = f"the name {shown(given)} does not fit; {remedy}"
    elif given is None and kind == "model_type":
        text = "null; give it fields, or leave the line out for the defaults"
    else:
        quote = "text" in expected and isinstance(given, bool | int | float)
        text = f"got {shown(given)}, expected {expected}{f'; {_QUOTE}' if quote else ''}"
    return dotted(path), text


def _locate(loc: tuple[str | int, ...]) -> tuple[list[str | int], dict[str, Any]]:
    """The part of pydantic's location that a user wrote, and its schema: no tag of a union."""
    path, node = list[str | int](), root()
    for part in loc:
        if (inner := child(node, part)) is not None:
            path, node = [*path, part], inner
        elif isinstance(part, str) and part in (tags := tags_of(node)):
            node = tags[part]
        else:
            break
    return path, node


def _unknown_key(loc: tuple[str | int, ...], path: str) -> str:
    name = str(loc[-1])
    if path == "search":
        return "sweeps run with python -m rayrm.tune"
    if is_secret_name(name):
        return f"unknown key; {secret_remedy(path)}"
    siblings = [key for key in fields_of(_locate(loc[:-1])[1]) if (len(loc), key) != (1, "search")]
    if near := get_close_matches(name, siblings, n=1, cutoff=0.75):
        return f"unknown key; did you mean {near[0]}?"
    elsewhere = [field for field, _ in dotted_fields() if field.endswith(f".{name}")]
    hint = f"; did you mean {' or '.join(elsewhere)}?" if elsewhere else ""
    return f"unknown key; the fields here are {', '.join(siblings)}{hint}"
