"""The clock of CUDA events, with events that count as CUDA's do: in single-precision milliseconds."""

import struct
from itertools import pairwise
from typing import cast

import pytest

from braid.actors.stage.accelerator import Accelerator
from braid.actors.stage.cuda_streams import CudaStreams
from braid.actors.stage.telemetry import Recorder
from braid.scheduling.operators import Stream
from braid.scheduling.trace import Label

MINUTE = 60_000_000_000


class Event:
    """An event at some time."""

    def __init__(self, ns: int) -> None:
        self.ns, self.recorded = ns, 0

    def record(self, stream: object) -> None:
        self.recorded += 1

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: "Event") -> float:
        (rounded,) = struct.unpack("f", struct.pack("f", (later.ns - self.ns) / 1e6))
        return float(rounded)


class Clock:
    """A device whose events are of its begin; it remembers them."""

    def __init__(self) -> None:
        self.made: list[Event] = []

    def current(self) -> None:
        pass

    def event(self) -> Event:
        self.made.append(Event(0))
        return self.made[-1]

    def synchronise(self) -> None:
        pass


@pytest.fixture
def clock() -> CudaStreams:
    return CudaStreams(cast(Accelerator, Clock()))


@pytest.mark.parametrize(("start", "forwards"), [(7_000, True), (600 * MINUTE, False)])
def test_distances_stay_exact(clock: CudaStreams, start: int, forwards: bool) -> None:
    """Of marks 20 microseconds apart, however late they are and whichever is asked for first."""
    marks = [Event(start + 20_000 * n) for n in range(50)]
    found = {mark.ns: clock.nanoseconds(mark) for mark in (marks if forwards else reversed(marks))}
    for first, second in pairwise(marks):
        assert found[second.ns] - found[first.ns] == pytest.approx(20_000, abs=5)


def test_times_are_about_those_since_the_origin(clock: CudaStreams) -> None:
    for n in range(1, 200):
        ns = n * 700_000_000
        assert clock.nanoseconds(Event(ns)) == pytest.approx(ns, abs=20_000)


def test_events_of_a_step_are_used_again_and_no_others() -> None:
    clock = Clock()
    streams = CudaStreams(cast(Accelerator, clock))
    recorder = Recorder(streams)
    outside = streams.mark()
    label = Label(operator="one", stream=Stream.COMPUTE)
    for _ in range(3):
        recorder.clear()
        for _ in range(10):
            recorder.compute(label, None, recorder.mark(), recorder.mark())
    assert len(clock.made) == 2 + 20  # the origin, the one outside, those of a step
    assert cast(Event, outside).recorded == 1
    assert streams.progress() == 2 + 60
    recorder.recording = False
    assert recorder.mark() is None
