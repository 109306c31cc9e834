"""Schedules as files: what a change of a generator does is read as a difference of text."""

import difflib
from pathlib import Path

import pytest

from braid.scheduling.draw import draw, summary
from braid.scheduling.schedule import Schedule
from braid.scheduling.schedule_text import parse, write
from tests.scheduling.cases import named_schedule

DIRECTORY = Path(__file__).resolve().parents[1] / "golden" / "schedules"

GOLDEN: dict[str, Schedule] = {
    "megatron-p1-m2": named_schedule("megatron", 1, 2),
    "megatron-p4-m8": named_schedule("megatron", 4, 8),
    "megatron-p2-m2-dp2-gathered": named_schedule("megatron", 2, 2, 2, zero=1),
    "ddp-p2-m2-dp2-zero2": named_schedule("ddp", 2, 2, 2, zero=2),
    "ddp-p2-m2-dp2-zero3": named_schedule("ddp", 2, 2, 2, zero=3),
    "braid_together_4-p1-m6-dp2": named_schedule("braid_together_4", 1, 6, dp=2),
    "folded-p2-m4": named_schedule("folded", 2, 4),
    "folded-p4-m8-tp2": named_schedule("folded", 4, 8, 2),
    "braid-p2-m6-tp2-ends": named_schedule("braid", 2, 6, 2, dp=2, ends=True),
    "two_beside_one-p1-m6-tp2": named_schedule("two_beside_one", 1, 6, 2),
    "braid_twins-p1-m4-tp2": named_schedule("braid_twins", 1, 4, 2),
    "dualpipev-p2-m6": named_schedule("dualpipev", 2, 6),
    "zbv-p2-m4-tp2": named_schedule("zbv", 2, 4, 2),
}
"""By file name."""


def as_file(schedule: Schedule) -> str:
    """The drawing as comments, then the schedule."""
    picture = "\n".join(f"# {line}".rstrip() for line in [summary(schedule), *draw(schedule).splitlines()])
    return f"{picture}\n\n{write(schedule)}"


@pytest.mark.parametrize("name", GOLDEN)
def test_schedules_are_as_recorded(name: str, update_golden: bool) -> None:
    schedule, path = GOLDEN[name], DIRECTORY / f"{name}.txt"
    actual = as_file(schedule)
    if update_golden:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(actual, encoding="utf-8")
    recorded = path.read_text(encoding="utf-8") if path.exists() else ""
    difference = difflib.unified_diff(
        recorded.splitlines(), actual.splitlines(), f"golden/schedules/{name}.txt", "now", lineterm="", n=2
    )
    if recorded != actual:
        shown = "\n".join(difference)
        pytest.fail(f"{shown}\n\nIf that is meant, run `make golden` and read the difference.", pytrace=False)
    assert parse(recorded) == schedule


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in DIRECTORY.glob("*")} == set(GOLDEN)
