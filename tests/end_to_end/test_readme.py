"""The README's examples run as they stand."""

import re
import shlex
from pathlib import Path

import pytest

from tests.end_to_end.command import ROOT, braid

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """Fenced code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    """The ``$ braid ...`` lines, without comments and without those that need several machines."""
    lines = [
        line for block in blocks("console") for line in block.splitlines() if line.startswith("$ braid ")
    ]
    split = [shlex.split(line.removeprefix("$ braid "), comments=True) for line in lines]
    return [words for words in split if "--address" not in words]


@pytest.mark.slow
@pytest.mark.timeout(900)  # every command of the README, most of them whole runs
def test_examples_run_in_order(tmp_path: Path) -> None:
    (tmp_path / "first.yaml").write_text(blocks("yaml")[0], encoding="utf-8")
    assert len(commands()) >= 4
    for words in commands():
        outcome = braid(tmp_path, *words, timeout=150)
        assert outcome.code == 0, f"braid {shlex.join(words)}\n{outcome.output}{outcome.errors}"
    text = [words for words in commands() if "schedule" in words]
    assert text, "the README shows how to draw a schedule"


@pytest.mark.slow
def test_own_schedule_file(tmp_path: Path) -> None:
    (tmp_path / "first.yaml").write_text(blocks("yaml")[0], encoding="utf-8")
    assert braid(tmp_path, "schedule", "first.yaml", "--output", "mine.txt").code == 0
    common = ("train", "first.yaml", "--launcher", "processes", "--set", "train.steps=2")
    outcome = braid(tmp_path, *common, "--set", "overlap.schedule_file=mine.txt")
    assert outcome.code == 0, outcome.errors
    damaged = (tmp_path / "mine.txt").read_text().replace("B1.0", "", 1)
    (tmp_path / "mine.txt").write_text(damaged)
    refused = braid(tmp_path, *common, "--overwrite", "--set", "overlap.schedule_file=mine.txt")
    assert refused.code == 2
    assert "B1.0" in refused.errors
    assert "stage 0" in refused.errors


def test_the_map_is_true() -> None:
    """Every file and folder that the README's map names exists."""
    table = README.split("## Where things are")[1].split("## Developing")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) >= 8
    for folder_cell, _, files_cell in rows:
        folder = ROOT / re.findall(r"`([^`]+)`", folder_cell)[0]
        assert folder.exists(), folder
        for name in re.findall(r"`([^`]+)`", files_cell):
            assert (folder / name).exists(), folder / name
