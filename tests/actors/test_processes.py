"""Calls to ranks that are processes: an answer belongs to its call, also after one that was given up."""

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from braid.actors.controller.ranks import group
from braid.actors.controller.ranks.group import StoppedError, WorkerError
from braid.actors.controller.ranks.processes import ProcessLauncher
from braid.actors.stage.rank.interface import Pulse
from tests.end_to_end.runs import small_config

pytestmark = pytest.mark.slow


class Rank:
    """Rank 0 fails at once, rank 1 answers when it may."""

    def __init__(self, rank: int, address: str) -> None:
        self._rank = rank

    def one_fails(self, gate: str) -> str:
        """Rank 1's answer comes when nobody waits for it any more."""
        if self._rank == 0:
            raise RuntimeError("out of luck")
        while not Path(gate).exists():
            time.sleep(0.01)
        return "late"

    def both_fail(self, first: int) -> None:
        """One rank's process ends, the other one raises."""
        if self._rank == first:
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("connection reset by peer")

    def closes(self) -> None:
        """The process's end has begun, and takes long."""
        os.closerange(3, 256)
        time.sleep(60.0)

    def takes_long_to_read(self, seconds: float) -> "SlowToRead":
        """Rank 0's answer comes between two signs of life of rank 1, which is at work a little longer."""
        time.sleep(seconds + 1.0 if self._rank == 1 else 0.25)
        return SlowToRead(seconds if self._rank == 0 else 0.0)

    def size(self, content: bytes) -> int:
        """Of what was sent."""
        return len(content)

    def hangs(self, gate: str) -> None:
        """Rank 1 waits for a disk that does not answer; its pulse does."""
        while self._rank == 1 and not Path(gate).exists():
            time.sleep(0.01)

    def pulse(self) -> Pulse:
        """The main loop may hang, but the process lives."""
        return Pulse(None)

    def interrupt(self, generation: int) -> None:
        """Takes longer than the call that it breaks off."""
        Path(self._gate).touch()
        time.sleep(1.0)
        Path(f"{self._gate}.{generation}").touch()

    def waits(self, gate: str) -> None:
        """Until it is interrupted, or its partner has failed."""
        self._gate = gate
        if self._rank == 0:
            raise RuntimeError("out of luck")
        while not Path(gate).exists():
            time.sleep(0.01)
        raise RuntimeError("broken off")

    def echo(self, word: str) -> str:
        """The word, with the rank."""
        return f"{word} {self._rank}"


class SlowToRead:
    """Unpickling takes its time, as that of a million spans does."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __reduce__(self) -> tuple[Any, ...]:
        return _read_slowly, (self.seconds,)


def _read_slowly(seconds: float) -> SlowToRead:
    time.sleep(seconds)
    return SlowToRead(seconds)


Start = Callable[..., Any]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts so many ranks, by a configuration with some sections; they end with the test."""
    groups: list[Any] = []

    def made(ranks: int, **sections: Any) -> Any:
        groups.append(ProcessLauncher(small_config(tmp_path, **sections), serve=Rank).start(ranks))
        return groups[-1]

    yield made
    for one in groups:
        one.shutdown()


def wake(group: Any) -> None:
    """Until both ranks have shown that they live."""
    while group._awake != {0, 1}:
        group.call_all(Rank.takes_long_to_read, 0.1)


def replaced(group: Any, lost: int, ranks: int = 2) -> None:
    """A rank, and no other, is given up; one in its place answers."""
    assert group.interrupt(1) == [lost]
    group.replace([lost])
    assert group.call_all(Rank.echo, "second") == [f"second {rank}" for rank in range(ranks)]


