"""From a rank's queue to files in the run directory: order, drops, budgets, a full disk, nobody there."""

import errno
import threading
import time
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import pytest

from braid.actors.controller.records import span_files
from braid.actors.controller.records.span_files import FILES, SpanFiles
from braid.actors.stage.measure.span_stream import ConnectionSink, SpanStream
from braid.dashboards.trace_folder import TraceFolder
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.trace.batches import RECORD, Batch, Labels, Records, decode
from braid.scheduling.trace.spans import Label
from tests.spans import spans_of
from tests.waiting import within

LABELS = Labels(Label(operator=f"operator {n}", stream=Stream.COMPUTE, layer=n) for n in range(20))
OTHERS = Labels(Label(operator=f"another {n}", stream=Stream.INTER, layer=n) for n in range(4))


def records_of(step: int, count: int, labels: Labels = LABELS) -> Records:
    """Records that can be told apart."""
    records = np.zeros(count, RECORD)
    records["start_ns"] = 10**6 * step + np.arange(count)
    records["end_ns"] = records["start_ns"] + 1
    records["label"] = np.arange(count) % len(labels)
    return records


class Taken:
    """A sink that keeps batches, can be told to be busy, and may go away or break."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.busy = threading.Event()
        self.error: Exception | None = None

    def send(self, batch: bytes) -> bool:
        if self.error is not None:
            raise self.error
        if self.busy.is_set():
            return False
        self.batches += [found for found, _ in decode(batch)]
        return True

    def close(self, timeout_s: float) -> None:
        if self.error is not None:
            raise self.error


def test_what_the_queue_cannot_hold_is_dropped_and_counted() -> None:
    """A step that is longer than the queue is kept whole."""
    taken = Taken()
    taken.busy.set()
    stream = SpanStream(0, 1, taken, capacity=1000, interval_s=0.01, budget=1e9)
    stream.put(LABELS, records_of(0, 600), 0)
    assert within(20, lambda: stream._count == 0)  # a batch is in the sender's hands
    for step, count in enumerate((900, 5000, 200), start=1):
        stream.put(LABELS, records_of(step, count), step)
    assert stream.dropped == 200
    taken.busy.clear()
    stream.close()
    assert [len(batch.records) for batch in taken.batches] == [600, 900, 5000]
    assert taken.batches[-1].dropped == 200


@pytest.mark.parametrize("error", [BrokenPipeError(), RuntimeError("of something else"), None])
def test_a_sink_that_fails_costs_nothing_but_the_spans(error: Exception | None) -> None:
    """Or a connection whose other end is closed."""
    taken = Taken()
    taken.error = error
    theirs, ours = Pipe(duplex=False)
    theirs.close()
    sink = taken if error else ConnectionSink(ours)
    stream = SpanStream(0, 1, sink, interval_s=0.01)
    stream.put(LABELS, records_of(0, 100), 0)
    assert within(20, lambda: stream.dropped == 100)
    stream.put(LABELS, records_of(1, 100), 1)
    assert stream.dropped == 200
    stream.close()


def test_steps_are_left_out_when_streaming_costs_too_much() -> None:
    taken = Taken()
    stream = SpanStream(0, 1, taken, interval_s=0.01, budget=0.0)
    step = 0
    while stream.every < 4:
        stream.put(LABELS, records_of(step, 200), step)
        step += 1
        time.sleep(0.002)
        assert step < 20_000
    every, first = stream.every, step
    for more in range(200):
        stream.put(LABELS, records_of(first + more, 10), first + more)
    stream.close()
    late = {batch.step for batch in taken.batches if batch.step >= first}
    assert late
    assert not [s for s in late if s % every]
    assert taken.batches[-1].every >= 4


def test_no_step_is_left_out_for_labels_which_are_new_once() -> None:
    """A large model has thousands of labels, and to encode them takes more than the first second's budget."""
    taken = Taken()
    stream = SpanStream(0, 1, taken, budget=0.02)
    labels = Labels(Label(operator=f"operator {n}", stream=Stream.COMPUTE, layer=n) for n in range(20_000))
    stream.put(labels, records_of(1, 10), 1)
    assert within(20, lambda: len(taken.batches) == 1)
    looked = time.monotonic() + 1.6  # it looks at its costs once a second
    while time.monotonic() < looked:
        assert stream.every == 1
        time.sleep(0.01)
    stream.put(labels, records_of(3, 10), 3)
    stream.close()
    assert [batch.step for batch in taken.batches] == [1, 3]


def batch_of(step: int, count: int, labels: Labels = LABELS, **more: int) -> bytes:
    """A batch of rank 0, as bytes."""
    told = {"generation": 1, "sequence": 0, **more}
    return Batch(rank=0, step=step, labels=labels, records=records_of(step, count, labels), **told).encode()


def counts_of(folder: TraceFolder) -> dict[int, int]:
    """Spans by step, after reading what is new."""
    folder.refresh()
    return {step: len(spans_of(folder.step(step))) for step in folder.steps}


