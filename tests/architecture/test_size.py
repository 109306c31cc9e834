"""How many lines each folder has. Who makes a folder smaller lowers its number; nobody raises one without a
sentence in docs/log.md that says why."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = {"actors": 17560, "dashboards": 2260, "jobs": 10400, "kernels": 4180, "scheduling": 16450}
TESTS = {
    "actors": 8050,
    "architecture": 370,
    "cuda": 4720,
    "dashboards": 2920,
    "end_to_end": 5770,
    "gpu": 1200,
    "jobs": 5560,
    "kernels": 2250,
    "measure": 510,
    "papers": 1290,
    "recorded": 570,
    "scheduling": 6130,
}
PAGE = 1_580
ROOM = 150
"""Lines below its number that a folder may have before the number has to be lowered."""


def lines(folder: Path, *suffixes: str) -> int:
    """Of all files with these suffixes under a folder."""
    files = (path for path in folder.rglob("*") if path.suffix in suffixes)
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


@pytest.mark.parametrize("folder", [*PRODUCT, *(f"tests/{name}" for name in TESTS)])
def test_no_folder_grows(folder: str) -> None:
    most = {**PRODUCT, **{f"tests/{name}": count for name, count in TESTS.items()}}[folder]
    count = lines(ROOT / folder, ".py")
    assert count <= most, f"{folder} has {count} lines of Python, {most} are allowed"
    assert count >= most - ROOM, f"{folder} has {count} lines of Python: lower its number from {most}"


def test_every_folder_of_tests_has_a_number() -> None:
    folders = {path.name for path in (ROOT / "tests").iterdir() if any(path.rglob("*.py"))}
    assert folders <= {*TESTS}


def test_the_page_does_not_grow() -> None:
    assert lines(ROOT / "dashboards" / "page", ".js", ".css", ".html") <= PAGE
