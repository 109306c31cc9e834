"""No circles of imports, one direction between rooms, and a class name that means one thing."""

import ast
import os
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.architecture.test_imports import FOLDERS, ROOT

ROOMS = ("text", "mesh", "model", "schedule", "generate", "trace", "cost", "plan")
"""Of `scheduling`; each may import those before it."""
MOST_NAMES_TWICE = 3


def name_of(path: Path) -> str:
    """``scheduling.mesh.layout``; of a folder's ``__init__.py``, the folder."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def imported(name: str) -> Iterator[str]:
    """Modules of the package that a module imports, also inside functions and for types alone."""
    for node in ast.walk(TREES[name]):
        dotted: list[str] = []
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            dotted = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        known = [text.removeprefix("braid.") for text in dotted]
        # `from braid.a import b` runs `a`, but means `a.b` where that is a module
        modules = [text for text in known if text in MODULES]
        yield from modules[1:] or modules


IMPORTS = {name: set(imported(name)) - {name} for name in MODULES}


def test_no_circles_of_imports() -> None:
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        pytest.fail("a circle of imports: " + " -> ".join(error.args[1]))


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_of_scheduling_import_earlier_rooms_only(room: str) -> None:
    allowed = {f"scheduling.{earlier}" for earlier in ROOMS[: ROOMS.index(room) + 1]}
    for name, targets in IMPORTS.items():
        if f"{name}.".startswith(f"scheduling.{room}."):
            for target in targets:
                assert ".".join(target.split(".")[:2]) in allowed, f"{name} must not import {target}"


def test_every_module_of_scheduling_is_in_a_room() -> None:
    rooms = {name.split(".")[1] for name in MODULES if name.startswith("scheduling.")}
    assert rooms == {*ROOMS}


def test_class_names_mean_one_thing() -> None:
    defined = defaultdict(list)
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                defined[node.name.lstrip("_")].append(name)
    twice = {name: places for name, places in defined.items() if len(places) > 1}
    assert len(twice) <= MOST_NAMES_TWICE, f"rename one of each: {twice}"


@pytest.mark.parametrize("folder", sorted({path.parent for path in MODULES.values()}))
def test_every_folder_says_what_lies_there(folder: Path) -> None:
    text = ast.get_docstring(TREES[name_of(folder / "__init__.py")])
    assert text, f"{folder}/__init__.py has no docstring"
    for word in text.split("`")[1::2]:
        if word.endswith(".py"):
            assert (folder / word).exists(), f"{folder}/__init__.py names {word}, which is not there"


def test_the_glossary_has_at_most_twenty_words() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    glossary = text.split("## 3. Glossary")[1].split("\n## ")[0]
    assert 10 < sum(line.startswith("| ") for line in glossary.splitlines()) - 2 <= 20


PARSING = {
    *("split", "rsplit", "partition", "rpartition", "removeprefix", "removesuffix", "startswith", "endswith"),
    *("match", "fullmatch", "search", "findall", "finditer"),
}
"""Methods that take a text apart."""
BORDERS = {
    "scheduling.text": "YAML, patterns, other systems' words",
    "scheduling.mesh.partition": "a partition as text",
    "scheduling.model.operators": "keys of a profile's file; names that a schedule's text can hold",
    "scheduling.model.recompute": "`train.recompute`",
    "scheduling.model.presets.library": "names of files",
    "scheduling.schedule.text": "a schedule as text",
    "scheduling.schedule.order": "an order as text",
    "scheduling.generate.named": "a schedule's name",
    "scheduling.trace.figures": "numbers for people",
}


def test_texts_are_parsed_at_the_borders_alone() -> None:
    """Between the borders code reads types: kinds of layers, factors of axes, partitions, orders, keys."""
    for name, tree in TREES.items():
        if not name.startswith("scheduling.") or any(f"{name}.".startswith(f"{room}.") for room in BORDERS):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                assert node.func.attr not in PARSING, f"{name}:{node.lineno} takes a text apart"


def test_a_test_file_stays_in_one_process(request: pytest.FixtureRequest) -> None:
    """Else two processes make the same fixtures, such as clusters. pytest-xdist loses the groups without a
    word if pytest is too new or if `tests/conftest.py` names them too late."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("one process runs all tests")
    assert request.node.nodeid.endswith("@tests/architecture/test_structure.py")