def test_files_rotate_within_their_budget_and_each_can_be_read_alone(tmp_path: Path) -> None:
    files = SpanFiles(tmp_path / "trace", bytes_per_rank=1)  # the least: 64 KiB a file
    for step in range(120):
        data = batch_of(step, 4000, sequence=step)
        assert files.take(data + data[:9]) == len(data)
    files.close()
    paths = sorted((tmp_path / "trace").iterdir())
    assert len(paths) == FILES
    assert all(path.stat().st_size < (1 << 16) + 20_000 for path in paths)
    assert files.counts().written == 120 * 4000
    alone = []
    for path in paths:
        (tmp_path / path.stem).mkdir()
        (tmp_path / path.stem / path.name).write_bytes(path.read_bytes())
        found = counts_of(TraceFolder(tmp_path / path.stem))
        assert set(found.values()) == {4000}
        alone += [*found]
    found = counts_of(TraceFolder(tmp_path / "trace", keep=1000))
    assert [*found] == alone
    assert alone[-1] == 119


def test_a_new_generation_replaces_the_steps_that_ran_again(tmp_path: Path) -> None:
    files = SpanFiles(tmp_path, 1 << 20)
    folder = TraceFolder(tmp_path)
    for step in range(5):
        files.take(batch_of(step, 10, sequence=step))
    assert counts_of(folder) == dict.fromkeys(range(5), 10)
    for sequence, step in enumerate((3, 4, 5)):
        files.take(batch_of(step, 4, generation=2, sequence=sequence, labels=OTHERS))
    assert counts_of(folder) == {0: 10, 1: 10, 2: 10, 3: 4, 4: 4, 5: 4}
    assert [folder.step(step)[0].generation for step in (2, 3)] == [1, 2]
    assert {span.operator for span in spans_of(folder.step(5))} == {label.operator for label in OTHERS.all}
    assert files.counts().lost == 0
    files.take(batch_of(6, 4, generation=2, sequence=5))
    assert files.counts().lost == 2, "batches that are missing"
    files.close()


def test_a_full_disk_is_told_and_what_fits_later_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = SpanFiles(tmp_path, 1 << 20)
    files.take(batch_of(0, 5))
    real = Path.open

    def full(self: Path, *arguments: Any, **more: Any) -> IO[Any]:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    rank = files._ranks[0]
    rank.size = 1 << 30  # the next batch wants a new file
    files.take(batch_of(1, 5, sequence=1))
    assert files.counts().lost == 5
    assert "No space left" in files.counts().trouble
    monkeypatch.setattr(Path, "open", real)
    files.take(batch_of(2, 5, sequence=2))
    files.close()
    assert counts_of(TraceFolder(tmp_path)) == {0: 5, 2: 5}


def test_ranks_send_over_connections_and_strange_content_ends_one(tmp_path: Path) -> None:
    """Also after a rank has begun a new generation."""
    files = SpanFiles(tmp_path, 1 << 22)
    pipes = [Pipe(duplex=False) for _ in range(4)]
    for theirs, _ in pipes:
        files.receive(theirs)
    *ranks, (_, stranger) = pipes
    stranger.send_bytes(b"GET / HTTP/1.1\r\n" + bytes(100))
    sinks = [ConnectionSink(ours) for _, ours in ranks]
    for generation in (1, 2):
        streams = [SpanStream(rank, generation, sink, interval_s=0.01) for rank, sink in enumerate(sinks)]
        for step in range(30):
            for stream in streams:
                stream.put(LABELS, records_of(step, 250), step)
        for stream in streams:
            stream.close()
    for _, ours in ranks:
        ours.close()
    files.close()
    assert files.counts().written == 2 * 3 * 30 * 250
    assert counts_of(TraceFolder(tmp_path)) == dict.fromkeys(range(30), 3 * 250)
    with pytest.raises(BrokenPipeError):
        stranger.send_bytes(b"more")


def test_spans_that_wait_to_be_read_are_written_when_the_files_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short run sends all its spans at its end, and the thread that reads them may come late."""
    late = SimpleNamespace(Thread=lambda target, **_: threading.Timer(0.3, target), Lock=threading.Lock)
    monkeypatch.setattr(span_files, "threading", late)
    files = SpanFiles(tmp_path / "trace", 1 << 20)
    theirs, ours = Pipe(duplex=False)
    sink = ConnectionSink(ours)
    sink.send(batch_of(0, 5))
    sink.close(1.0)
    files.receive(theirs)
    files.close()
    ours.close()
    assert files.counts().written == 5


def test_the_newest_files_are_kept_whatever_their_number(tmp_path: Path) -> None:
    for number in range(9996, 10000):
        (tmp_path / f"rank-00000.{number}.arrows").touch()
    files = SpanFiles(tmp_path, 1 << 20)
    files.take(batch_of(0, 5))
    files.close()
    assert sorted(int(path.name.split(".")[1]) for path in tmp_path.iterdir()) == [9997, 9998, 9999, 10000]
