"""Files with one JSON object per line, which are appended to; a crash can only cut off the last line."""

import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_CHUNK_BYTES = 1 << 16
_WAITING_BYTES = 32 << 20
"""Most bytes of lines that wait for room on the disk; beyond it the oldest lines are dropped."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 60.0
"""Seconds between two attempts to write the lines; every failed attempt doubles it, up to the second
number."""


def cut_off(path: Path, first_step: int) -> None:
    """Truncate a file after the last line of a step before ``first_step``; this needs no disk space."""
    path.touch()
    keep = next((end for line, end in backwards(path) if line.get("step", first_step) < first_step), 0)
    os.truncate(path, keep)


def last_line(path: Path) -> dict[str, Any]:
    """Return the last complete object of a file with one per line; an empty dict if there is none."""
    return next((content for content, _ in backwards(path)), {})


def backwards(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield objects of a file with one per line, each with the position of its end, from the last one
    backwards."""
    if not path.exists():
        return
    with path.open("rb") as file:
        position = end = file.seek(0, os.SEEK_END)
        unread, whole = b"", False  # text after the last line's end was cut short by a crash
        while position:
            begin = max(0, position - _CHUNK_BYTES)
            file.seek(begin)
            lines = (file.read(position - begin) + unread).split(b"\n")
            position, unread = begin, lines[0]
            for line in reversed(lines[1:] if begin else lines):
                if whole:
                    with contextlib.suppress(ValueError):
                        content = json.loads(line)
                        if isinstance(content, dict):
                            yield content, end + 1
                end -= len(line) + 1
                whole = True


def read_lines(path: Path) -> list[dict[str, Any]]:
    return list(lines_of(path))


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file, one at a time; skip lines that are not JSON."""
    if path.exists():
        with path.open(encoding="utf-8") as file:
            for line in file:
                with contextlib.suppress(json.JSONDecodeError):
                    yield json.loads(line)


@dataclass
class WaitingLines:
    """Lines for which a file had no room: their size is limited, and writing is tried again after growing
    pauses."""

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
        """Append the lines to a file; an `OSError` leaves the file as it was, and the next attempt comes
        later."""
        try:
            with path.open("ab") as file:
                size = file.tell()
                try:
                    file.write("".join(self.lines).encode())
                    file.flush()
                except OSError:
                    with contextlib.suppress(OSError):  # its buffer still holds lines
                        file.close()
                    os.truncate(path, size)  # leave no half line
                    raise
        except OSError:
            self.again, self.pause = time.monotonic() + self.pause, min(2 * self.pause, _LONGEST_PAUSE_S)
            raise
        self.lines, self.size, self.again, self.pause = deque(), 0, 0.0, _FIRST_PAUSE_S
