"""Streams a rank's spans: the training thread fills a ring of bounded size, a thread of its own empties it.

The training thread never waits and never fails here. What the ring cannot hold is dropped and counted; when
streaming costs more than its budget, only every second, fourth, ... step is streamed, and the batches say so.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from braid.scheduling.span_batches import RECORD, Batch, Records
from braid.scheduling.trace import Label


class Sink(Protocol):
    """Where batches go."""

    def send(self, batch: bytes) -> bool:
        """Take a batch; False: not now, ask again. `OSError`: there is nobody any more."""

    def close(self, timeout_s: float) -> None:
        """Nothing more comes; wait until everything has arrived."""


CAPACITY = 1 << 16
"""Records that the ring holds: 2 MiB. It grows where a step has more of them, up to so many times that."""
MOST_GROWTH = 16
LARGEST_BATCH = 8192
MOST_SKIPPED = 64
_CLOSE_SECONDS = 2.0


class SpanStream:
    """One rank's stream in one generation."""

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
        """``budget``: the share of a core that streaming may take before steps are left out."""
        self._rank, self._generation, self._sink = rank, generation, sink
        self._ring: Records = np.zeros(capacity, RECORD)
        self._usual, self._most = capacity, capacity * MOST_GROWTH
        self._first = self._count = 0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._broken = False
        self._labels: Sequence[Label] = ()
        self._told_labels = self._sequence = self._dropped = self._in_hand = 0
        self._every = 1
        self._interval_s, self._budget = interval_s, budget
        self._spent_ns = 0
        self._thread = threading.Thread(target=self._run, name="span stream", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Spans that were not sent and will not be."""
        return self._dropped

    @property
    def every(self) -> int:
        """Spans of every so many steps are streamed."""
        return self._every

    def put(self, labels: Sequence[Label], records: Records, step: int) -> None:
        """Hand over a step's records. ``labels``: all that they name, a list that only grows."""
        if step % self._every:
            return
        begin = time.thread_time_ns()
        with self._lock:
            self._labels = labels
            if (needed := self._count + len(records)) > len(self._ring) and len(records) > self._usual:
                self._grow(min(needed, self._most))
            capacity = len(self._ring)
            kept = 0 if self._broken else min(len(records), capacity - self._count)
            self._dropped += len(records) - kept
            place = (self._first + self._count) % capacity
            straight = min(kept, capacity - place)
            self._ring[place : place + straight] = records[:straight]
            self._ring[: kept - straight] = records[straight:kept]
            self._count += kept
            self._spent_ns += time.thread_time_ns() - begin
        if self._count > capacity // 4:
            self._wake.set()

    def _grow(self, capacity: int) -> None:
        """Make the ring larger: a step comes at once, and is to be kept whole."""
        waiting = np.roll(self._ring, -self._first)[: self._count]
        self._ring = np.zeros(max(capacity, len(self._ring)), RECORD)
        self._ring[: self._count] = waiting
        self._first = 0

    def close(self) -> None:
        """Send what is left, for two seconds at most."""
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
            begin, told = time.thread_time_ns(), self._told_labels
            while (unsent := unsent or self._next()) is not None and self._try(unsent):
                unsent = None
            if self._broken:
                return
            if self._told_labels == told:  # labels are told once: to leave out steps would not save that
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
        except Exception:  # whatever it is, it is not worth a training run
            with self._lock:  # nobody listens: all that comes is dropped, and counted
                self._broken = True
                self._dropped += self._count + self._in_hand
                self._count = 0
            return False

    def _adapt(self, share: float) -> None:
        if share > self._budget:
            self._every = min(MOST_SKIPPED, self._every * 2)
        elif share < self._budget / 4 and self._every > 1:
            self._every //= 2

    def _next(self) -> bytes | None:
        """The oldest records as a batch; None if there are none."""
        with self._lock:
            count = min(self._count, LARGEST_BATCH)
            if not count:
                return None
            capacity = len(self._ring)
            straight = min(count, capacity - self._first)
            records = np.empty(count, RECORD)
            records[:straight] = self._ring[self._first : self._first + straight]
            records[straight:] = self._ring[: count - straight]
            self._in_hand = count
            self._first = (self._first + count) % capacity
            self._count -= count
            labels, dropped = self._labels, self._dropped
        batch = Batch(
            rank=self._rank,
            generation=self._generation,
            sequence=self._sequence,
            first_label=self._told_labels,
            labels=tuple(labels[self._told_labels :]),
            records=records,
            dropped=dropped,
            every=self._every,
        )
        self._told_labels += len(batch.labels)
        self._sequence += 1
        return batch.encode()


class SocketSink:
    """Sends batches to a Unix socket of this machine, which may be gone by now."""

    def __init__(self, path: str) -> None:
        self._path: str | None = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(5.0)

    def send(self, batch: bytes) -> bool:
        """Send; `OSError` if there is no other side, or it takes nothing for five seconds."""
        if self._path is not None:
            self._socket.connect(self._path)
            self._path = None
        self._socket.sendall(batch)
        return True

    def close(self, timeout_s: float) -> None:
        """What was sent arrives without further ado."""
        self._socket.close()
