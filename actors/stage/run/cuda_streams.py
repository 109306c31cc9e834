"""Streams on GPUs: NCCL on side streams, ordered by events."""

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from braid.actors.stage.run.accelerator import Accelerator, CapturedGraph, DeviceStream, Event
from braid.actors.stage.run.streams import Mark, Transfer
from braid.kernels.collectives.primitives import Launch
from braid.scheduling.mesh.cluster import Stream


@dataclass
class Captured:
    """A graph, the marks in it, and how many of them its newest replay has passed."""

    graph: CapturedGraph
    marks: list[Event] = field(default_factory=list)
    began: Event | None = None
    passed: int = 0


class CudaStreams:
    """NCCL: transfers run on side streams, ordered against compute by events; the host never waits.

    All memory is allocated on the compute stream. What a transfer reads is kept until it is taken, after
    `wait`, so the allocator needs no further record of the side stream.
    """

    asynchronous = True

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._compute = accelerator.current()
        self._origin_ns = 0
        self._side: dict[tuple[Stream, str], tuple[DeviceStream, Event]] = {}
        """Side streams, each with an event of compute that it waits for."""
        self._ends: dict[tuple[Stream, str], Event] = {}
        """Of the newest transfer on each side stream."""
        self._issued: deque[Event] = deque()
        """Marks that the device had not passed when it was last asked."""
        self._passed, self._counting = 0, threading.Lock()
        self._capturing: Captured | None = None
        self._replaying: Captured | None = None
        self._free: list[Event] = []
        """Making an event costs the host as much as recording it."""
        accelerator.synchronise()
        self._origin, self._epoch_ns = self.mark(), time.time_ns()

    def mark(self) -> Event:
        """An event on the compute stream."""
        event = self._record(self._compute)
        if self._capturing is not None:
            self._capturing.marks.append(event)
            return event
        self._issued.append(event)
        if len(self._issued) > _MANY:
            self.progress()
        return event

    def progress(self) -> int:
        """Marks that the device has passed, however far ahead the host is."""
        with self._counting:  # the thread that answers for a rank's life asks, too
            while self._issued and self._issued[0].query():
                self._issued.popleft()
                self._passed += 1
            return self._passed + self._replayed()

    def complete(self, transfer: Transfer) -> bool:
        """The device has passed its end. What is captured has none yet."""
        return self._capturing is None and bool(transfer.end.query())

    def _replayed(self) -> int:
        """Marks of a graph that its newest replay has passed: those with times after its begin."""
        one = self._replaying
        if one is None or one.began is None or not one.began.query():
            return 0
        while one.passed < len(one.marks) and _after(one.began, one.marks[one.passed]):
            one.passed += 1
        return one.passed

    def start(self, stream: Stream, launch: Launch, *, awaited_next: bool, lane: str = "") -> Transfer:
        """Issue on the lane's side stream, after what compute has done so far."""
        key = stream, lane
        if key not in self._side:
            self._side[key] = self._accelerator.stream(), self._accelerator.event()
        side, ready = self._side[key]
        ready.record(self._compute)  # whoever waits for it waits for what it is of now
        side.wait_event(ready)
        begin = self._record(side)
        with self._accelerator.on(side):
            work = launch.issue()
            work.wait()  # the side stream waits for NCCL's own; the host does not
        end = arrival = self._record(side)
        if self._capturing is not None:
            arrival = self._accelerator.event()
            arrival.record(side)
        self._ends[key] = arrival
        return Transfer(launch=launch, work=work, begin=begin, end=end, arrival=arrival)

    def wait(self, transfer: Transfer) -> None:
        """Let the compute stream wait for the transfer."""
        self._compute.wait_event(transfer.arrival)

    def barrier(self) -> None:
        """Let what follows on compute wait for all collectives, which wait for compute anyway.

        This orders streams as DHelix's barriers do (its section 5), without the host, which goes on issuing.
        Messages between stages are not waited for: a receive is asked for long before anybody sends, and may
        need what comes after the barrier.
        """
        for (_, lane), end in self._ends.items():
            if not lane:
                self._compute.wait_event(end)

    @contextmanager
    def capture(self) -> Iterator[Captured]:
        """Meanwhile nothing is done, but captured for `replay`. Raises RuntimeError for what cannot be.

        What is under way on side streams must have been waited for, before the begin and before the end.
        """
        own, self._side, self._ends = (self._compute, self._side, self._ends), {}, {}
        try:
            with self._accelerator.capture() as graph:
                self._compute = self._accelerator.current()
                self._capturing = captured = Captured(graph)
                yield captured
        finally:
            self._capturing = None
            self._compute, self._side, self._ends = own

    def replay(self, captured: Captured) -> None:
        """Do what was captured."""
        began = self.mark()
        with self._counting:
            self._passed += self._replayed()
            captured.began, captured.passed = began, 0
            self._replaying = captured
        captured.graph.replay()

    def lead(self) -> None:
        """Keep compute busy for longer than the host takes to issue an operator and its marks."""
        self._accelerator.spin(_LEAD_NS)

    def delay(self, ns: float) -> None:
        """Keep compute busy."""
        self._accelerator.spin(ns)

    def nanoseconds(self, mark: Mark) -> int:
        """Nanoseconds since the streams were made; waits for the event.

        CUDA counts in single-precision milliseconds, which after a minute are exact to four microseconds. So
        the origin moves along, and marks within seconds of each other have exact distances.
        """
        mark.synchronize()
        passed_ns = self._origin_ns + int(self._origin.elapsed_time(mark) * 1e6)
        if passed_ns > self._origin_ns + _FAR_NS:
            self._origin, self._origin_ns = mark, passed_ns
        return passed_ns

    def epoch_ns(self) -> int:
        """The first event's time on the wall clock."""
        return self._epoch_ns

    def close(self) -> None:
        """Nothing to end."""

    def forget(self, marks: Iterable[Mark]) -> None:
        """Their events are used again, but for those that are asked after."""
        self.progress()
        self._ends.clear()
        with self._counting:
            kept = {id(self._origin), *map(id, self._issued)}
        self._free += [mark for mark in marks if mark is not None and id(mark) not in kept]

    def _record(self, stream: DeviceStream) -> Event:
        if self._capturing is not None:
            event = self._accelerator.graph_event()
        else:
            event = self._free.pop() if self._free else self._accelerator.event()
        event.record(stream)
        return event


def _after(begin: Event, mark: Event) -> bool:
    """Whether a mark of a graph was passed after an event: until then it has the time of another replay."""
    return mark.query() and begin.elapsed_time(mark) >= 0


_LEAD_NS = 2_000_000
"""A layer's longest operator takes its host some 20 launches, of 5 to 10 us each."""
_MANY = 4096
"""Marks that are kept until they are asked after."""
_FAR_NS = 1_000_000_000
"""Marks that are so much later than the origin become the origin."""
