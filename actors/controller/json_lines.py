"""Files with a JSON object per line, written at their end and cut short by a crash at worst."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_CHUNK_BYTES = 1 << 16


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
