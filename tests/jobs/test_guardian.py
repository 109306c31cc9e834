"""What a command has started for its private cluster ends with it, even if it is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = """
import os, subprocess, sys, time
from pathlib import Path
from braid.jobs.guardian import MARK, guarded
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


def alive(process: int) -> bool:
    """Whether it runs; one that has ended may wait for somebody to ask how."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def until_gone(folder: Path) -> None:
    """The folder goes last."""
    deadline = time.monotonic() + 60
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not folder.exists()


@pytest.mark.parametrize("what", ["stay", "end"])
def test_after_a_kill_and_after_an_end(tmp_path: Path, what: str) -> None:
    command, (marked, logging, other) = started(tmp_path / "folder", what)
    try:
        if what == "stay":
            assert all(map(alive, (marked, logging, other)))
            command.kill()
        assert command.wait(60) == (-signal.SIGKILL if what == "stay" else 0)
        until_gone(tmp_path / "folder")
        assert [alive(process) for process in (marked, logging, other)] == [False, False, True]
    finally:
        os.kill(other, signal.SIGKILL)
