"""Spans of a real run: from ranks to files, to the trace that Perfetto opens, to the numbers of reports."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from braid.dashboards.perfetto import perfetto_trace
from braid.dashboards.trace_folder import TraceFolder
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.trace.batches import apart
from braid.scheduling.trace.spans import STRANDS
from tests.dashboards.lines import lines_of
from tests.end_to_end.runs import Run, prepare_text, run_layout
from tests.in_process import Capture, called, refused
from tests.spans import communication_of, read_folder, spans_of

STEPS = 6


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("traces")
    return run_layout(
        path / "runs",
        prepare_text(path, 3, files=4),
        parallel={"tp": 2, "pp": 2},
        train={"steps": STEPS},
        overlap={"schedule": "wavelet"},
    )


@pytest.fixture(scope="module")
def traces(run: Run) -> TraceFolder:
    return read_folder(run.directory)


def test_no_span_is_lost(run: Run, traces: TraceFolder) -> None:
    assert sorted(traces.ranks) == [0, 1, 2, 3]
    assert traces.steps == list(range(STEPS))
    assert not traces.damage
    for steps in traces.ranks.values():
        counts = {len(apart(batch.records)[0]) for batch in steps.values()}
        assert len(counts) == 1, "every step runs the same schedule"
        batch = steps[0]
        assert batch.dropped == 0
        labels = [batch.labels[n] for n in batch.records["label"]]
        assert {label.stream for label in labels} == {Stream.COMPUTE, Stream.INTRA}  # they share a host
        assert all(label.shapes for label in labels if label.key)
        strands = {STRANDS[s] for s in batch.records["strand"]}
        assert strands >= {"alpha", "beta"}


def test_spans_give_the_numbers_that_were_written_while_training(run: Run, traces: TraceFolder) -> None:
    lines = lines_of(run.directory / "ranks.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for step, line in enumerate(lines):
        spans = spans_of(traces.step(step))
        for rank in range(4):
            moving_ns, exposed_ns = communication_of(span for span in spans if span.rank == rank)
            assert line["communication_seconds"][rank] == pytest.approx(moving_ns / 1e9)
            assert line["exposed_seconds"][rank] == pytest.approx(exposed_ns / 1e9)
        record = run.records[step]
        assert record.communication_seconds == pytest.approx(sum(line["communication_seconds"]) / 4)
        assert record.generation == 1
        assert record.time == line["time"]
    events = lines_of(run.directory / "events.jsonl")
    assert [line["kind"] for line in events] == ["started", "saved", "finished"]


def test_the_trace_holds_every_span_and_an_arrow_for_every_message(traces: TraceFolder) -> None:
    batches = [batch for step in (STEPS - 2, STEPS - 1) for batch in traces.step(step)]
    events: list[dict[str, Any]] = json.loads(perfetto_trace(batches))["traceEvents"]
    shown = Counter((e["pid"], e["args"]["step"]) for e in events if e["ph"] == "X")
    assert shown == {(batch.rank, batch.step + 1): len(batch.records) for batch in batches}
    assert min(e["ts"] for e in events if e["ph"] == "X") == 0
    for lane, part in ((0, 1), (4, 2)):  # blocks; waiting for a peer
        drawn = [e for e in events if e["ph"] == "X" and e["tid"] == lane]
        assert len(drawn) == sum(len(apart(batch.records)[part]) for batch in batches)
        assert drawn
    sends = [e for e in events if e["ph"] == "X" and e["name"].startswith("send ")]
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert len(sends) == len(starts) == len(ends) > 0
    for number, start in starts.items():
        end = ends[number]
        assert end["ts"] >= start["ts"], "nothing arrives before it was sent"
        assert {start["pid"], end["pid"]} in ({0, 2}, {1, 3}), "neighbours of one place in their stages"


def test_the_command(run: Run, tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "trace.json"
    for words, said in (("", f"step {STEPS} of"), ("--steps 2-4", "steps 2 to 4 of")):
        done = called(capsys, "trace", run.directory, *words.split(), "--output", output)
        assert done.code == 0, done.errors
        assert said in done.output
    events = json.loads(output.read_text())["traceEvents"]
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {2, 3, 4}
    for arguments, said in (
        ((run.directory, "--steps", "99"), f"spans are kept of steps 1 to {STEPS}"),
        ((run.directory, "--steps", "x"), "must be a step or a range"),
        ((tmp_path,), "holds no run"),
        ((run.directory, "--output", tmp_path / "no" / "t.json"), "does not exist; make it"),
    ):
        refused(called(capsys, "trace", *arguments), said)
