"""Makes processes between a command and its ranks end with the command, and not before it; moves them into
network namespaces."""

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000
HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that may be sent to all processes of a run to end it (by ``timeout``, systemd, ``scancel`` or a
closing terminal). Only the command obeys them."""


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
    """Ask Linux to kill this process when its parent (process id ``parent``) ends; if it has already ended,
    exit.

    To Linux the parent is the thread that started this process.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def enter_namespace(namespace: str | int) -> None:
    """Move this thread, and what it starts, into a network namespace by name or open file (Linux, root)."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = namespace if isinstance(namespace, int) else os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    failed = libc.setns(handle, _CLONE_NEWNET)
    os.close(handle)
    if failed:
        raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")
