"""Handles signals that ask a run to stop, from the start of a command to its end."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from braid.actors.controller.ranks.group import StoppedError

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAME_SECONDS = 1.0
"""Signals within so many seconds count as one: ``timeout`` sends one to the command and one to its group, a
closing terminal sends several."""


class SecondSignalError(KeyboardInterrupt):
    """A second signal has arrived: its sender does not want to wait for a checkpoint."""


class StopSignals:
    """Handles SIGINT, SIGTERM and SIGHUP within the block of `heard`.

    Before a run begins, the first signal raises `StoppedError`: nothing is lost then. Within the block of
    `calling` the first signal calls ``stop`` in a thread. After that block it does nothing, as the command is
    about to end anyway. A second signal raises `SecondSignalError`.
    """

    def __init__(self) -> None:
        self.asked_at: float | None = None
        """Time of the first signal (`time.monotonic`, in seconds); None before it."""
        self._stop: Callable[[], None] | None = None
        self._begun = self._asked = False

    @contextlib.contextmanager
    def heard(self) -> Iterator["StopSignals"]:
        """Handle signals within the block. Python handles signals in its main thread only: in another thread,
        do nothing. A SIGHUP that is ignored (``nohup``) stays ignored."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        if before[signal.SIGHUP] == signal.SIG_IGN:
            del before[signal.SIGHUP]
        # A handler that is None was not set by Python, and could not be restored.
        before = {number: handler for number, handler in before.items() if handler is not None}
        for number in before:
            signal.signal(number, self._handle)
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def calling(self, stop: Callable[[], None]) -> Iterator[None]:
        """Let the first signal call ``stop`` within the block. If it came before, call ``stop`` at once."""
        self._stop, self._begun = stop, True
        try:
            if self._asked:
                self._call()
            yield
        finally:
            self._stop = None

    def _handle(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if self.asked_at is not None:
            if now - self.asked_at > _SAME_SECONDS:
                raise SecondSignalError
            return
        self.asked_at = now
        if not self._asked:
            self.ask()

    def ask(self) -> None:
        """Do what the first signal does; a signal that comes later is not the second one."""
        self._asked = True
        if not self._begun:
            raise StoppedError
        self._call()

    def _call(self) -> None:
        """Call ``stop`` in a thread, as a signal may arrive anywhere, even while a lock is held."""
        if self._stop is not None:
            threading.Thread(target=self._stop, name="stopping", daemon=True).start()
