"""A corpus (section ``data`` of a configuration): its files, and how they are cut into work of equal size.

Three formats: text (one document a file), JSON-lines (one object a line) and Parquet (one row a document);
the first two also compressed. Whatever is wrong with a user's files is a `ValueError` of one line that names
the key, the value and a remedy.
"""

import codecs
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from shlex import quote
from typing import assert_never

from braid.actors.config import DataConfig
from braid.actors.config.paths import PYTHON_STDLIB
from braid.actors.config.urls import is_url
from braid.jobs.data.files import Format, Source, endings, find, local, opened
from braid.jobs.data.parquet import open_parquet

_FORMATS: dict[str, Format] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines"), "jsonl"),
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
}
_UNREADABLE = {
    ".json": "set data.format to jsonl if every line is an object, or to text",
    **dict.fromkeys((".lz4", ".zip", ".tar", ".tgz", ".tbz2", ".txz", ".7z"), "unpack it first"),
    **dict.fromkeys((".arrow", ".feather"), "save it as Parquet"),
}
_STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib"}
_ARRAY = re.compile(rb"\s*\[\s*\{")

# Work is cut by the size of the corpus alone, so that the output does not depend on who does it.
_ITEMS = 256
_SMALLEST_ITEM_BYTES = 1 << 20
_LARGEST_ITEM_BYTES = 1 << 28


@dataclass(frozen=True)
class FileRange:
    """Part of a source: bytes of JSON-lines, row groups of Parquet; text is always whole."""

    path: str
    format: Format
    start: int
    stop: int
    size_bytes: int


@dataclass(frozen=True)
class WorkItem:
    """What one task reads; the output keeps the order of the numbers."""

    number: int
    ranges: tuple[FileRange, ...]


def find_sources(data: DataConfig) -> tuple[Source, ...]:
    """The corpus's files, each once, sorted by path. `ValueError` for an entry that finds nothing."""
    if not data.files:
        raise ValueError(f"data.files: [] names no file; give paths, globs or {PYTHON_STDLIB!r}")
    sources: dict[str, Source] = {}
    for entry in data.files:
        for source in _standard_library() if entry == PYTHON_STDLIB else find(entry):
            if not _excluded(source.path, data.exclude):
                kind: Format = "text" if entry == PYTHON_STDLIB else _format(source.path, data.format)
                sources[source.path] = replace(source, format=kind)
    if not sources:
        raise ValueError(f"data.exclude: {list(data.exclude)!r} leaves no file of data.files; drop a pattern")
    return tuple(sources[path] for path in sorted(sources))


def _standard_library() -> list[Source]:
    """Sources of the running Python's standard library, without its tests and what is not UTF-8."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in root.rglob("*.py") if not _STDLIB_LEFT_OUT & set(path.relative_to(root).parts)]
    found = [local(str(path)) for path in paths if _is_utf8(path.read_bytes())]
    if not found:
        raise ValueError(f"data.files: {PYTHON_STDLIB!r} finds no *.py in {root}; give files of your own")
    return found


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _excluded(path: str, patterns: Sequence[str]) -> bool:
    """A pattern without a slash is compared with the file's name, else with the whole path."""
    name = os.path.basename(path)
    return any(fnmatch(path if "/" in pattern else name, pattern) for pattern in patterns)


def _format(path: str, wanted: str) -> Format:
    ending, packed = endings(path)
    if wanted != "auto":
        kind: Format = wanted  # type: ignore[assignment]
    elif remedy := _UNREADABLE.get(ending):
        if ending == ".json":
            refuse_array(path)
        raise ValueError(f"data.files: {path!r} ends in {ending + packed!r}; {remedy}")
    else:
        kind = _FORMATS.get(ending, "text")
    if kind == "parquet" and packed:
        raise ValueError(f"data.files: {path!r} is Parquet in {packed!r}; unpack it first")
    return kind


def refuse_array(path: str) -> None:
    """`ValueError` for a file that begins as one JSON array of objects."""
    with opened(path) as file:
        begin = file.read(1 << 12)
    if _ARRAY.match(begin.removeprefix(codecs.BOM_UTF8)):
        remedy = as_lines("jq -c '.[]'", path)
        raise ValueError(f"data.files: {path!r} is one JSON array, not JSON lines; {remedy}")


def as_lines(command: str, path: str) -> str:
    """The remedy that a command makes JSON lines of a file."""
    packing = endings(path)[1]
    name = (os.path.basename(path) if is_url(path) else path).removesuffix(path[len(path) - len(packing) :])
    unpack = "unpack it, and " if packing else ""
    return f"{unpack}make lines of it: {command} < {quote(name)} > {quote(f'{name}.jsonl')}"


def cut(sources: Sequence[Source], text_field: str) -> tuple[WorkItem, ...]:
    """Cut sources into items of roughly equal size, in order; `ValueError` for unreadable Parquet."""
    total = sum(source.size_bytes for source in sources)
    target = min(max(total // _ITEMS, _SMALLEST_ITEM_BYTES), _LARGEST_ITEM_BYTES)
    items: list[list[FileRange]] = []
    size = 0
    for part in (part for source in sources for part in _ranges(source, target, text_field)):
        if not items or size + part.size_bytes > target:
            items.append([])
            size = 0
        items[-1].append(part)
        size += part.size_bytes
    return tuple(WorkItem(number, tuple(ranges)) for number, ranges in enumerate(items))


def _ranges(source: Source, target: int, text_field: str) -> Iterator[FileRange]:
    path, size = source.path, source.size_bytes
    match source.format:
        case "text":
            yield FileRange(path, "text", 0, size, size)
        case "jsonl" if source.whole:
            yield FileRange(path, "jsonl", 0, sys.maxsize, size)
        case "jsonl":
            for start in range(0, size, target):
                stop = min(start + target, size)
                yield FileRange(path, "jsonl", start, stop, stop - start)
        case "parquet":
            start = size = 0
            with open_parquet(path, text_field) as file:
                for group in range(file.num_row_groups):
                    size += file.metadata.row_group(group).total_byte_size
                    if size >= target or group == file.num_row_groups - 1:
                        yield FileRange(path, "parquet", start, group + 1, size)
                        start, size = group + 1, 0
        case _:
            assert_never(source.format)
