"""From a rank's ring to files in the run directory: order, drops, budgets, a full disk, nobody there."""

import errno
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from braid.actors.controller.span_files import FILES, SpanFiles, socket_collector
from braid.actors.stage.span_stream import SocketSink, SpanStream
from braid.dashboards.trace_folder import TraceFolder
from braid.scheduling.operators import Stream
from braid.scheduling.span_batches import RECORD, Batch, Records, decode
from braid.scheduling.trace import Label

LABELS = [Label(operator=f"operator {n}", stream=Stream.COMPUTE, layer=n) for n in range(20)]

OTHERS = [Label(operator=f"another {n}", stream=Stream.INTER, layer=n) for n in range(4)]


def records_of(step: int, count: int) -> Records:
    """Records that can be told apart."""
    records = np.zeros(count, RECORD)
    records["step"] = step
    records["start_ns"] = 10**6 * step + np.arange(count)
    records["end_ns"] = records["start_ns"] + 1
    records["label"] = np.arange(count) % len(LABELS)
    return records


class Taken:
    """A sink that keeps batches, can be told to be busy, and may go away."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.busy = threading.Event()
        self.gone = False

    def send(self, batch: bytes) -> bool:
        if self.gone:
            raise BrokenPipeError
        if self.busy.is_set():
            return False
        self.batches += [found for found, _ in decode(batch)]
        return True

    def close(self, timeout_s: float) -> None:
        """Nothing is under way."""

    @property
    def records(self) -> Records:
        return np.concatenate([np.zeros(0, RECORD), *(batch.records for batch in self.batches)])


def until(condition: Callable[[], bool]) -> None:
    """Wait for another thread."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "nothing happened for 20 seconds"
        time.sleep(0.005)


@pytest.mark.parametrize("waiting", [0, 300])
def test_a_step_that_is_longer_than_the_ring_arrives_whole(waiting: int) -> None:
    taken = Taken()
    taken.busy.set()
    stream = SpanStream(0, 1, taken, capacity=1000, interval_s=0.01, budget=1e9)
    sent = [records_of(1, waiting), records_of(2, 5000)]
    for step, records in enumerate(sent):
        stream.put(LABELS, records, step)
    taken.busy.clear()
    until(lambda: len(taken.records) + stream.dropped == waiting + 5000)
    stream.close()
    assert stream.dropped == 0
    assert taken.records.tobytes() == np.concatenate(sent).tobytes()


def test_everything_arrives_in_order_and_labels_once() -> None:
    taken = Taken()
    stream = SpanStream(3, 2, taken, interval_s=0.01, budget=1e9)
    labels = LABELS[:5]
    sent = []
    for step in range(50):
        if step == 20:
            labels += LABELS[5:]
        records = records_of(step, 700)
        records["label"] %= len(labels)
        sent.append(records)
        stream.put(labels, records, step)
        if step % 7 == 0:
            until(lambda: len(taken.records) > 0)
    stream.close()
    assert taken.records.tobytes() == np.concatenate(sent).tobytes()
    assert [batch.sequence for batch in taken.batches] == list(range(len(taken.batches)))
    assert {(batch.rank, batch.generation) for batch in taken.batches} == {(3, 2)}
    assert [label for batch in taken.batches for label in batch.labels] == LABELS
    for batch in taken.batches:  # a batch never names a label that was not told
        assert batch.first_label + len(batch.labels) > batch.records["label"].max(initial=0)
    assert stream.dropped == 0


def test_what_the_ring_cannot_hold_is_dropped_and_counted() -> None:
    taken = Taken()
    taken.busy.set()
    stream = SpanStream(0, 1, taken, capacity=1000, interval_s=0.01, budget=1e9)
    stream.put(LABELS, records_of(0, 600), 0)
    until(lambda: stream._count == 0)  # a batch is in the sender's hands
    stream.put(LABELS, records_of(1, 900), 1)
    stream.put(LABELS, records_of(2, 300), 2)
    assert stream.dropped == 200
    taken.busy.clear()
    stream.put(LABELS, records_of(3, 0), 3)
    stream.close()
    assert len(taken.records) == 1600
    assert taken.batches[-1].dropped == 200


