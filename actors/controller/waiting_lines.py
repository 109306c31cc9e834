"""Lines that a file had no room for: bounded, and tried again after pauses that grow."""

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

_WAITING_BYTES = 32 << 20
"""Limit of the lines of a file that wait for room on the disk; beyond it the oldest lines are dropped."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 60.0
"""Pause between two attempts to write the lines; every failed attempt doubles it, up to the second number."""


@dataclass
class WaitingLines:
    """Lines that a file had no room for, and when they are tried again."""

    lines: deque[str] = field(default_factory=deque)
    size: int = 0
    again: float = 0.0
    pause: float = _FIRST_PAUSE_S

    def add(self, line: str) -> None:
        self.lines.append(line)
        self.size += len(line)
        while self.size > _WAITING_BYTES:
            self.size -= len(self.lines.popleft())

    def keep(self, wanted: Callable[[str], bool]) -> None:
        self.lines = deque(filter(wanted, self.lines))
        self.size = sum(map(len, self.lines))

    def write(self, path: Path) -> None:
        """Append them to a file; `OSError` leaves it as it was, and the next attempt comes later."""
        try:
            with path.open("ab") as file:
                size = file.tell()
                try:
                    file.write("".join(self.lines).encode())
                    file.flush()
                except OSError:
                    with contextlib.suppress(OSError):  # what is left in its buffer
                        file.close()
                    os.truncate(path, size)  # no half lines
                    raise
        except OSError:
            self.again, self.pause = time.monotonic() + self.pause, min(2 * self.pause, _LONGEST_PAUSE_S)
            raise
        self.lines, self.size, self.again, self.pause = deque(), 0, 0.0, _FIRST_PAUSE_S
