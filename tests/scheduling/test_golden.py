"""Schedules as files: what a change of a generator does is read as a difference of text."""

import difflib
from pathlib import Path

import pytest

from braid.scheduling.generate.lower import training_schedule
from braid.scheduling.mesh.partition import parse_partition
from braid.scheduling.schedule.draw import grid, summary
from braid.scheduling.schedule.schedule import Schedule
from braid.scheduling.schedule.text import parse, write
from tests.scheduling.cases import layout_for, named_schedule, parts_for, setting_for

DIRECTORY = Path(__file__).resolve().parents[1] / "golden" / "schedules"

CUT = (
    "layer/attention_gather mesh 2x2 order 0,1 pieces 2 of tokens with 1",
    "layer/mlp_gather mesh 2x2 order 1,0,1 delivered of tokens with 2",
    "layer/mlp_scatter pieces 3 of width with 1",
    "tp/all_gather pieces 2 of tokens with 1",
    "dp/all_reduce mesh 2x2 order 1,0",
)


def cut_schedule() -> Schedule:
    """Of layers whose collectives run in stages and pieces, and replicas that share in stages."""
    partitions = tuple(map(parse_partition, CUT))
    own = setting_for("ddp", layout_for("ddp", 1, 4, 4), 2, partitions=partitions)
    return training_schedule(own, parts_for(own))


GOLDEN: dict[str, Schedule] = {
    "megatron-p1-m2": named_schedule("megatron", 1, 2),
    "megatron-p4-m8": named_schedule("megatron", 4, 8),
    "megatron-p2-m2-dp2-gathered": named_schedule("megatron", 2, 2, 2, zero=1),
    "ddp-p2-m2-dp2-zero2": named_schedule("ddp", 2, 2, 2, zero=2),
    "ddp-p2-m2-dp2-zero3": named_schedule("ddp", 2, 2, 2, zero=3),
    "braid-together_4-p1-m6-dp2": named_schedule("braid:together_4", 1, 6, dp=2),
    "megatron-folded-p2-m4": named_schedule("megatron:folded", 2, 4),
    "megatron-folded-p4-m8-tp2": named_schedule("megatron:folded", 4, 8, 2),
    "braid-p2-m6-tp2-ends": named_schedule("braid", 2, 6, 2, dp=2, ends=True),
    "braid-twins-p1-m4-tp2": named_schedule("braid:twins", 1, 4, 2),
    "dualpipev-p2-m6": named_schedule("dualpipev", 2, 6),
    "zbv-p2-m4-tp2": named_schedule("zbv", 2, 4, 2),
    "ddp-p1-m2-tp4-dp4-cut": cut_schedule(),
}
"""By file name."""


def as_file(schedule: Schedule) -> str:
    """The drawing as comments, then the schedule."""
    rows = ["".join(text for text, _ in cells) for cells in grid(schedule)]
    lines = [summary(schedule), *(f"stage {number} |{row}|" for number, row in enumerate(rows))]
    picture = "\n".join(f"# {line}".rstrip() for line in lines)
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
