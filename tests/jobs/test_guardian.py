"""What a command has started for its private cluster ends with it, even if it is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import alive, within

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
