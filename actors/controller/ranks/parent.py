"""Processes between a command and its ranks: they end with the command, and not before it."""

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator

_PR_SET_PDEATHSIG = 1
HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that whoever ends a run may send to all of its processes (``timeout``, systemd, ``scancel``, a
terminal that closes). Only the command obeys them."""


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Block the signals `HELD` in this thread, and in the processes that it starts within the block and their
    children. This thread receives the signals after the block.

    A process inherits which signals are blocked. So programs that have no code for it, such as
    multiprocessing's fork server and Ray's daemons, survive the signals too.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def die_with(parent: int) -> None:
    """Ask Linux to kill this process when its parent, of that id, ends; if it has ended by now, exit.

    To Linux the parent is the thread that started this process.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
