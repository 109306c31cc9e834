"""Reports on standard error what a search is doing, once it takes longer than a moment."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from braid.jobs.output import say

_MOMENT_SECONDS = 1.5
"""Seconds within which a search reports nothing."""
_LOOK_SECONDS = 0.25
_LINE_SECONDS = 10.0
"""Seconds between two lines if there is no terminal, in which the line would be replaced."""


@contextmanager
def searching(quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Yield a function to which a search within the block reports what it is doing. ``quiet``: show
    nothing."""
    if quiet:
        yield lambda what: None
        return
    newest, over = [""], threading.Event()

    def watch() -> None:
        console, begin = Console(file=sys.stderr), time.monotonic()
        status = console.status("")
        shown, said_at = "", float("-inf")
        while not over.wait(_LOOK_SECONDS):
            what, now = newest[0], time.monotonic()
            text = f"searching for {now - begin:.0f} s: {what}"
            if not what or now - begin < _MOMENT_SECONDS:
                continue
            if console.is_terminal:
                status.start()
                status.update(text)
            elif what != shown and now - said_at >= _LINE_SECONDS:
                say(console, f"braid: {text}")
                shown, said_at = what, now
        status.stop()

    thread = threading.Thread(target=watch, name="searching", daemon=True)
    thread.start()
    try:
        yield lambda what: newest.__setitem__(0, what)
    finally:
        over.set()
        thread.join()
