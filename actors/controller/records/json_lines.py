"""Files with a JSON object per line, written at their end and cut short by a crash at worst."""

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
"""Limit of the lines of a file that wait for room on the disk; beyond it the oldest lines are dropped."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 60.0
"""Pause between two attempts to write the lines; every failed attempt doubles it, up to the second number."""


def cut_off(path: Path, first_step: int) -> None:
    """End a file after the last line of a step before ``first_step``; needs no space."""
    path.touch()
    keep = next((end for line, end in backwards(path) if line.get("step", first_step) < first_step), 0)
    os.truncate(path, keep)


def last_line(path: Path) -> dict[str, Any]:
    """The last whole object of a file with one per line; empty if there is none."""
    return next((content for content, _ in backwards(path)), {})


def backwards(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Objects of a file with one per line and their ends, the last one first: long runs have long files."""
    if not path.exists():
        return
    with path.open("rb") as file:
        position = end = file.seek(0, os.SEEK_END)
        unread, whole = b"", False  # what follows the last line's end was cut short by a crash
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
    """The objects of a file, one at a time; lines that are none are left out."""
    if path.exists():
        with path.open(encoding="utf-8") as file:
            for line in file:
                with contextlib.suppress(json.JSONDecodeError):
                    yield json.loads(line)


@dataclass
class WaitingLines:
    """Lines that a file had no room for: bounded, and tried again after pauses that grow."""

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
                    with contextlib.suppress(OSError):  # its buffer still holds lines
                        file.close()
                    os.truncate(path, size)  # no half lines
                    raise
        except OSError:
            self.again, self.pause = time.monotonic() + self.pause, min(2 * self.pause, _LONGEST_PAUSE_S)
            raise
        self.lines, self.size, self.again, self.pause = deque(), 0, 0.0, _FIRST_PAUSE_S
