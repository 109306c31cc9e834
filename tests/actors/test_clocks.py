"""Clocks of hosts that differ: told as NTP tells them, and taken out of spans. The clock of CUDA events, with
events that count as CUDA's do: in single-precision milliseconds."""

import random
import socket
import struct
import time
from datetime import timedelta
from itertools import pairwise
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from braid.actors.stage.measure.telemetry import Recorder
from braid.actors.stage.rank import clocks
from braid.actors.stage.rank.clocks import Difference, ask, clock_ahead_ns
from braid.actors.stage.rank.groups import TorchGroups
from braid.actors.stage.run.accelerator import Accelerator
from braid.actors.stage.run.cuda_streams import CudaStreams
from braid.actors.stage.run.gloo_streams import HostStreams
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.trace.spans import Label
from tests.forking import run_forked

HOSTS = ("a", "b", "b", "a", "c")
AHEAD_NS = {"a": 0, "b": 7_000_000_000, "c": -3_000_000_000}


def run_rank(rank: int, port: int) -> None:
    """A rank on a host whose clock is ahead by seconds: more than any answer takes."""
    now = time.time_ns
    store = dist.TCPStore("127.0.0.1", port, len(HOSTS), rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(HOSTS))
    groups = TorchGroups(rank, timedelta(seconds=60))
    with patch.object(clocks.time, "time_ns", lambda: now() + AHEAD_NS[HOSTS[rank]]):
        found = clock_ahead_ns(rank, HOSTS, groups)
        assert clock_ahead_ns(rank, ("a",) * len(HOSTS), groups) == 0
    expected = AHEAD_NS[HOSTS[rank]]
    assert abs(found - expected) < 1_000_000_000, (rank, found)
    same = [one for one, host in zip(groups.gather(found), HOSTS, strict=True) if host == HOSTS[rank]]
    assert set(same) == {found}, "ranks of a host have one clock"
    dist.destroy_process_group()


@pytest.mark.slow
def test_ranks_learn_what_their_host_is_ahead() -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    run_forked(run_rank, (port,), nprocs=len(HOSTS))


def test_a_difference_is_told_where_it_is_sure() -> None:
    """The truth is never further away than what is said, however long either way takes."""
    draw = random.Random()
    for _ in range(200):
        ahead, there, back = draw.randint(-5_000, 5_000), draw.randint(1, 4_000), draw.randint(1, 4_000)
        at = 10**18 + draw.randint(0, 10**6)
        times = iter([at + ahead, at + there + back + ahead])

        def received(x: torch.Tensor, source: int, when: int = at + there) -> None:
            x.fill_(when)

        with (
            patch.object(clocks.time, "time_ns", lambda times=times: next(times)),
            patch.object(clocks.dist, "send", lambda x, to: None),
            patch.object(clocks.dist, "recv", received),
        ):
            found = ask()
        assert abs(found.ahead_ns - ahead) <= found.unsure_ns
    assert Difference(900, 1_000).told_ns == 0
    assert Difference(-1_100, 1_000).told_ns == -1_100


def test_spans_are_told_by_the_clock_of_rank_0() -> None:
    streams: Any = HostStreams()
    recorder = Recorder(streams)
    recorder.compute(Label(operator="x", stream=Stream.COMPUTE), None, 1_000, 2_000)
    (plain,) = recorder.records()["start_ns"]
    recorder.set_clock(10**12)
    (moved,) = recorder.records()["start_ns"]
    assert plain - moved == pytest.approx(10**12, abs=10**9)


# -- CUDA ----------------------------------------------------------------------------------------------------


MINUTE = 60_000_000_000


class Event:
    """An event at some time."""

    def __init__(self, ns: int) -> None:
        self.ns = ns

    def record(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: "Event") -> float:
        (rounded,) = struct.unpack("f", struct.pack("f", (later.ns - self.ns) / 1e6))
        return float(rounded)


class Clock:
    """A device whose events are of its begin."""

    def current(self) -> None:
        pass

    def event(self) -> Event:
        return Event(0)

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
