"""A rank's log: all output of its process to standard output and error, C++ libraries included."""

import contextlib
import faulthandler
import functools
import inspect
import io
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

FOLDER: Final = "logs"
HEADER: Final = "==="
"""Prefix of the line that a rank writes first in every generation."""
_MOST_BYTES: Final = 8 << 20
"""Bytes above which a log is renamed to ``NAME.1``; each rank keeps at most one such file."""


def log_file(run: Path, rank: int) -> Path:
    return run / FOLDER / f"rank-{rank}.log"


def put_aside(log: Path) -> Path:
    """Return the path to which a log that grew too long is renamed."""
    return log.with_name(f"{log.name}.1")


def anything_said(run: Path) -> bool:
    """Tell whether a run's logs contain more than the ranks' header lines."""
    return any(
        line
        for log in (run / FOLDER).glob("*")
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if not line.startswith(HEADER)
    )


def write_to(log: Path, header: str, *, anew: bool) -> bool:
    """Redirect all further output of this process to a log, beginning with ``header``; ``anew``: empty the
    log first.

    Return False if the log cannot be written: the output then goes where it went before.
    """
    try:
        log.parent.mkdir(exist_ok=True)
        if anew:
            put_aside(log).unlink(missing_ok=True)
        elif log.exists() and log.stat().st_size > _MOST_BYTES:
            log.replace(put_aside(log))
        number = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if anew else 0), 0o644)
    except OSError:
        return False
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os.dup2(number, 1)
    os.dup2(number, 2)
    os.close(number)
    sys.stdout = sys.stderr = io.TextIOWrapper(
        _Unfailing(2, "w", closefd=False), encoding="utf-8", errors="replace", write_through=True
    )
    faulthandler.enable(2)
    print(header)
    return True


class _Unfailing(io.FileIO):
    """Drops output that the disk has no room for: training matters more than its log."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


class Logged:
    """A rank whose process logs its output and the exceptions of its public methods.

    The controller reports the error of one rank only; the logs show what other ranks were doing. A
    `ValueError` is meant for the user; its trace is not logged.
    """

    rank: int
    address: str
    _log: Path
    _logs = False

    def __init_subclass__(cls) -> None:
        """Wrap public methods so that they log their exceptions."""
        for name, method in list(vars(cls).items()):
            if inspect.isfunction(method) and not name.startswith("_"):
                setattr(cls, name, _logged(method))

    def open_log(self, run: str, generation: int) -> None:
        now = time.strftime("%Y-%m-%d %H:%M:%S %z")
        location = f"{socket.gethostname()} ({self.address}), process {os.getpid()}"
        header = f"{HEADER} {now}: generation {generation}, rank {self.rank} on {location}"
        self._log = log_file(Path(run), self.rank)
        self._logs = write_to(self._log, header, anew=generation == 1)

    def rotate_log(self) -> None:
        """Rename the log if it has grown too long; called before every public method."""
        if self._logs and os.fstat(2).st_size > _MOST_BYTES:
            write_to(self._log, f"{HEADER} goes on from {put_aside(self._log).name}", anew=False)


def _logged(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def called(self: Logged, *arguments: Any, **named: Any) -> Any:
        self.rotate_log()
        try:
            return method(self, *arguments, **named)
        except Exception as error:
            if self._logs and not isinstance(error, ValueError):
                traceback.print_exc()
            raise

    return called
