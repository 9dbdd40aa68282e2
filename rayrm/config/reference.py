"""The schema in words: where a dotted path leads, what fits there, and the printed reference."""

import json
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any

from rayrm.config.schema import SweepConfig

Node = dict[str, Any]  # a JSON schema, or a part of one

_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
_PLAIN = {"boolean": "true or false", "integer": "whole number", "number": "number", "null": "null"}


@cache
def root() -> Node:
    """The JSON schema of all sections; search is that of sweeps alone."""
    return SweepConfig.model_json_schema()


def alternatives(node: Node) -> list[Node]:
    """Everything that may stand here: unions opened, references followed."""
    if "$ref" in node:
        return alternatives(root()["$defs"][node["$ref"].rpartition("/")[2]])
    options = node.get("anyOf") or node.get("oneOf")
    if options:
        return [found for option in options for found in alternatives(option)]
    return [node]


def tags_of(node: Node) -> dict[str, Node]:
    """The sections that may stand here by the ``type`` that tells them apart."""
    return {tag: option for option in alternatives(node) if (tag := _tag(option)) is not None}


def _tag(option: Node) -> str | None:
    return option.get("properties", {}).get("type", {}).get("const")


def fields_of(node: Node) -> Node:
    """The fields of the section that may stand here, by name; empty if none may."""
    sections = [option for option in alternatives(node) if "properties" in option]
    return sections[0]["properties"] if sections else {}


def child(node: Node, key: str | int) -> Node | None:
    """What may stand under this key or index, or None where the schema has no such place."""
    fields = fields_of(node)
    if key in fields:
        return fields[key]
    for option in alternatives(node):
        if isinstance(key, int) and option.get("type") == "array":
            return option["items"]
        if isinstance(key, str) and (values := _values_of(option)) is not None:
            return values
    return None


def type_in_words(node: Node) -> str:
    """What fits here, such as 'whole number >= 1 or null'."""
    return " or ".join(dict.fromkeys(_option_in_words(option) for option in alternatives(node)))


def dotted_fields(node: Node | None = None, prefix: str = "") -> Iterator[tuple[str, Node]]:
    """Every field with its dotted path, sections before what they hold."""
    for name, field in fields_of(root() if node is None else node).items():
        yield prefix + name, field
        yield from dotted_fields(field, f"{prefix}{name}.")


def describe_fields(*, of_sweep: bool = False) -> str:
    """The reference: every field with its type, its default and its sentence."""
    return "\n".join(_entry(path, field) for path, field in _fields(of_sweep))


def list_fields(*, of_sweep: bool = False) -> str:
    """Every field with its sentence, for a first look."""
    return "\n".join(
        _wrapped(_sentence(field), f"  {path:34} " if "." in path else f"\n{path:36} ", 37)
        for path, field in _fields(of_sweep)
    )


def _fields(of_sweep: bool) -> Iterator[tuple[str, Node]]:
    for path, field in dotted_fields():
        if of_sweep or path.partition(".")[0] != "search":
            yield path, field


def _entry(path: str, field: Node) -> str:
    if "." not in path:
        return f"\n{path}: {_sentence(field)}"
    default = f" (default: {json.dumps(field['default'])})" if "default" in field else ""
    about = [type_in_words(field) + default, _sentence(field)]
    return "\n".join([f"  {path}", *(_wrapped(line, " " * 6, 6) for line in about)])


def _wrapped(text: str, first: str, indent: int) -> str:
    return textwrap.fill(
        text, 100, initial_indent=first, subsequent_indent=" " * indent, break_on_hyphens=False
    )


def _sentence(field: Node) -> str:
    """The field's sentence, which pydantic leaves to the section where both say the same."""
    text: str = field.get("description") or alternatives(field)[0]["description"]
    return " ".join(text.split())


def _option_in_words(option: Node) -> str:
    match option:
        case {"enum": values}:
            return f"one of {', '.join(map(str, values))}"
        case {"const": value}:
            return str(value)
        case {"type": "string"}:
            return f"text matching {option['pattern']}" if "pattern" in option else "text"
        case {"type": "array"}:
            words = f"list of {_grouped(type_in_words(option['items']))}"
            return f"{words}, not empty" if option.get("minItems") else words
        case {"properties": fields}:
            tag = _tag(option)
            names = [name for name in fields if tag is None or name != "type"]
            return f"{{{', '.join(names if tag is None else [f'type: {tag}', *names])}}}"
        case {"type": "object"}:
            words = f"mapping of names to {_grouped(type_in_words(_values_of(option) or {}))}"
            return f"{words}, not empty" if option.get("minProperties") else words
        case {"type": kind}:
            bounds = [f"{sign} {option[key]}" for key, sign in _BOUNDS.items() if key in option]
            return " ".join([_PLAIN[kind], " and ".join(bounds)]).strip()
        case _:
            return "any value"


def _grouped(words: str) -> str:
    return f"({words})" if " or " in words else words


def _values_of(option: Node) -> Node | None:
    """What the values of a free mapping may be, or None where this is no free mapping."""
    patterns: Node = option.get("patternProperties", {})
    values: Node | bool = option.get("additionalProperties", False)
    return next(iter(patterns.values()), values if isinstance(values, dict) else None)
