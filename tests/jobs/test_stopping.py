"""What signals do to a run, from the start of its command to its end."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from braid.actors.controller.group import StoppedError
from braid.jobs import stopping
from braid.jobs.stopping import SecondSignalError, StopSignals

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Those of before."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    assert {number: signal.getsignal(number) for number in SIGNALS} == before


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.05)  # Python hears it between two of its instructions


@pytest.mark.parametrize("number", SIGNALS)
def test_before_there_is_something_to_stop_the_command_ends(number: int) -> None:
    with StopSignals().heard(), pytest.raises(StoppedError):
        send(number)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_run_is_asked_to_stop_once_however_many_signals_come_together(number: int) -> None:
    """``timeout`` sends one to the command and one to its group."""
    asked = threading.Semaphore(0)
    with StopSignals().heard() as signals, signals.calling(asked.release):
        send(number)
        send(number)
        assert asked.acquire(timeout=10)
        assert not asked.acquire(timeout=0.1)


def test_a_second_signal_ends_the_command_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "_SAME_SECONDS", 0.0)
    with StopSignals().heard() as signals, signals.calling(lambda: None):
        send(signal.SIGTERM)
        with pytest.raises(SecondSignalError):
            send(signal.SIGTERM)


def test_a_signal_that_is_ignored_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """``nohup``."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals().heard():
            send(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_each_controller_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that comes between two controllers of a run, or to one that is dead, is not lost."""
    told: list[str] = []
    both = threading.Semaphore(0)

    def tell(name: str) -> None:
        told.append(name)
        both.release()

    with StopSignals().heard() as signals:
        with signals.calling(lambda: tell("dead")):
            send(signal.SIGTERM)
            assert both.acquire(timeout=10)
        with signals.calling(lambda: tell("next")):
            assert both.acquire(timeout=10)
    assert told == ["dead", "next"]


def test_a_signal_after_the_run_changes_nothing() -> None:
    with StopSignals().heard() as signals:
        with signals.calling(lambda: None):
            pass
        send(signal.SIGTERM)


def test_another_thread_than_the_main_one_hears_nothing() -> None:
    found = []

    def run() -> None:
        with StopSignals().heard() as signals:
            found.append(signals.asked.is_set())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [False]
