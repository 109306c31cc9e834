"""The clock of CUDA events, with events that count as CUDA's do: in single-precision milliseconds."""

import struct
from itertools import pairwise

import pytest
import torch

from braid.actors.stage import cuda_streams
from braid.actors.stage.cuda_streams import CudaStreams

MINUTE = 60_000_000_000


class Event:
    """An event at some time."""

    def __init__(self, ns: int) -> None:
        self.ns = ns

    def synchronize(self) -> None:
        """It has happened."""

    def elapsed_time(self, later: "Event") -> float:
        """Milliseconds to another event."""
        (rounded,) = struct.unpack("f", struct.pack("f", (later.ns - self.ns) / 1e6))
        return float(rounded)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> CudaStreams:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(cuda_streams, "_record", lambda stream: Event(0))
    return CudaStreams(torch.device("cuda"))


@pytest.mark.parametrize("start", [0, 7_000, MINUTE, 600 * MINUTE])
@pytest.mark.parametrize("forwards", [True, False])
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
