"""Says on standard error what a search is at, once it takes longer than a moment."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

_MOMENT_SECONDS = 1.5
"""A search that is over by then says nothing."""
_LOOK_SECONDS = 0.25
_LINE_SECONDS = 10.0
"""Between two lines where there is no terminal, whose line would be replaced."""


class Searching:
    """Call it with what is searched; `look` shows the newest of that."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._begin = clock()
        self._what = self._shown = ""
        self._last = float("-inf")
        self._status = console.status("") if console.is_terminal else None

    def __call__(self, what: str) -> None:
        """Take note, from any thread."""
        self._what = what

    def look(self) -> None:
        """Show what is searched now and since when, if it is time to."""
        now = self._clock()
        if not self._what or now - self._begin < _MOMENT_SECONDS:
            return
        text = f"searching for {now - self._begin:.0f} s: {self._what}"
        if self._status is not None:
            self._status.start()
            self._status.update(text)
        elif self._what != self._shown and now - self._last >= _LINE_SECONDS:
            self._console.print(f"braid: {text}", highlight=False, markup=False, soft_wrap=True)
            self._last, self._shown = now, self._what

    def stop(self) -> None:
        """Leave nothing of it on a terminal."""
        if self._status is not None:
            self._status.stop()


@contextmanager
def searching(quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Tell what is yielded what a search within the block is at. ``quiet``: nothing is shown."""
    if quiet:
        yield lambda what: None
        return
    shown, over = Searching(Console(file=sys.stderr)), threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK_SECONDS):
            shown.look()

    thread = threading.Thread(target=watch, name="searching", daemon=True)
    thread.start()
    try:
        yield shown
    finally:
        over.set()
        thread.join()
        shown.stop()
