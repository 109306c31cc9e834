"""What a drill reads of the run that it breaks, and what it takes for a run that came out well."""

import json
from pathlib import Path

import pytest

from braid.jobs.drill.command import Command
from braid.jobs.drill.report import Report


def test_the_newest_step_of_a_file_that_grows(tmp_path: Path) -> None:
    command = Command(tmp_path)
    assert command.step() == 0
    command.broken.mkdir()
    metrics = command.broken / "metrics.jsonl"
    lines = [json.dumps({"step": step, "peak_bytes": [1] * 40}) + "\n" for step in range(1, 3001)]
    metrics.write_text("".join(lines), encoding="utf-8")
    assert metrics.stat().st_size > 1 << 17, "more than is read"
    assert command.newest() == json.loads(lines[-1])
    with metrics.open("a", encoding="utf-8") as file:
        file.write('{"step": 3001, "peak_')
    assert command.step() == 3000


def test_changes_of_ranks_are_no_failures(tmp_path: Path) -> None:
    command = Command(tmp_path)
    assert command.incidents(0.0) == []
    command.broken.mkdir()
    lines = [{"kind": kind, "time": time} for time, kind in enumerate(["rank failed", "resized"] * 2)]
    (command.broken / "incidents.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert [line["time"] for line in command.incidents(1.0)] == [2]
    assert [line["time"] for line in command.incidents(1.0, resized=True)] == [1, 3]


@pytest.mark.parametrize(
    ("same", "samples", "allowed", "difference", "passed"),
    [
        (True, True, 0.0, 0.0, True),
        (False, True, 0.0, 1e-9, False),
        (False, True, 2e-5, 1e-5, True),
        (False, True, 2e-5, 3e-5, False),
        (True, True, 2e-5, 0.0, True),
        (True, False, 2e-5, 0.0, False),
        (False, False, 2e-5, 1e-5, False),
    ],
)
def test_what_is_asked(same: bool, samples: bool, allowed: float, difference: float, passed: bool) -> None:
    report = Report(
        outcomes=[],
        identical_losses=same,
        identical_parameters=same,
        identical_samples=samples,
        allowed_difference=allowed,
        largest_difference=difference,
        interval=5,
        seconds=1.0,
        emulated_hosts=False,
        emulated_nodes=True,
        held=[],
    )
    assert report.passed == passed
    assert report.as_json()["passed"] == passed
