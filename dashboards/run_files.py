"""Reads the files of a run while they grow: never a symbolic link, never more than a file may hold."""

import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from braid.scheduling.text.json_text import finite

T = TypeVar("T")
MOST_BYTES: Final = 64 << 20
"""No description of a run is larger."""
_CHUNK: Final = 8 << 20


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


def read_parsed(path: Path, parse: Callable[[str], T]) -> T | None:
    """What a text file says; None where there is no file, `ValueError` where it is damaged."""
    if file_facts(path) is None:
        return None
    try:
        return parse(read_bytes(path).decode("utf-8"))
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(str(error) if path.name in str(error) else f"{path.name}: {error}") from None


def shown_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as pages and trackers may show it: of ``cluster.env`` the names."""
    cluster = config.get("cluster")
    variables = cluster.get("env") if isinstance(cluster, Mapping) else None
    if not isinstance(cluster, Mapping) or not isinstance(variables, Mapping):
        return dict(config)
    return {**config, "cluster": {**cluster, "env": sorted(variables)}}


@dataclass
class GrowingLines:
    """A file with a JSON object per line, read from where the last reading stopped.

    A file that was replaced or cut (a run that went back some steps) is read anew, and ``epoch`` says so.
    """

    path: Path
    most: int | None = None
    """Where the file is longer at first sight, only so many of its last bytes are read."""
    epoch: int = 0
    _inode: int = -1
    _offset: int = 0
    _last: bytes = field(default=b"", repr=False)
    """The line before the offset; where it does not stand any more, the file was cut, and has grown since."""

    def refresh(self) -> tuple[bool, list[dict[str, Any]]]:
        """Whether the file began anew, and the objects that were not read before, with finite numbers."""
        before = self.epoch
        lines = [line for batch in self.batches() for line in batch]
        return self.epoch != before, finite(objects(lines))

    def batches(self) -> Iterator[list[bytes]]:
        """The new lines that are whole, never more at once than a few megabytes hold."""
        facts = file_facts(self.path)
        if facts is None:
            return
        inode, size, _ = facts
        try:
            if inode != self._inode or not self._stands(size):
                self.epoch += 1
                self._inode, self._last, self._offset = inode, b"", 0
                if self.most is not None and size > self.most:
                    begin = size - self.most
                    self._offset = begin + read_bytes(self.path, begin, _CHUNK).find(b"\n") + 1
            unread, rest = self._offset, b""
            while unread < size and (data := read_bytes(self.path, unread, min(_CHUNK, size - unread))):
                unread += len(data)
                *whole, rest = (rest + data).split(b"\n")
                if whole:
                    self._offset, self._last = unread - len(rest), whole[-1] + b"\n"
                    yield whole
        except OSError:
            return

    def _stands(self, size: int) -> bool:
        begin = self._offset - len(self._last)
        return size >= self._offset and read_bytes(self.path, begin, len(self._last)) == self._last


def objects(lines: list[bytes]) -> list[dict[str, Any]]:
    """The lines that are objects; NaN and infinities are what Python's JSON makes of them."""
    found = []
    for line in lines:
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(content, dict):
            found.append(content)
    return found


def flat(line: Mapping[str, Any]) -> dict[str, Any]:
    """What a line says, by name; what a section of it says beside that, as ``experts.entropy``."""
    found = dict(line)
    for name, section in line.items():
        if isinstance(section, Mapping):
            found |= {f"{name}.{inner}": value for inner, value in section.items()}
    return found


def is_number(value: object) -> bool:
    return isinstance(value, int | float)


def numbers_in(line: Mapping[str, Any], name: str) -> list[float]:
    """The numbers in a list of a line; none where it is something else."""
    found = line.get(name)
    return list(filter(is_number, found)) if isinstance(found, list) else []
