"""Ends a command's private Ray cluster with the command, however that ends: `python guardian.py FOLDER PID`.

The guardian is a separate process that imports nothing of Braid. It waits until its standard input ends,
whose other end the command holds; then it kills the cluster's processes and removes their folder.
"""

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

MARK = "BRAID_SESSION"
"""Environment variable of all processes of a private cluster; its value is the cluster's folder."""
_SECONDS = 10.0


@contextlib.contextmanager
def guarded(folder: Path) -> Iterator[None]:
    """When the block or this process ends, kill all processes that have `MARK` or write below ``folder``."""
    command = [sys.executable, "-I", "-S", __file__, str(folder), str(os.getpid())]
    guardian = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert guardian.stdin is not None
    try:
        yield
    finally:
        guardian.stdin.close()
        guardian.wait()


def members(folder: str, command: int) -> list[int]:
    """Return the ids of the processes of the cluster in ``folder``: processes that have the variable `MARK`
    or, since a process title may overwrite variables, write to the cluster's log files. Leave out the
    command, which also writes there."""
    mark = f"{MARK}={folder}".encode()
    ids = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            marked = mark in (process / "environ").read_bytes().split(b"\0")
            if marked or any(
                os.readlink(handle).startswith(f"{folder}/") and handle.lstat().st_mode & stat.S_IWUSR
                for handle in (process / "fd").iterdir()
            ):
                ids.append(int(process.name))
    return [process for process in ids if process not in (os.getpid(), command)]


def end(folder: str, command: int) -> None:
    """Kill the cluster's processes until none are left, then remove the folder."""
    deadline = time.monotonic() + _SECONDS
    while (left := members(folder, command)) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end(sys.argv[1], int(sys.argv[2]))
