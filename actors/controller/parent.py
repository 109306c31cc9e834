"""Processes that must not outlive the one that started them."""

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Ask Linux to kill this process when its parent, of that id, ends; if it has ended by now, exit.

    To Linux the parent is the thread that started this process.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
