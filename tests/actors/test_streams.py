"""Transfers on the host: a thread issues them in order, others wait for them, failures reach who waits."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from braid.actors.stage.measure.telemetry import Recorder
from braid.actors.stage.run.gloo_streams import HostStreams
from braid.actors.stage.run.streams import Transfer
from braid.kernels.collectives.primitives import Launch
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.schedule.operations import Pass, PassKind
from braid.scheduling.trace.spans import Label

LITTLE = 1 << 16
"""Bytes that the caller sends by itself."""


class Made:
    """A transfer that ends when it may, and knows when it was issued."""

    def __init__(self, log: list[str], name: str, *, fails: str = "", sends: int = 1 << 20) -> None:
        self.log, self.name, self.fails, self.sends = log, name, fails, sends
        self.may_begin, self.may_end = threading.Event(), threading.Event()

    def free(self) -> "Made":
        """It may begin and end."""
        self.may_begin.set()
        self.may_end.set()
        return self

    def issue(self) -> "Made":
        assert self.may_begin.wait(10)
        self.log.append(self.name)
        if self.fails == "issue":
            raise RuntimeError(f"{self.name}: connection reset")
        return self

    def wait(self) -> None:
        assert self.may_end.wait(10)
        if self.fails == "wait":
            raise RuntimeError(f"{self.name}: connection reset")

    def launch(self) -> Launch:
        return Launch(torch.zeros(1), self.issue, sends=self.sends)


@pytest.fixture
def streams() -> Iterator[HostStreams]:
    made = HostStreams()
    yield made
    made.close()


def start(streams: HostStreams, made: Made, *, awaited_next: bool = False, lane: str = "") -> Transfer:
    return streams.start(Stream.INTRA, made.launch(), awaited_next=awaited_next, lane=lane)


def test_the_caller_goes_on_while_a_transfer_is_issued(streams: HostStreams) -> None:
    log: list[str] = []
    one, two = Made(log, "one"), Made(log, "two", sends=0)
    first, second = start(streams, one), start(streams, two, lane="send down")
    assert log == [], "neither is issued yet, and here we are"
    two.may_begin.set()
    time.sleep(0.05)
    assert log == [], "the order of issue is that of the calls, over all lanes"
    one.may_begin.set()
    two.may_end.set()
    streams.wait(second)
    assert log == ["one", "two"]
    assert second.begin <= second.end
    assert second.take() is not None
    assert (second.launch, second.work) == (None, None), "nothing keeps a result alive"
    assert first.end is None, "a lane waits for no other"
    one.may_end.set()
    streams.wait(first)
    assert first.begin <= second.begin
    assert first.end >= second.end


def test_the_oldest_transfer_under_way_is_named_once_nothing_gets_on(streams: HostStreams) -> None:
    recorder, log = Recorder(streams), list[str]()
    one, two = Made(log, "one"), Made(log, "two")
    transfers = [start(streams, one), start(streams, two, lane="send down")]
    for made, transfer, block in zip(
        (one, two), transfers, (None, Pass(PassKind.FORWARD, 3, 1)), strict=True
    ):
        made.may_begin.set()
        recorder.transfer(Label(operator=made.name, stream=Stream.INTRA), block, transfer)
    assert recorder.pulse() == (2, ""), "since the call before, two were begun"
    assert recorder.pulse() == (2, "one")
    one.may_end.set()
    streams.wait(transfers[0])
    assert recorder.pulse() == (2, "two of F3.1")
    recorder.mark()
    assert recorder.pulse() == (3, "")
    two.may_end.set()
    streams.wait(transfers[1])
    assert recorder.pulse() == (3, "")


@pytest.mark.parametrize(
    ("sends", "awaited_next"), [(1 << 20, True), (LITTLE, False)], ids=["awaited at once", "little is sent"]
)
def test_the_caller_issues_behind_the_others(streams: HostStreams, sends: int, awaited_next: bool) -> None:
    log: list[str] = []
    before, own = Made(log, "before"), Made(log, "own", sends=sends)
    start(streams, before)
    threading.Timer(0.05, before.may_begin.set).start()
    own.may_begin.set()
    transfer = start(streams, own, awaited_next=awaited_next, lane="send down")
    assert log == ["before", "own"], "both are issued before the caller goes on"
    own.may_end.set()
    streams.wait(transfer)
    assert transfer.begin <= transfer.end
    before.may_end.set()


@pytest.mark.parametrize(("where", "fails"), [("caller", ""), ("at once", "issue"), ("thread", "issue")])
def test_who_sends_goes_first_for_as_long_as_it_takes(streams: HostStreams, where: str, fails: str) -> None:
    """Real-time while it issues, whatever comes of it, and ordinary again afterwards."""
    usual = os.sched_getscheduler(0)
    seen: list[int] = []

    class Looks(Made):
        def issue(self) -> Made:
            seen.append(os.sched_getscheduler(0))
            return super().issue()

    made = Looks([], "one", fails=fails, sends=1 << 20 if where == "thread" else LITTLE)
    with contextlib.suppress(RuntimeError):
        streams.wait(start(streams, made.free(), awaited_next=where == "at once"))
    allowed = usual == os.SCHED_OTHER and may_use_real_time()
    assert seen == [os.SCHED_RR | os.SCHED_RESET_ON_FORK if allowed else usual]
    threads = [int(name) for name in os.listdir("/proc/self/task")]
    assert {os.sched_getscheduler(thread) for thread in threads} == {usual}, "the issuing thread, too"


def may_use_real_time() -> bool:
    """Whether a process of ours may; asked of another one."""
    ask = "import os; os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))"
    return subprocess.run([sys.executable, "-c", ask], capture_output=True, timeout=60).returncode == 0


@pytest.mark.parametrize(("where", "sends"), [("issue", LITTLE), ("issue", 1 << 20), ("wait", LITTLE)])
def test_a_failure_reaches_who_waits_and_the_next_transfer_goes_on(
    streams: HostStreams, where: str, sends: int
) -> None:
    log: list[str] = []
    bad, good = Made(log, "bad", fails=where, sends=sends), Made(log, "good", sends=sends)
    first, second = start(streams, bad.free()), start(streams, good.free())
    with pytest.raises(RuntimeError, match="bad: connection reset"):
        streams.wait(first)
    streams.wait(second)
    assert second.take() is not None
    assert log == ["bad", "good"]
