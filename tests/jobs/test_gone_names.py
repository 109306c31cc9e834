"""Names of schedules that earlier versions had, wherever a user may still have them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from braid.scheduling.lowering.named import GONE, ScheduleName
from tests.end_to_end.command import braid, write_config, write_corpus

PLAN = "braid_plan: 6\nsetting:\n  layout: {{placement: bidirectional}}\n  schedule: {}\n"
SCHEDULE = "braid schedule 6\nname {}\nstages 1\nchunks 1\nmicro_batches 4\nunit 0\nstage 0\n F0.0\n"


def _configuration(folder: Path, name: str) -> list[str]:
    return ["train", "run.yaml", "--dry-run", "--set", f"overlap.schedule={name}"]


def _plan(folder: Path, name: str) -> list[str]:
    (folder / "plan.yaml").write_text(PLAN.format(name))
    return ["simulate", "plan.yaml"]


def _schedule_file(folder: Path, name: str) -> list[str]:
    (folder / "own.txt").write_text(SCHEDULE.format(name))
    return ["train", "run.yaml", "--dry-run", "--set", "overlap.schedule_file=own.txt"]


@pytest.mark.parametrize("place", [_configuration, _plan, _schedule_file])
def test_a_name_that_is_gone_is_refused_with_what_stands_in_its_place(
    tmp_path: Path, place: Callable[[Path, str], list[str]]
) -> None:
    write_config(tmp_path)
    write_corpus(tmp_path)
    for name, text in GONE.items():
        refused, new = braid(tmp_path, *place(tmp_path, name)), ScheduleName.parse(text)
        assert refused.code == 2, (name, refused.errors)
        (line,) = refused.errors.splitlines()
        pipeline = f" with pipeline {new.pipeline}" if new.pipeline else ""
        assert line.endswith(f" is gone; use schedule {new.schedule}{pipeline}"), line
        assert repr(name) in line
