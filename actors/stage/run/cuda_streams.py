"""Streams on GPUs: NCCL transfers on side streams, ordered by events."""

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from braid.actors.stage.run.accelerator import Accelerator, CapturedGraph, DeviceStream, Event
from braid.actors.stage.run.streams import Mark, Streams, Transfer
from braid.kernels.collectives.primitives import Launch
from braid.scheduling.mesh.cluster import Stream


@dataclass
class Captured:
    """A captured graph, the marks in it, and the number of marks that its newest replay has passed."""

    graph: CapturedGraph
    marks: list[Event] = field(default_factory=list)
    began: Event | None = None
    passed: int = 0


class CudaStreams(Streams):
    """NCCL transfers on side streams, ordered against compute by events; the host never waits.

    All memory is allocated on the compute stream. A transfer's inputs are kept until its result is taken,
    after `wait`, so the allocator need not know about the side stream.
    """

    asynchronous = True

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._compute = accelerator.current()
        self._origin_ns = 0
        self._side: dict[tuple[Stream, str], tuple[DeviceStream, Event]] = {}
        """Side streams, each with an event on the compute stream that the side stream waits for."""
        self._ends: dict[tuple[Stream, str], Event] = {}
        """Event that ends the newest transfer on each side stream."""
        self._issued: deque[Event] = deque()
        """Marks that the device had not passed when they were last queried."""
        self._passed, self._counting = 0, threading.Lock()
        self._capturing: Captured | None = None
        self._replaying: Captured | None = None
        self._free: list[Event] = []
        """Events for reuse: to make an event costs the host as much time as to record one."""
        accelerator.synchronise()
        self._origin, self._epoch_ns = self.mark(), time.time_ns()

    def mark(self) -> Event:
        event = self._record(self._compute)
        if self._capturing is not None:
            self._capturing.marks.append(event)
            return event
        self._issued.append(event)
        if len(self._issued) > _MANY:
            self.progress()
        return event

    def progress(self) -> int:
        with self._counting:  # the thread that reports the rank's life calls this, too
            while self._issued and self._issued[0].query():
                self._issued.popleft()
                self._passed += 1
            return self._passed + self._replayed()

    def complete(self, transfer: Transfer) -> bool:
        return self._capturing is None and bool(transfer.end.query())

    def _replayed(self) -> int:
        """Return the number of marks of the current graph that its newest replay has passed."""
        captured = self._replaying
        if captured is None or captured.began is None or not captured.began.query():
            return 0
        while captured.passed < len(captured.marks) and _after(
            captured.began, captured.marks[captured.passed]
        ):
            captured.passed += 1
        return captured.passed

    def start(self, stream: Stream, launch: Launch, *, awaited_next: bool, lane: str = "") -> Transfer:
        """Issue a transfer on the lane's side stream, after the work issued so far on the compute stream."""
        key = stream, lane
        if key not in self._side:
            self._side[key] = self._accelerator.stream(), self._accelerator.event()
        side, ready = self._side[key]
        ready.record(self._compute)  # a stream waits for the event as recorded at the time of the call
        side.wait_event(ready)
        begin = self._record(side)
        with self._accelerator.on(side):
            work = launch.issue()
            work.wait()  # the side stream waits for NCCL's stream; the host does not
        end = arrival = self._record(side)
        if self._capturing is not None:
            arrival = self._accelerator.event()
            arrival.record(side)
        self._ends[key] = arrival
        return Transfer(launch=launch, work=work, begin=begin, end=end, arrival=arrival)

    def wait(self, transfer: Transfer) -> None:
        self._compute.wait_event(transfer.arrival)

    def barrier(self) -> None:
        """Let later compute wait for all collectives, which wait for earlier compute anyway.

        This orders streams as DHelix's barriers do (section 5 of its paper), but the host does not wait and
        continues to issue. Messages between stages are not waited for: a receive starts long before its send,
        and may need work that follows the barrier.
        """
        for (_, lane), end in self._ends.items():
            if not lane:
                self._compute.wait_event(end)

    @contextmanager
    def capture(self) -> Iterator[Captured]:
        """Capture work for `replay` while the context lasts. Raise RuntimeError if the work cannot be
        captured.

        Transfers on side streams must have been waited for, before the context begins and before it ends.
        """
        outer, self._side, self._ends = (self._compute, self._side, self._ends), {}, {}
        try:
            with self._accelerator.capture() as graph:
                self._compute = self._accelerator.current()
                self._capturing = captured = Captured(graph)
                yield captured
        finally:
            self._capturing = None
            self._compute, self._side, self._ends = outer

    def replay(self, captured: Captured) -> None:
        began = self.mark()
        with self._counting:
            self._passed += self._replayed()
            captured.began, captured.passed = began, 0
            self._replaying = captured
        captured.graph.replay()

    def lead(self) -> None:
        """Keep the device busy for longer than the host takes to issue an operator and its marks."""
        self._accelerator.spin(_LEAD_NS)

    def delay(self, ns: float) -> None:
        self._accelerator.spin(ns)

    def nanoseconds(self, mark: Mark) -> int:
        """Return nanoseconds from the making of these streams to a mark; waits until the device has passed
        the mark.

        CUDA returns single-precision milliseconds, which after a minute are exact to four microseconds.
        Therefore the origin moves along with time, and differences of marks within seconds of each other are
        exact.
        """
        mark.synchronize()
        passed_ns = self._origin_ns + int(self._origin.elapsed_time(mark) * 1e6)
        if passed_ns > self._origin_ns + _FAR_NS:
            self._origin, self._origin_ns = mark, passed_ns
        return passed_ns

    def epoch_ns(self) -> int:
        return self._epoch_ns

    def forget(self, marks: Iterable[Mark]) -> None:
        """Reuse the events of marks, except events that are still queried."""
        self.progress()
        self._ends.clear()
        with self._counting:
            in_use = {id(self._origin), *map(id, self._issued)}
        self._free += [mark for mark in marks if mark is not None and id(mark) not in in_use]

    def _record(self, stream: DeviceStream) -> Event:
        if self._capturing is not None:
            event = self._accelerator.graph_event()
        else:
            event = self._free.pop() if self._free else self._accelerator.event()
        event.record(stream)
        return event


def _after(begin: Event, mark: Event) -> bool:
    """Tell whether a replay has passed a mark, which may still have an earlier replay's time."""
    return mark.query() and begin.elapsed_time(mark) >= 0


_LEAD_NS = 2_000_000
"""Nanoseconds by which `lead` occupies the device: a layer's longest operator takes the host some 20
launches, of 5 to 10 us each."""
_MANY = 4096
"""Greatest number of marks that are stored before they are queried."""
_FAR_NS = 1_000_000_000
"""Nanoseconds after which a mark becomes the new origin of time."""
