"""What signals do to a run, from the start of its command to its end.

After a second one, what the save under way has left is removed, and the newest checkpoint is named.
"""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from braid.actors.controller.ranks.group import StoppedError
from braid.actors.controller.state.locks import FileHold
from braid.jobs.training import train
from braid.jobs.training.stopping import SecondSignalError, StopSignals
from braid.jobs.training.train import _explained
from tests.waiting import alive, within

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Each handler is put back. ``nohup``, and many a CI, start tests with SIGHUP ignored; here none is."""
    outside = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    after = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGHUP, outside[signal.SIGHUP])
    assert after == before


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.05)  # Python hears it between two of its instructions


@pytest.mark.parametrize("number", SIGNALS)
def test_a_run_is_asked_to_stop_once_however_many_signals_come_together(number: int) -> None:
    """``timeout`` sends one to the command and one to its group. Before there is a run, the command ends."""
    with StopSignals().heard(), pytest.raises(StoppedError):
        send(number)
    asked = threading.Semaphore(0)
    with StopSignals().heard() as signals, signals.calling(asked.release):
        send(number)
        send(number)
        assert asked.acquire(timeout=10)
        assert not asked.acquire(timeout=0.1)


def test_a_signal_that_is_ignored_stays_so_and_one_after_the_run_changes_nothing() -> None:
    """``nohup``."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopSignals().heard() as signals:
        send(signal.SIGHUP)
        with signals.calling(lambda: None):
            pass
        send(signal.SIGTERM)
    signal.signal(signal.SIGHUP, before)


def test_each_controller_is_told() -> None:
    """A signal that comes between two controllers of a run, or to one that is dead, is not lost."""
    told: queue.Queue[str] = queue.Queue()
    with StopSignals().heard() as signals:
        with signals.calling(lambda: told.put("dead")):
            send(signal.SIGTERM)
            assert told.get(timeout=10) == "dead"
        with signals.calling(lambda: told.put("next")):
            assert told.get(timeout=10) == "next"


def stopped(run: Path, *saves: str) -> tuple[str, list[str]]:
    """What the command says of a run with saves, and which are left."""
    for name in saves:
        (run / "checkpoints" / name).mkdir(parents=True)
    with pytest.raises(SecondSignalError) as caught, _explained(run):
        raise SecondSignalError
    return str(caught.value), sorted(path.name for path in run.glob("checkpoints/*"))


def test_half_a_checkpoint_is_removed(tmp_path: Path) -> None:
    told, left = stopped(tmp_path, "step-4", "step-8.tmp-1", "step-2.tmp-old")
    assert told.endswith("without a checkpoint; the newest checkpoint is of step 4; go on with resume=True")
    assert left == ["step-4"]


def test_a_run_that_still_ends_keeps_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "_TIDY_SECONDS", 0.1)
    lock = FileHold(tmp_path / ".lock")
    lock.take()
    told, left = stopped(tmp_path, "step-8.tmp-1")
    assert ("there is no checkpoint" in told, left) == (True, ["step-8.tmp-1"])
    lock.release()


# -- what a command has started for its private cluster ends with it, even if it is killed -------------------

COMMAND = """
import os, subprocess, sys, time
from pathlib import Path
from braid.jobs.cluster.guardian import MARK, guarded
folder = Path(sys.argv[1])
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
own = (folder / "own").open("w")
with guarded(folder):
    marked = subprocess.Popen(sleep, env={**os.environ, MARK: str(folder)}, start_new_session=True)
    with (folder / "log").open("w") as log:
        logging = subprocess.Popen(sleep, stdout=log, start_new_session=True)
    other = subprocess.Popen(sleep, start_new_session=True)
    print(marked.pid, logging.pid, other.pid, flush=True)
    if sys.argv[2] == "stay":
        time.sleep(600)
"""


def started(folder: Path, what: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A command with three children: two of its cluster, and another one."""
    folder.mkdir()
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(folder), what], stdout=subprocess.PIPE, text=True
    )
    assert command.stdout is not None
    return command, [int(word) for word in command.stdout.readline().split()]


@pytest.mark.parametrize("what", ["stay", "end"])
def test_after_a_kill_and_after_an_end(tmp_path: Path, what: str) -> None:
    command, (marked, logging, other) = started(tmp_path / "folder", what)
    try:
        if what == "stay":
            assert all(map(alive, (marked, logging, other)))
            command.kill()
        assert command.wait(60) == (-signal.SIGKILL if what == "stay" else 0)
        assert within(60, lambda: not (tmp_path / "folder").exists()), "the folder goes last"
        assert [alive(process) for process in (marked, logging, other)] == [False, False, True]
    finally:
        os.kill(other, signal.SIGKILL)
