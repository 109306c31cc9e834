"""Reads the files of a run while they grow: never through a symbolic link, never more than `MOST_BYTES`."""

import fcntl
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from braid.scheduling.text.json_text import finite
from braid.scheduling.text.yaml_text import parse_yaml

T = TypeVar("T")
MOST_BYTES: Final = 64 << 20
"""Limit for a file's size; all descriptions of a run are smaller."""
_CHUNK: Final = 8 << 20
PAGE_ADDRESS: Final = "page-address"
"""File of a run that has a live page on this machine: the page's address."""


def file_facts(path: Path) -> tuple[int, int, int] | None:
    """Return inode, size and time of change of a regular file; None if there is none, or it is behind a
    link."""
    if path.parent.is_symlink():
        return None
    try:
        facts = path.lstat()
    except OSError:
        return None
    return (facts.st_ino, facts.st_size, facts.st_mtime_ns) if stat.S_ISREG(facts.st_mode) else None


def read_bytes(path: Path, offset: int = 0, most: int = MOST_BYTES) -> bytes:
    """Read up to ``most`` bytes of a regular file. Raise `OSError` for anything else, including links."""
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(number, "rb") as file:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError(f"{path.name} is no regular file")
        file.seek(offset)
        return file.read(most)


def is_under_way(run: Path) -> bool:
    """Return whether a process holds the lock of a run's directory."""
    try:
        with (run / ".lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def read_parsed(path: Path, parse: Callable[[str], T]) -> T | None:
    """Read and parse a text file; return None if there is no file, raise `ValueError` if it is damaged."""
    if file_facts(path) is None:
        return None
    try:
        return parse(read_bytes(path).decode("utf-8"))
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(str(error) if path.name in str(error) else f"{path.name}: {error}") from None


def read_mapping(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML or JSON file; an empty one if there is no file, `ValueError` if it is
    damaged."""
    content = read_parsed(path, lambda text: parse_yaml(text, path.name))
    return content if isinstance(content, dict) else {}


def shown_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration that pages and trackers may show: ``cluster.env`` is reduced to names."""
    cluster = config.get("cluster")
    variables = cluster.get("env") if isinstance(cluster, Mapping) else None
    if not isinstance(cluster, Mapping) or not isinstance(variables, Mapping):
        return dict(config)
    return {**config, "cluster": {**cluster, "env": sorted(variables)}}


@dataclass
class GrowingLines:
    """A file with one JSON object per line, read from where the last reading stopped.

    A file that was replaced or truncated (by a run that went back some steps) is read from its begin, and
    ``epoch`` increases.
    """

    path: Path
    most: int | None = None
    """If the file is longer when first seen, only this number of its last bytes are read."""
    epoch: int = 0
    _inode: int = -1
    _offset: int = 0
    _last: bytes = field(default=b"", repr=False)
    """The line before the offset; if it is no longer there, the file was truncated and has grown since."""

    def refresh(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return whether the file began anew, and the objects not read before, with finite numbers."""
        before = self.epoch
        lines = [line for batch in self.batches() for line in batch]
        return self.epoch != before, finite(objects(lines))

    def batches(self) -> Iterator[list[bytes]]:
        """Yield new complete lines, at most a few megabytes at once."""
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
    """Return the lines that are objects; NaN and infinities are read as Python's JSON reads them."""
    objects_read = []
    for line in lines:
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(content, dict):
            objects_read.append(content)
    return objects_read


def flat(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line's fields by name, and fields of its sections with names such as ``experts.entropy``."""
    facts = dict(line)
    for name, section in line.items():
        if isinstance(section, Mapping):
            facts |= {f"{name}.{inner}": value for inner, value in section.items()}
    return facts


def tokens_per_second(line: Mapping[str, Any]) -> float | None:
    """Return the tokens of a step over the time since the end of the step before; None if it is not known."""
    tokens, seconds = line.get("tokens"), line.get("wall_seconds") or line.get("seconds")
    return tokens / seconds if is_number(tokens) and is_number(seconds) and seconds else None


def is_number(value: object) -> bool:
    return isinstance(value, int | float)


def numbers_in(line: Mapping[str, Any], name: str) -> list[float]:
    """Return the numbers in a line's list; an empty list if the field is not a list."""
    values = line.get(name)
    return list(filter(is_number, values)) if isinstance(values, list) else []
