"""Streams a rank's spans: the training thread fills a queue of bounded size, and a separate thread empties
it.

The training thread never waits and never fails here. Spans that do not fit the queue are dropped and counted;
if streaming costs more than its budget, only every second, fourth, ... step is streamed, as batches report.
"""

import contextlib
import threading
import time
from collections import deque
from multiprocessing.connection import Connection
from typing import Protocol

from braid.scheduling.trace.batches import Batch, Labels, Records


class Sink(Protocol):
    """Receiver of batches."""

    def send(self, batch: bytes) -> bool:
        """Take a batch, or return False: send it again later. Raise `OSError` if nobody listens any more."""

    def close(self, timeout_s: float) -> None:
        """End the stream: wait until everything sent has arrived, at most ``timeout_s`` seconds."""


CAPACITY = 1 << 16
"""Number of queued records (2 MiB) at which further steps are dropped."""
MOST_SKIPPED = 64
_CLOSE_SECONDS = 2.0


class SpanStream:
    """The span stream of one rank in one generation."""

    def __init__(
        self,
        rank: int,
        generation: int,
        sink: Sink,
        *,
        capacity: int = CAPACITY,
        interval_s: float = 0.5,
        budget: float = 0.01,
    ) -> None:
        """``budget``: share of a CPU core that streaming may use before steps are left out."""
        self._rank, self._generation, self._sink = rank, generation, sink
        self._capacity, self._count = capacity, 0
        self._waiting: deque[tuple[int, Labels, Records]] = deque()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._broken = False
        self._told = Labels()
        self._sequence = self._in_hand = 0
        self.dropped = 0
        self.every = 1
        """Interval of streaming, in steps: spans of every n-th step are streamed."""
        self._interval_s, self._budget = interval_s, budget
        self._spent_ns = 0
        self._thread = threading.Thread(target=self._run, name="span stream", daemon=True)
        self._thread.start()

    def put(self, labels: Labels, records: Records, step: int) -> None:
        """Queue a step's records, and the labels that the records refer to by number."""
        if step % self.every or not len(records):
            return
        begin = time.thread_time_ns()
        with self._lock:
            if self._broken or self._count >= self._capacity:
                self.dropped += len(records)
            else:
                self._waiting.append((step, labels, records))
                self._count += len(records)
            self._spent_ns += time.thread_time_ns() - begin
        if self._count > self._capacity // 4:
            self._wake.set()

    def close(self) -> None:
        """Send the queued spans, for two seconds at most, and close the sink."""
        self._closing = True
        self._wake.set()
        self._thread.join(_CLOSE_SECONDS)
        with contextlib.suppress(Exception):
            self._sink.close(_CLOSE_SECONDS)

    def _run(self) -> None:
        unsent: bytes | None = None
        checked = time.perf_counter_ns()
        while True:
            last = self._closing
            begin, told = time.thread_time_ns(), self._told
            while (unsent := unsent or self._next()) is not None and self._try(unsent):
                unsent = None
            if self._broken:
                return
            if self._told is told:  # new labels occur once: leaving out steps would not save their cost
                self._spent_ns += time.thread_time_ns() - begin
            if last and unsent is None:
                return
            now = time.perf_counter_ns()
            if now - checked > 1e9:
                self._adapt(self._spent_ns / (now - checked))
                checked, self._spent_ns = now, 0
            self._wake.wait(0.02 if last else self._interval_s)
            self._wake.clear()

    def _try(self, batch: bytes) -> bool:
        try:
            return self._sink.send(batch)
        except Exception:  # no error of streaming may end a training run
            with self._lock:  # the receiver is gone: all further spans are dropped and counted
                self._broken = True
                self.dropped += self._count + self._in_hand
                self._count = 0
                self._waiting.clear()
            return False

    def _adapt(self, share: float) -> None:
        if share > self._budget:
            self.every = min(MOST_SKIPPED, self.every * 2)
        elif share < self._budget / 4 and self.every > 1:
            self.every //= 2

    def _next(self) -> bytes | None:
        """Return the oldest queued step, encoded as a batch; None if the queue is empty."""
        with self._lock:
            if not self._waiting:
                return None
            step, labels, records = self._waiting.popleft()
            self._in_hand = len(records)
            self._count -= self._in_hand
            dropped = self.dropped
        batch = Batch(
            rank=self._rank,
            step=step,
            generation=self._generation,
            sequence=self._sequence,
            dropped=dropped,
            every=self.every,
            labels=labels,
            records=records,
        )
        self._told = labels
        self._sequence += 1
        return batch.encode()


class ConnectionSink:
    """Sends batches over a process's connection to the controller, which outlives generations."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, batch: bytes) -> bool:
        """Send a batch; raise `OSError` if the controller has closed the connection."""
        with self._lock:  # the thread of an earlier generation may still be sending
            self._connection.send_bytes(batch)
        return True

    def close(self, timeout_s: float) -> None:
        """Tell that the stream ends; batches that were sent arrive."""
        self.send(b"")