def test_an_answer_that_nobody_waits_for_is_no_others(start: Start, tmp_path: Path) -> None:
    group = start(2)
    gate = tmp_path / "gate"
    assert group.call_all(Rank.echo, "first") == ["first 0", "first 1"]
    with pytest.raises(WorkerError, match="rank 0: RuntimeError: out of luck"):
        group.call_all(Rank.one_fails, str(gate))
    gate.touch()
    assert group.call_all(Rank.echo, "second") == ["second 0", "second 1"]
    gate.unlink()
    for _ in range(2):
        with pytest.raises(WorkerError):
            group.call_all(Rank.one_fails, str(gate))
    gate.touch()
    assert group.call(1, Rank.echo, "third") == "third 1"
    assert group.interrupt(1) == [], "nobody is busy"


@pytest.mark.parametrize("first", [0, 1])
def test_answers_at_once_all_count(start: Start, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """The death is what is told, and who survived it is kept."""
    group = start(2)
    poll = group._poll

    def late(waiting: Collection[int], timeout_s: float) -> Any:
        time.sleep(0.5)  # until all have answered
        return poll(waiting, timeout_s)

    assert group.call_all(Rank.echo, "first") == ["first 0", "first 1"]
    monkeypatch.setattr(group, "_poll", late)
    with pytest.raises(WorkerError, match=f"rank {first}: its process") as caught:
        group.call_all(Rank.both_fail, first)
    assert caught.value.died
    replaced(group, first)


def test_an_end_that_takes_long_is_told_before_it_is_over(start: Start) -> None:
    group = start(1)
    assert group.call(0, Rank.echo, "first") == "first 0"
    with pytest.raises(WorkerError, match="rank 0: its process is ending") as caught:
        group.call(0, Rank.closes)
    assert caught.value.died
    replaced(group, 0, ranks=1)


def test_a_large_answer_that_is_read_makes_no_rank_silent(start: Start) -> None:
    group = start(2, failure={"silence_s": 1.5})
    wake(group)
    assert [one.seconds for one in group.call_all(Rank.takes_long_to_read, 4.0)] == [4.0, 0.0]


def test_a_stopped_rank_whose_pipe_is_full_hangs_nobody(start: Start) -> None:
    """A call larger than any pipe: who is stopped never takes it, and is given up for its silence."""
    group = start(2, failure={"silence_s": 1.5})
    large = bytes(32 << 20)
    assert group.call_all(Rank.size, large) == [32 << 20] * 2
    wake(group)
    child = group._children[1].process
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(WorkerError, match="rank 1: has not answered"):
        group.call_all(Rank.size, large)
    replaced(group, 1)
    assert group.call_all(Rank.size, large) == [32 << 20] * 2


def test_a_call_that_hangs_ends_though_the_rank_answers(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "_CALL_SECONDS", 4.0)
    ranks = start(2, cluster={"group_timeout_s": 1.0})
    wake(ranks)
    text = r"rank 1: has not finished within 4 s, though it answers \(hangs\)"
    with pytest.raises(WorkerError, match=text) as caught:
        ranks.call_all(Rank.hangs, str(tmp_path / "never"))
    assert not caught.value.died
    replaced(ranks, 1)  # it does not drop what it is at


def test_a_wish_to_stop_is_heard_while_ranks_are_waited_for(start: Start, tmp_path: Path) -> None:
    ranks = start(2)
    gate, stop = tmp_path / "gate", threading.Event()
    ranks.call_all(Rank.echo, "awake")
    timer = threading.Timer(1.0, stop.set)
    timer.start()
    with ranks.heeding(stop.is_set), pytest.raises(StoppedError):
        ranks.call_all(Rank.hangs, str(gate))
    gate.touch()
    assert ranks.call_all(Rank.echo, "last") == ["last 0", "last 1"], "what is to be saved still is"


def test_an_interrupt_names_its_generation_and_is_over_when_it_returns(start: Start, tmp_path: Path) -> None:
    """Though the rank's call ends long before: an abort must not hit the next generation."""
    ranks = start(2)
    gate = tmp_path / "gate"
    ranks.call_all(Rank.echo, "awake")
    with pytest.raises(WorkerError, match="out of luck"):
        ranks.call_all(Rank.waits, str(gate))
    assert ranks.interrupt(7) == []
    assert (tmp_path / "gate.7").exists()
