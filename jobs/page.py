"""The live page beside a run: a process of its own that only reads the run directory.

So neither a slow viewer nor a fault in the page reaches the training.
"""

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_START_SECONDS = 20.0
_END_SECONDS = 3.0


class LivePage:
    """Starts the page when told to and ends it when closed."""

    def __init__(self, port: int = 0) -> None:
        self._port = port
        self._process: subprocess.Popen[str] | None = None

    def open(self, run: Path) -> str:
        """Serve a run directory on this machine's loopback; returns the address.

        `ValueError` with the reason if the page does not come up: no reason to end a training run.
        """
        command = [sys.executable, "-m", "braid.jobs.cli", "dashboard", str(run), "--port", str(self._port)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the training, which ends the page
            preexec_fn=_yield_to_others,
        )
        line = next(_lines(self._process, _START_SECONDS), "")
        if "http://" not in line:
            reason = self._end() or "it did not answer in time"
            raise ValueError(f"the live page did not start: {reason.strip().splitlines()[-1]}")
        return line[line.index("http://") :].strip()

    def close(self) -> None:
        """End the page."""
        self._end()

    def _end(self) -> str:
        """What the process said to standard error."""
        if self._process is None:
            return ""
        process, self._process = self._process, None
        process.terminate()
        try:
            return process.communicate(timeout=_END_SECONDS)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            return process.communicate()[1]


def _lines(process: "subprocess.Popen[str]", seconds: float) -> Iterator[str]:
    """Lines of standard output, until it ends or time is up."""
    assert process.stdout is not None
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0 and selector.select(left):
            line = process.stdout.readline()
            if not line:
                return
            yield line


def _yield_to_others() -> None:
    """Of the child: ends with its parent, and takes the processor only when training leaves it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    os.nice(10)
