"""The examples of README and pages run as they stand, and what those name exists."""

import re
import shlex
from pathlib import Path

import pytest

from tests.end_to_end.command import ROOT, braid

README = ROOT / "README.md"
GUIDES = (
    README,
    *(
        ROOT / "docs" / name
        for name in ("guide.md", "schedules.md", "dashboards.md", "failures.md", "models.md")
    ),
)
"""Pages whose examples run one after the other, in one folder: those of a page need the runs of others."""
MOST_LINES = 170
_LINK = re.compile(r"\]\(([^()\s]+)\)")


pytestmark = pytest.mark.alone


def blocks(page: Path, language: str) -> list[str]:
    """Fenced code blocks of a language."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    """The ``$ braid ...`` lines, without comments and without those that need several machines."""
    lines = [
        line
        for page in GUIDES
        for block in blocks(page, "console")
        for line in block.splitlines()
        if line.startswith("$ braid ")
    ]
    split = [shlex.split(line.removeprefix("$ braid "), comments=True) for line in lines]
    return [words for words in split if "--address" not in words]


def write_first(folder: Path, *, small: bool = False) -> None:
    """Write the README's configuration as it says, or of a model that trains in a moment."""
    text = blocks(README, "yaml")[0]
    if small:
        for size in ("hidden", "sequence"):
            assert f"{size}: 128" in text
            text = text.replace(f"{size}: 128", f"{size}: 32")
    (folder / "first.yaml").write_text(text, encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(900)  # every command of the README and the pages, most of them whole runs
def test_examples_run_in_order(tmp_path: Path) -> None:
    """The file is tried as it stands; what is run has a smaller model, and no Ray, which is quicker."""
    write_first(tmp_path)
    for words in commands():
        if words[0] == "train" and "--launcher" not in words and "--dry-run" not in words:
            write_first(tmp_path, small=True)
            words = [*words, "--launcher", "processes"]
        outcome = braid(tmp_path, *words, timeout=150)
        assert outcome.code == 0, f"braid {shlex.join(words)}\n{outcome.output}{outcome.errors}"


def test_every_example_stands_once() -> None:
    """Each costs seconds; and there are examples of every page, of runs and of schedules."""
    found = [shlex.join(words) for words in commands()]
    assert len(found) == len(set(found))
    for page in GUIDES:
        assert any("$ braid " in block for block in blocks(page, "console")), page
    assert {"train", "schedule"} <= {words[0] for words in commands()}


@pytest.mark.slow
def test_own_schedule_file(tmp_path: Path) -> None:
    write_first(tmp_path)
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
    table = README.read_text(encoding="utf-8").split("## Where things are")[1].split("## Developing")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) >= 8
    for folder_cell, _, files_cell in rows:
        folder = ROOT / re.findall(r"`([^`]+)`", folder_cell)[0]
        assert folder.exists(), folder
        for name in re.findall(r"`([^`]+)`", files_cell):
            assert (folder / name).exists(), folder / name


@pytest.mark.parametrize("page", [README, *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """To files that exist, and to headings that the page there has."""
    links = [link for link in _LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    missing = []
    for link in links:
        name, _, heading = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (heading and heading not in anchors(target)):
            missing.append(link)
    assert not missing, f"{page.name} links to what is not there: {', '.join(missing)}"


def test_what_catches_a_pitfall_exists() -> None:
    """Files, and where one is named the test in it."""
    text = (ROOT / "docs" / "pitfalls.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+(?:\.py)?)(?:::(\w+))?`", text)
    assert len(named) > 20
    for file, test in named:
        assert (ROOT / file).exists(), file
        assert not test or f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), test


def anchors(page: Path) -> set[str]:
    """Headings as links name them: lower case, hyphens for spaces, no punctuation."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_short() -> None:
    """What needs more room has a page under docs/."""
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MOST_LINES
