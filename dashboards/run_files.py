"""Reads the files of a run while they grow: never a symbolic link, never more than a file may hold."""

import json
import math
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

MOST_BYTES: Final = 64 << 20
"""No description of a run is larger."""
_CHUNK: Final = 8 << 20


class NotReadableError(Exception):
    """A file that should be there is not readable; the text is for people."""


def file_facts(path: Path) -> tuple[int, int, int] | None:
    """Inode, size and time of change of a regular file; None where there is none, or behind a link."""
    if path.parent.is_symlink():
        return None
    try:
        facts = path.lstat()
    except OSError:
        return None
    return (facts.st_ino, facts.st_size, facts.st_mtime_ns) if stat.S_ISREG(facts.st_mode) else None


def read_bytes(path: Path, offset: int = 0, most: int = MOST_BYTES) -> bytes:
    """Up to ``most`` bytes of a regular file. `OSError` for what is none, links among them."""
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(number, "rb") as file:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError(f"{path.name} is no regular file")
        file.seek(offset)
        return file.read(most)


def read_text(path: Path) -> str | None:
    """The text of a file; None where there is none, `NotReadableError` where it is no text."""
    if file_facts(path) is None:
        return None
    try:
        return read_bytes(path).decode("utf-8")
    except OSError as error:
        raise NotReadableError(f"{path.name} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise NotReadableError(f"{path.name} is not text") from None


def read_json(path: Path) -> Any:
    """The content of a JSON file with finite numbers; None where there is no file."""
    text = read_text(path)
    if text is None:
        return None
    try:
        return finite(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise NotReadableError(f"{path.name} is not JSON: {error}") from None


def finite(value: Any) -> Any:
    """The same with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return value


@dataclass
class GrowingLines:
    """A file with a JSON object per line, read from where the last reading stopped.

    A file that was replaced or cut (a run that was resumed) is read anew, and ``epoch`` says so.
    """

    path: Path
    most: int | None = None
    """Where the file is longer at first sight, only so many of its last bytes are read."""
    epoch: int = 0
    damaged: int = 0
    """Lines that were no objects."""
    _inode: int = -1
    _offset: int = 0
    _rest: bytes = field(default=b"", repr=False)

    def refresh(self) -> tuple[bool, list[dict[str, Any]]]:
        """Whether the file began anew, and the whole lines that were not read before."""
        facts = file_facts(self.path)
        if facts is None:
            return False, []
        inode, size, _ = facts
        anew = inode != self._inode or size < self._offset
        if anew:
            self._begin(inode, size)
        lines: list[dict[str, Any]] = []
        while self._offset < size:
            try:
                data = read_bytes(self.path, self._offset, min(_CHUNK, size - self._offset))
            except OSError:
                break
            if not data:
                break
            self._offset += len(data)
            *whole, self._rest = (self._rest + data).split(b"\n")
            lines += self._objects(whole)
        return anew, lines

    def _begin(self, inode: int, size: int) -> None:
        self.epoch += 1
        self.damaged = 0
        self._inode, self._offset, self._rest = inode, 0, b""
        if self.most is not None and size > self.most:
            self._offset, self._rest = size - self.most, b"-"  # the line that is cut is no object

    def _objects(self, lines: list[bytes]) -> list[dict[str, Any]]:
        found = []
        for line in lines:
            try:
                content = json.loads(line)
            except (ValueError, RecursionError):
                content = None
            if isinstance(content, dict):
                found.append(finite(content))
            elif line.strip():
                self.damaged += 1
        return found