def test_a_sink_that_is_gone_costs_nothing_but_the_spans() -> None:
    taken = Taken()
    taken.gone = True
    stream = SpanStream(0, 1, taken, interval_s=0.01)
    stream.put(LABELS, records_of(0, 100), 0)
    until(lambda: stream.dropped == 100)
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
    late = {int(s) for s in taken.records["step"] if s >= first}
    assert late
    assert not [s for s in late if s % every]
    assert taken.batches[-1].every >= 4


def test_no_step_is_left_out_for_labels_which_are_told_once() -> None:
    """A large model has thousands of labels, and telling them takes more than the first second's budget."""
    taken = Taken()
    stream = SpanStream(0, 1, taken, budget=0.02)
    labels = [Label(operator=f"operator {n}", stream=Stream.COMPUTE, layer=n) for n in range(100_000)]
    stream.put(labels, records_of(1, 10), 1)
    until(lambda: len(taken.records) == 10)
    looked = time.monotonic() + 1.6  # it looks at its costs once a second
    while time.monotonic() < looked:
        assert stream.every == 1
        time.sleep(0.01)
    stream.put(labels, records_of(3, 10), 3)
    stream.close()
    assert len(taken.records) == 20


def test_files_rotate_within_their_budget_and_each_can_be_read_alone(tmp_path: Path) -> None:
    files = SpanFiles(tmp_path / "trace", bytes_per_rank=1)  # the least: 64 KiB a file
    for sequence in range(40):
        known = min(len(LABELS), sequence)
        batch = Batch(
            rank=7,
            generation=1,
            sequence=sequence,
            first_label=known,
            labels=tuple(LABELS[known : known + 1]),
            records=records_of(sequence, 400) if sequence else records_of(0, 0),
        )
        batch.records["label"] %= max(1, known)
        data = batch.encode()
        assert files.take(data + b"BRAIDSP1") == len(data)
    files.close()
    paths = sorted((tmp_path / "trace").iterdir())
    assert len(paths) == FILES
    assert all(path.stat().st_size < (1 << 16) + 20_000 for path in paths)
    assert files.counts().written == 39 * 400
    for path in paths:
        alone = tmp_path / path.stem / path.name
        alone.parent.mkdir()
        alone.write_bytes(path.read_bytes())
        folder = TraceFolder(alone.parent)
        assert folder.refresh()
        assert all(folder.spans(step) for step in folder.steps)
    folder = TraceFolder(tmp_path / "trace")
    folder.refresh()
    assert folder.steps[-1] == 39
    assert len(folder.spans(39)) == 400


def test_a_new_generation_replaces_the_steps_that_ran_again(tmp_path: Path) -> None:
    files = SpanFiles(tmp_path, 1 << 20)
    folder = TraceFolder(tmp_path)
    for step in range(5):
        files.take(_batch(1, step, records_of(step, 10), LABELS if step == 0 else []))
    folder.refresh()
    assert folder.steps == [0, 1, 2, 3, 4]
    for sequence, step in enumerate((3, 4, 5)):
        files.take(_batch(2, sequence, records_of(step, 4), OTHERS if sequence == 0 else []))
    folder.refresh()
    assert [len(folder.spans(step)) for step in range(6)] == [10, 10, 10, 4, 4, 4]
    assert folder.ranks[0].generation == 2
    # Each generation numbers its own labels.
    assert {span.operator for span in folder.spans(0)} == {label.operator for label in LABELS[:10]}
    assert {span.operator for span in folder.spans(5)} == {label.operator for label in OTHERS}
    files.close()


