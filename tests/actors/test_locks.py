"""One process holds a file at a time, also on file systems without flock; what was killed holds nothing."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from braid.actors.config import ConfigError
from braid.actors.controller.state.locks import FileHold, HeldError
from tests.end_to_end.command import ROOT

HOLD = """
import errno, fcntl, os, sys, time
from pathlib import Path
from braid.actors.controller.state.locks import FileHold

def missing(file, how):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

if sys.argv[2] == "without flock":
    fcntl.flock = missing
hold = FileHold(Path(sys.argv[1]))
hold.take()
print("held", flush=True)
time.sleep(600)
"""

HAS = ("with flock", "without flock")


def fails_with(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that answers so."""

    def flock(file: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.filterwarnings("ignore:flock not supported")
@pytest.mark.parametrize("has", HAS)
def test_another_process(tmp_path: Path, has: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if has == "without flock":
        fails_with(errno.ENOSYS, monkeypatch)
    path = tmp_path / ".lock"
    command = [sys.executable, "-c", HOLD, str(path), has]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "held\n"
            here = FileHold(path)
            with pytest.raises(HeldError, match=rf"^process {other.pid} on \S+") as told:
                here.take()
            assert ("remove" in str(told.value)) is (has == "without flock")
        finally:
            other.kill()
    here.take()
    assert here.holder().startswith(f"{os.getpid()} on ")
    here.release()
    again = FileHold(path)
    again.take()
    again.release()


@pytest.mark.filterwarnings("ignore:flock not supported")
def test_a_holder_on_another_host_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody here can know whether it lives."""
    fails_with(errno.ENOSYS, monkeypatch)
    path = tmp_path / ".lock"
    path.write_text("17\nelsewhere\n")
    with pytest.raises(HeldError, match=r"^process 17 on elsewhere \(if that is gone, remove .*/.lock\)$"):
        FileHold(path).take()
    path.unlink()
    hold = FileHold(path)
    hold.take()
    hold.release()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_nothing_can_be_locked(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fails_with(number, monkeypatch)
    with pytest.raises(
        ConfigError, match=rf"\.lock cannot be locked \({os.strerror(number)}\); mount"
    ) as told:
        FileHold(tmp_path / ".lock").take()
    assert "\n" not in str(told.value)
