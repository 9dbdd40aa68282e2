"""Holds every import to one table: who may import whom, and where each framework lives."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "rayrm"
ROOT = "rayrm"  # the package root, rayrm/__init__.py

FLOORS = {
    "errors": -1,  # below everything
    "config.fields": 0,
    "config.schema": 0,
    "config.reference": 0,
    "config.faults": 0,
    "config.space": 0,
    "config.loader": 0,
    "data.synthetic": 0,
    "data.pairs": 1,
    "data.columns": 1,
    "data.messages": 1,
    "data.formats": 1,
    "data.tokenize": 1,
    "data.packing": 1,
    "data.plan": 1,
    "data.report": 1,
    "model.heads": 1,
    "model.loss": 1,
    "model.metrics": 1,
    "model.quickstart": 1,
    "model.tokenizer": 1,
    "training.zero": 1,
    "training.storage": 1,
    "training.commits": 1,
    "model.shared_prompt": 2,
    "model.reward": 2,
    "model.build": 2,
    "model.adapters": 2,
    "model.quantize": 2,
    "data.sources": 2,
    "data.pipeline": 2,
    "data.feed": 2,
    "data.intake": 2,
    "training.engine": 3,
    "training.loop": 3,
    "training.preparation": 3,
    "training.judge": 3,
    "training.evaluate": 3,
    "training.checkpoint": 3,
    "training.schedule": 1,
    "training.branch": 4,
    "training.state": 2,
    "training.export": 3,
    "training.curves": 2,
    "training.card": 3,
    "training.tracking": 3,
    "training.job": 3,
    "training.journal": 3,
    "training.convert": 4,
    "training.worker": 4,
    "training.entry": 4,
    "board": 4,
    "cluster": 4,
    "preflight": 4,
    "launch": 5,
    "tuning.runners": 6,
    "tuning.trial": 6,
    "tuning.proposals": 6,
    "tuning.schedulers": 6,
    "tuning.page": 6,
    "tuning.answer": 6,
    "tuning.progress": 6,
    "tuning.search": 7,
    "cli": 8,
    "train": 8,
    "tune": 8,
    "export": 8,
    ROOT: 8,
}

FRAMEWORKS = {
    "ray": {
        "data.sources",
        "data.pipeline",
        "data.feed",
        "training.checkpoint",
        "training.worker",
        "board",
        "cluster",
        "launch",
        "tuning.runners",
        "tuning.trial",
        "tuning.proposals",
        "tuning.schedulers",
        "tuning.answer",
        "tuning.progress",
        "tuning.search",
    },
    "deepspeed": {"training.engine", "training.state"},
    "accelerate": {"training.engine"},
    "wandb": {"training.tracking"},
    "peft": {"model.adapters", "training.export"},
}

FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "__init__.py"
} | {ROOT: PACKAGE / "__init__.py"}


def imports(source: str) -> Iterator[str]:
    """Every dotted name that is imported, at any depth, and for types only too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the floor"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(source: str) -> set[str]:
    """The modules of rayrm among the imports, as FLOORS names them."""
    found: set[str] = set()
    for name in imports(source):
        parts = name.split(".")
        if parts[0] == ROOT:
            named = [".".join(parts[1:end]) for end in range(len(parts), 1, -1)]
            found.add(next((module for module in named if module in FILES), ROOT))
    return found


def may_import(module: str, other: str) -> bool:
    """Whether the table lets the module import the other one."""
    same_package = module.rpartition(".")[0] == other.rpartition(".")[0]
    below = FLOORS[module] - FLOORS[other]
    return below > 0 or (below == 0 and same_package)


@pytest.mark.parametrize("module", FILES)
def test_a_module_stands_in_the_table_and_imports_no_higher_floor(module: str):
    assert module in FLOORS
    forbidden = [
        other
        for other in own_imports(FILES[module].read_text())
        if other not in FLOORS or not may_import(module, other)
    ]
    assert forbidden == []


@pytest.mark.parametrize("module", FILES)
def test_a_framework_is_imported_only_where_it_lives(module: str):
    tops = {name.split(".")[0] for name in imports(FILES[module].read_text())}
    assert [top for top in tops if module not in FRAMEWORKS.get(top, FILES)] == []


def test_no_modules_import_each_other_in_a_circle():
    graph = {module: own_imports(path.read_text()) for module, path in FILES.items()}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*/__init__.py")), ids=lambda p: p.parent.name)
def test_an_inner_package_imports_nothing(path: Path):
    assert list(imports(path.read_text())) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from rayrm.config.schema import RunConfig", {"config.schema"}),
        ("def f():\n    from rayrm.config import loader", {"config.loader"}),
        ("import rayrm.errors", {"errors"}),
        ("from rayrm import __version__", {ROOT}),
        ("import torch, rayrmless", set()),
    ],
)
def test_imports_are_seen_in_every_form(source: str, found: set[str]):
    assert own_imports(source) == found


def test_the_table_lets_lower_floors_and_neighbours_be_imported_only():
    assert may_import("training.worker", "training.engine")
    assert may_import("data.packing", "data.pairs")
    assert not may_import("data.packing", "model.loss")
    assert not may_import("data.packing", "data.sources")
    assert not may_import("launch", ROOT)


@pytest.mark.parametrize("module", ["rayrm.board", "rayrm.data.feed", "rayrm.training.entry"])
def test_what_actors_load_needs_no_torch(module: str):
    # each of Ray's processes would pay seconds and half a gigabyte for it
    script = f"import sys, {module}; print({{'torch', 'transformers'}} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"
