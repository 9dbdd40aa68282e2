"""From what a user gives (a YAML file, a mapping, dotted overrides) to a RunConfig, or one error.

Defaults come first, then the file, then the overrides in their order. Every fault is told at once,
and nothing has been started when it is told.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard, TypeVar, cast

import yaml
from pydantic import ValidationError

from rayrm.config.faults import dotted, faults_of, shown
from rayrm.config.schema import RunConfig, SweepConfig
from rayrm.errors import ConfigError

AnyConfig = TypeVar("AnyConfig", bound=RunConfig)
Source = str | os.PathLike[str] | Mapping[str, Any] | RunConfig | None
Tree = dict[str, Any]
_ABSENT = object()
_WHOLE_NUMBER = re.compile(r"[-+]?(0|[1-9][0-9_]*)$")


def load_config(
    source: Source = None,
    overrides: Sequence[str] = (),
) -> RunConfig:
    """The configuration that source gives (None: the shipped quickstart), with overrides over it.

    An override reads 'section.field=value', its value is YAML, and it makes the sections it needs.
    Raises ConfigError with a line for every fault.
    """
    return _load(RunConfig, source, overrides)


def load_sweep(source: Source, overrides: Sequence[str] = ()) -> SweepConfig:
    """The sweep that source gives, which has a search section; as load_config otherwise."""
    return _load(SweepConfig, source, overrides)


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """The run that config gives, without what it searches, with values at dotted fields.

    Raises ConfigError with a line for every fault.
    """
    tree: Any = dump_config(config)
    tree.pop("search", None)
    for field, value in values.items():
        tree = _placed(tree, field.split("."), value)
    return load_config(tree)


def _load(kind: type[AnyConfig], source: Source, overrides: Sequence[str]) -> AnyConfig:
    tree, name = _read(source)
    tree = _merged(dump_config(RunConfig()), tree)
    faults: list[str] = []
    paths: list[str] = []
    for override in overrides:
        try:
            path, value = _parse_override(override)
            tree = _placed(tree, path, value)
            paths.append(dotted(path))
        except ConfigError as error:
            faults.append(str(error))
    try:
        config = kind.model_validate(tree)
    except ValidationError as error:
        faults += [_line(path, text, paths) for path, text in faults_of(error).items()]
    else:
        if not faults:
            return config
    count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    raise ConfigError("\n  ".join([f"{count} in {name}:", *faults]))


def dump_config(config: RunConfig) -> Tree:
    """The configuration as plain JSON data, every default written out; load_config reads it."""
    return config.model_dump(mode="json")


def differing_fields(one: RunConfig, other: RunConfig) -> list[str]:
    """Dotted paths of the fields in which two configurations differ."""
    return list(_differences(dump_config(one), dump_config(other), ()))


def _differences(one: Any, other: Any, path: tuple[str, ...]) -> Iterator[str]:
    if _is_tree(one) and _is_tree(other):
        for key in {**one, **other}:
            yield from _differences(one.get(key, _ABSENT), other.get(key, _ABSENT), (*path, key))
    elif one != other:
        yield dotted(path)


def _is_tree(value: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping)


def _line(path: str, text: str, overridden: Sequence[str]) -> str:
    by_override = any(f"{path}.".startswith(f"{given}.") for given in overridden)
    return f"{path}: {text}{' (override)' if by_override else ''}".removeprefix(": ")


def _read(source: Source) -> tuple[Tree, str]:
    """What source says, and what to call it in a message."""
    if isinstance(source, RunConfig):
        return dump_config(source), "the configuration"
    if isinstance(source, Mapping):
        return dict(source), "the configuration"
    path = _quickstart() if source is None else Path(source)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from None
    tree = _parse_yaml(text, str(path))
    if tree is None:
        return {}, str(path)
    if not _is_tree(tree):
        raise ConfigError(f"{path} should hold sections (train:, data: ...), not {shown(tree)}")
    return dict(tree), str(path)


def _quickstart() -> Path:
    """The shipped configs/quickstart.yaml, which a wheel carries beside this module."""
    packaged = Path(__file__).with_name("quickstart.yaml")
    return packaged if packaged.exists() else Path(__file__).parents[2] / "configs/quickstart.yaml"


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """The sections of over laid on those of base; what is no mapping is replaced whole."""
    merged = dict(base)
    for key, value in over.items():
        below = base.get(key)
        merged[key] = _merged(below, value) if _is_tree(below) and _is_tree(value) else value
    return merged


def _parse_override(override: str) -> tuple[list[str], Any]:
    name, equals, text = override.partition("=")
    path = name.split(".")
    if not equals or not all(re.fullmatch(r"[^\s.]+", part) for part in path):
        raise ConfigError(f"{shown(name)} is no override; write section.field=value")
    try:
        return path, _parse_yaml(text, name)
    except ConfigError as error:
        raise ConfigError(f"{error}; does the value need quotes? (override)") from None


def _placed(node: Any, path: Sequence[str], value: Any, above: tuple[str, ...] = ()) -> Any:
    """A copy of node with value at the path under it; null on the way becomes a section."""
    if not path:
        return value
    head, rest, here = path[0], path[1:], (*above, path[0])
    if above[:2] in (("data", "train"), ("data", "eval")):
        node = _without_shorthand(node, head)
    if isinstance(node, list | tuple):
        items = [*cast("list[Any]", node), None]
        if not head.isdecimal() or int(head) >= len(items):
            raise ConfigError(
                f"{dotted(here)}: {dotted(above)} is a list of {len(items) - 1}; "
                f"name an item, such as {dotted(above)}.0, or one more to append (override)"
            )
        items[int(head)] = _placed(items[int(head)], rest, value, here)
        return items if int(head) == len(items) - 1 else items[:-1]
    node = {} if node is None else node
    if _is_tree(node):
        return {**node, head: _placed(node.get(head), rest, value, here)}
    raise ConfigError(f"{dotted(here)}: {dotted(above)} is {shown(node)}, not a section (override)")


def _without_shorthand(node: Any, head: str) -> Any:
    """The sources as head reaches into them: a bare path or a list of one stands for its source."""
    if isinstance(node, list | tuple) and len(items := cast("list[Any]", node)) == 1:
        node = items[0]
    if isinstance(node, str):
        node = {"path": node}
    if _is_tree(node) and list(node) == [""]:
        node = node[""]
    return [node] if head.isdecimal() and _is_tree(node) and "path" in node else cast(Any, node)


class _YamlLoader(yaml.SafeLoader):
    """Safe YAML in which a date, 007 or 1:30 stays text, and a name is text and comes once."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                written = f" {key.value}" if isinstance(key, yaml.ScalarNode) else ""
                raise _fault_at(key, f"the name{written} is not text to YAML; put it in quotes")
            if key.value in seen:
                raise _fault_at(key, f"{key.value} is given twice")
            seen.add(key.value)
        return node


_YamlLoader.yaml_implicit_resolvers = {
    first: [
        (tag, _WHOLE_NUMBER if tag.endswith(":int") else form)
        for tag, form in forms
        if not tag.endswith(":timestamp")
    ]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _fault_at(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _parse_yaml(text: str, name: str) -> Any:
    try:
        value = yaml.load(text, _YamlLoader)
        json.dumps(value, default=str)  # refuses an anchor that holds itself
        return value
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{name}{place}: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{name}: {str(error).splitlines()[0]}") from None
