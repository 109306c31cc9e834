"""The procedures of `docs/recipes` work: their patches apply, and the command that ends each one passes."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.test_imports import FOLDERS, ROOT
from tests.end_to_end.test_readme import blocks

RECIPES = {"axis": 8, "block": 3, "family": 4, "operator": 3}
"""Most files of the product, tests and docs apart, that each may change."""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of product and tests."""
    for folder in (*FOLDERS, "braid", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / "tree" / folder, symlinks=True, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "tree")
    return tmp_path / "tree"


def test_every_recipe_is_tried() -> None:
    assert {path.stem for path in (ROOT / "docs" / "recipes").glob("*.md")} == {*RECIPES}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_works(tree: Path, recipe: str) -> None:
    page = ROOT / "docs" / "recipes" / f"{recipe}.md"
    patch = "".join(blocks(page, "diff"))
    changed = {line.removeprefix("+++ b/") for line in patch.splitlines() if line.startswith("+++ b/")}
    assert len({path for path in changed if path.split("/")[0] in FOLDERS}) <= RECIPES[recipe]
    subprocess.run(["git", "apply", "-"], input=patch, text=True, cwd=tree, check=True)
    (console,) = blocks(page, "console")
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    for line in console.splitlines():
        python, *arguments = shlex.split(line.removeprefix("$ "))
        assert python == "python"
        command = [sys.executable, *arguments]
        ended = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout + ended.stderr
