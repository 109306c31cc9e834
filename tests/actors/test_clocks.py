"""Clocks of hosts that differ: told as NTP tells them, and taken out of spans. The clock of CUDA events, with
events that count as CUDA's do: in single-precision milliseconds."""

import random
import socket
import time
from datetime import timedelta
from itertools import pairwise
from typing import Any, cast
from unittest.mock import patch

import numpy as np
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
from tests.cuda import clock
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


class Event(clock.Event):
    """It counts as CUDA's do."""

    def elapsed_time(self, other: clock.Event) -> float:
        return float(np.float32(super().elapsed_time(other)))


class Device(clock.TimedDevice):
    """Its events count as CUDA's do; it remembers them."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Event] = []

    def event(self) -> Event:
        self.made.append(Event(self))
        return self.made[-1]


@pytest.mark.parametrize(("start", "forwards"), [(7_000, True), (600 * MINUTE, False)])
def test_distances_stay_exact(start: int, forwards: bool) -> None:
    """Of marks 20 microseconds apart, however late they are and whichever is asked for first."""
    device = Device()
    streams = CudaStreams(cast(Accelerator, device))
    marks = [Event(device, start + 20_000 * n) for n in range(50)]
    found = {mark: streams.nanoseconds(mark) for mark in (marks if forwards else reversed(marks))}
    for first, second in pairwise(marks):
        assert found[second] - found[first] == pytest.approx(20_000, abs=5)


def test_times_are_about_those_since_the_origin() -> None:
    device = Device()
    streams = CudaStreams(cast(Accelerator, device))
    for ns in range(700_000_000, 200 * 700_000_000, 700_000_000):
        assert streams.nanoseconds(Event(device, ns)) == pytest.approx(ns, abs=30_000)


def test_events_of_a_step_are_used_again_and_no_others() -> None:
    device = Device()
    streams = CudaStreams(cast(Accelerator, device))
    recorder, outside = Recorder(streams), cast(Event, streams.mark())
    time_outside, label = outside.time, Label(operator="one", stream=Stream.COMPUTE)
    for _ in range(3):
        recorder.clear()
        for _ in range(10):
            recorder.compute(label, None, recorder.mark(), recorder.mark())
    assert len(device.made) == 2 + 20, "the origin, the one outside, those of a step"
    assert outside.time == time_outside
