"""Counters fed from a run's files: every line once, however the files are cut, replaced and grown."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from braid.dashboards import run_files
from braid.dashboards.metrics import PrometheusSink
from braid.dashboards.metrics_feed import MetricsFeed
from braid.dashboards.run_data import RunData
from tests.dashboards.lines import BEGIN, PREDICTED, lines_of, metrics_line, ranks_line
from tests.dashboards.test_metrics import value

TOKENS = metrics_line(1, ranks=2)["tokens"]


class Run:
    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.path = path
        self.now = BEGIN
        """The time of the last line."""
        (path / "config.yaml").write_text("name: demo\nparallel: {pp: 2}\n")
        self.event("started")

    def _add(self, name: str, line: dict[str, Any]) -> None:
        self.now += 0.5
        with (self.path / name).open("a") as file:
            file.write(json.dumps({**line, "time": self.now}) + "\n")

    def event(self, kind: str) -> None:
        self._add("events.jsonl", {"kind": kind})

    def steps(self, numbers: Iterable[int]) -> None:
        for step in numbers:
            self._add("metrics.jsonl", metrics_line(step, ranks=2))
            self._add("ranks.jsonl", ranks_line(step, ranks=2))

    def back_to(self, step: int) -> None:
        """As after a failure: later steps are cut off."""
        for name in ("metrics.jsonl", "ranks.jsonl"):
            lines = (self.path / name).read_bytes().splitlines(keepends=True)
            os.truncate(self.path / name, sum(map(len, lines[:step])))


Fed = tuple[Run, PrometheusSink, MetricsFeed]


@pytest.fixture
def fed(tmp_path: Path) -> Fed:
    run, sink = Run(tmp_path / "run"), PrometheusSink()
    return run, sink, MetricsFeed(run.path, sink)


def counts(sink: PrometheusSink) -> tuple[float, float, float]:
    """Steps by tokens, by the histogram, and by a sum of rank 1."""
    tokens = value(sink, "braid_tokens_total") or 0.0
    seconds = value(sink, "braid_compute_seconds_total", stage="1", rank="1") or 0.0
    steps = value(sink, "braid_step_duration_seconds_count") or 0.0
    return tokens / TOKENS, steps, round(seconds / 0.4, 6)


@pytest.mark.parametrize("chunk", [100, 8 << 20], ids=["less than a line at once", "all at once"])
@pytest.mark.parametrize("again", [range(4, 5), range(4, 7), range(4, 12)], ids=["less", "as much", "more"])
def test_steps_that_ran_twice_count_twice_and_others_once(
    fed: Fed, monkeypatch: pytest.MonkeyPatch, again: range, chunk: int
) -> None:
    """Whether the file that was cut is shorter, as long, or longer when it is looked at again, by clocks that
    were set back, too."""
    monkeypatch.setattr(run_files, "_CHUNK", chunk)
    run, sink, feed = fed
    run.steps(range(1, 7))
    feed.refresh()
    assert counts(sink) == (6, 6, 6)
    run.back_to(3)
    run.now -= 3600.0
    run.steps(again)
    for _ in range(2):
        feed.refresh()
        assert counts(sink) == (6 + len(again),) * 3
    assert value(sink, "braid_step") == again[-1]
    assert value(sink, "braid_starts_total") == 1


def test_a_line_that_is_half_written_counts_when_it_is_whole_or_is_forgotten(fed: Fed) -> None:
    run, sink, feed = fed
    run.steps(range(1, 3))
    file = run.path / "metrics.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"step": 3, "tokens": 40')
    feed.refresh()
    os.truncate(file, len(whole))  # there was no room for the rest
    run.steps(range(3, 4))
    feed.refresh()
    assert counts(sink) == (3, 3, 3)


def test_history_is_no_increase_but_gauges_of_the_run_are_set(tmp_path: Path) -> None:
    run, sink = Run(tmp_path / "run"), PrometheusSink()
    run.steps(range(1, 9))
    (run.path / "predicted.json").write_text(json.dumps(PREDICTED))
    feed = MetricsFeed(run.path, sink, since=run.now)
    feed.refresh()
    assert counts(sink) == (0, 0, 0)
    assert value(sink, "braid_starts_total") == 0
    assert value(sink, "braid_predicted_step_seconds") == PREDICTED["step_seconds"]
    run.back_to(5)  # the newest checkpoint
    run.event("started")
    run.steps(range(6, 12))
    feed.refresh()
    assert counts(sink) == (6, 6, 6)
    assert value(sink, "braid_starts_total") == 1


def test_another_layout_moves_ranks_to_other_stages(fed: Fed) -> None:
    run, sink, feed = fed
    run.steps([1])
    feed.refresh()
    assert value(sink, "braid_step_compute_seconds", stage="1", rank="1") is not None
    (run.path / "config.yaml").write_text("name: demo\nparallel: {dp: 2, pp: 1}\n")
    run.steps([2])
    feed.refresh()
    assert value(sink, "braid_step_compute_seconds", stage="1", rank="1") is None
    assert value(sink, "braid_step_compute_seconds", stage="0", rank="1") is not None


def test_the_page_shows_no_line_of_before_a_cut(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    data = RunData(run.path)
    run.steps(range(1, 7))
    data.refresh()
    run.back_to(3)
    run.steps(range(4, 12))
    data.refresh()
    rows = data.metrics(0, 0)["rows"]
    assert [row["step"] for row in rows] == list(range(1, 12))
    assert [row["time"] for row in rows] == [line["time"] for line in lines_of(run.path / "metrics.jsonl")]