def test_missing_batches_are_counted(tmp_path: Path) -> None:
    files = SpanFiles(tmp_path, 1 << 20)
    files.take(_batch(1, 0, records_of(0, 5), LABELS))
    files.take(_batch(1, 3, records_of(1, 5), []))
    assert files.counts().lost == 2
    files.close()


def test_a_full_disk_is_told_and_what_fits_later_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = SpanFiles(tmp_path, 1 << 20)
    files.take(_batch(1, 0, records_of(0, 5), LABELS))
    real = Path.open

    def full(self: Path, *arguments: Any, **more: Any) -> IO[Any]:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    rank = files._ranks[0]
    rank.size = 1 << 30  # the next batch wants a new file
    files.take(_batch(1, 1, records_of(1, 5), []))
    assert files.counts().lost == 5
    assert "No space left" in files.counts().trouble
    monkeypatch.setattr(Path, "open", real)
    files.take(_batch(1, 2, records_of(2, 5), []))
    files.close()
    folder = TraceFolder(tmp_path)
    folder.refresh()
    assert folder.steps == [0, 2]


def test_ranks_send_through_a_socket_and_strangers_are_not_listened_to(tmp_path: Path) -> None:
    files = SpanFiles(tmp_path, 1 << 22)
    with socket_collector(files) as collector:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stranger.connect(collector.target)
        stranger.sendall(b"GET / HTTP/1.1\r\n" + bytes(100))
        streams = [SpanStream(r, 1, SocketSink(collector.target), interval_s=0.01) for r in range(3)]
        for step in range(30):
            for stream in streams:
                stream.put(LABELS, records_of(step, 250), step)
        for stream in streams:
            stream.close()
        assert stranger.recv(1) == b"", "the connection was closed"
        stranger.close()
    folder = TraceFolder(tmp_path)
    folder.refresh()
    assert sorted(folder.ranks) == [0, 1, 2]
    assert collector.counts().written == 3 * 30 * 250
    assert len(folder.spans(29)) == 3 * 250


def _batch(generation: int, sequence: int, records: Records, labels: list[Label]) -> bytes:
    records["label"] %= len(labels) or 4
    first = 0 if labels else len(LABELS)
    return Batch(
        rank=0,
        generation=generation,
        sequence=sequence,
        first_label=first if generation == 1 else min(first, 4),
        labels=tuple(labels),
        records=records,
    ).encode()


def test_a_socket_that_is_gone_costs_spans_and_nothing_else(tmp_path: Path) -> None:
    """A cleaner of /tmp has removed it: ranks of a new generation find nobody."""
    stream = SpanStream(0, 1, SocketSink(str(tmp_path / "gone")), interval_s=0.01)
    stream.put(LABELS, records_of(0, 10), 0)
    until(lambda: stream.dropped == 10)
    stream.put(LABELS, records_of(1, 5), 1)
    assert stream.dropped == 15
    stream.close()


class Broken:
    """A sink that fails as none should."""

    def send(self, batch: bytes) -> bool:
        raise RuntimeError("of something else")

    def close(self, timeout_s: float) -> None:
        raise RuntimeError("again")


def test_no_failure_of_a_sink_reaches_training() -> None:
    stream = SpanStream(0, 1, Broken(), interval_s=0.01)
    stream.put(LABELS, records_of(0, 10), 0)
    until(lambda: stream.dropped == 10)
    stream.close()


def test_the_newest_files_are_kept_whatever_their_number(tmp_path: Path) -> None:
    for number in range(9996, 10000):
        (tmp_path / f"rank-00000.{number}.spans").touch()
    files = SpanFiles(tmp_path, 1 << 20)
    files.take(_batch(1, 0, records_of(0, 5), LABELS))
    files.take(_batch(2, 0, records_of(1, 5), LABELS))
    files.close()
    numbers = sorted(int(path.name.split(".")[1]) for path in tmp_path.iterdir())
    assert numbers == [9998, 9999, 10000, 10001]
