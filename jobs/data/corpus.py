"""A corpus: which files it has, and how they are cut into work of equal size.

Three formats: text (one document a file), JSON-lines (one object a line) and Parquet (one row a document);
the first two also compressed. Files are paths, globs or URLs (`braid.jobs.data.files`).
Whatever is wrong with a user's files is a ValueError of one line that names the key, the value and a remedy.
"""

import codecs
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from shlex import quote
from typing import Final, Literal, assert_never, get_args

from braid.actors.config.paths import PYTHON_STDLIB
from braid.actors.config.urls import is_url
from braid.jobs.data.files import File, endings, find, local, opened
from braid.jobs.data.parquet import row_groups
from braid.scheduling.suggestions import must_be_one_of

Format = Literal["text", "jsonl", "parquet"]
EncodingErrors = Literal["strict", "replace", "skip"]

AUTO: Final = "auto"

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


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The part of ``data:`` in a configuration that says what to train on.

    files                paths, globs (``**`` crosses folders), fsspec URLs, or `PYTHON_STDLIB`
    exclude              globs of files to leave out (``*`` crosses folders); one without a slash is
                         compared with the file's name, else with its absolute path
    format               of all files; 'auto' goes by the name's ending before that of a compression, and
                         unknown endings are text
    tokenizer            'bytes', or the path of a Hugging Face tokenizer.json or of its folder
    end_token            the tokenizer's token that ends a document; None: what the files beside it say
    text_field           key (JSON-lines) or column (Parquet) of the text
    validation_fraction  share of the documents that are held out, 0 <= share < 1
    encoding_errors      text that is not UTF-8: refused ('strict'), repaired with U+FFFD ('replace'), or
                         left out, the whole document ('skip')
    """

    files: Sequence[str]
    exclude: Sequence[str] = ()
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    tokenizer: str = "bytes"
    end_token: str | None = None
    text_field: str = "text"
    validation_fraction: float
    encoding_errors: EncodingErrors = "strict"

    def __post_init__(self) -> None:
        for key, value in (("files", self.files), ("exclude", self.exclude)):
            if isinstance(value, str):
                raise ValueError(f"data.{key}: {value!r} must be a list; write [{value!r}]")
        if not self.files:
            raise ValueError(f"data.files: [] names no file; give paths, globs or {PYTHON_STDLIB!r}")
        if self.format not in (formats := (AUTO, *get_args(Format))):
            raise ValueError(f"data.format: {self.format!r} {must_be_one_of(self.format, formats)}")
        if self.encoding_errors not in get_args(EncodingErrors):
            wanted = must_be_one_of(self.encoding_errors, get_args(EncodingErrors))
            raise ValueError(f"data.encoding_errors: {self.encoding_errors!r} {wanted}")
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(
                f"data.validation_fraction: {self.validation_fraction!r} must be at least 0 and less than 1"
            )


@dataclass(frozen=True)
class Source:
    """One input file as it was found."""

    path: str
    format: Format
    size_bytes: int
    modified_ns: int
    whole: bool = False
    """It can only be read from its beginning: one range."""


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


def find_sources(corpus: Corpus) -> tuple[Source, ...]:
    """The corpus's files, each once, sorted by absolute path. ValueError for an entry that finds nothing."""
    sources: dict[str, Source] = {}
    for entry in corpus.files:
        for file in _standard_library() if entry == PYTHON_STDLIB else find(entry):
            if not _excluded(file.path, corpus.exclude):
                kind: Format = "text" if entry == PYTHON_STDLIB else _format(file.path, corpus.format)
                sources[file.path] = Source(file.path, kind, file.size_bytes, file.modified_ns, file.whole)
    if not sources:
        raise ValueError(
            f"data.exclude: {list(corpus.exclude)!r} leaves no file of data.files; drop a pattern"
        )
    return tuple(sources[path] for path in sorted(sources))


def _standard_library() -> list[File]:
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
    name = os.path.basename(path)
    return any(fnmatch(path if "/" in pattern else name, pattern) for pattern in patterns)


def _format(path: str, wanted: Literal["auto", "text", "jsonl", "parquet"]) -> Format:
    ending, packed = endings(path)
    if wanted == AUTO and (remedy := _UNREADABLE.get(ending)):
        if ending == ".json" and (array := array_remedy(path)):
            raise ValueError(array)
        raise ValueError(f"data.files: {path!r} ends in {ending + packed!r}; {remedy}")
    kind = _FORMATS.get(ending, "text") if wanted == AUTO else wanted
    if kind == "parquet" and packed:
        raise ValueError(f"data.files: {path!r} is Parquet in {packed!r}; unpack it first")
    return kind


def array_remedy(path: str) -> str:
    """What to tell of a file that is one JSON array of objects; empty if it does not begin as one."""
    with opened(path) as file:
        if not _ARRAY.match(file.read(1 << 12).removeprefix(codecs.BOM_UTF8)):
            return ""
    remedy = as_lines("jq -c '.[]'", path)
    return f"data.files: {path!r} is one JSON array, not JSON lines; {remedy}"


def as_lines(command: str, path: str) -> str:
    """The remedy that a command makes JSON lines of a file."""
    packing = endings(path)[1]
    name = os.path.basename(path) if is_url(path) else path
    name = name[: len(name) - len(packing)]
    unpack = "unpack it, and " if packing else ""
    return f"{unpack}make lines of it: {command} < {quote(name)} > {quote(f'{name}.jsonl')}"


def cut(sources: Sequence[Source], text_field: str) -> tuple[WorkItem, ...]:
    """Cut sources into items of roughly equal size, in order; ValueError for Parquet that cannot be read."""
    total = sum(source.size_bytes for source in sources)
    target = min(max(total // _ITEMS, _SMALLEST_ITEM_BYTES), _LARGEST_ITEM_BYTES)
    items: list[WorkItem] = []
    pending: list[FileRange] = []
    size = 0
    for file_range in (part for source in sources for part in _ranges(source, target, text_field)):
        if pending and size + file_range.size_bytes > target:
            items.append(WorkItem(len(items), tuple(pending)))
            pending, size = [], 0
        pending.append(file_range)
        size += file_range.size_bytes
    if pending:
        items.append(WorkItem(len(items), tuple(pending)))
    return tuple(items)


def _ranges(source: Source, target: int, text_field: str) -> Iterator[FileRange]:
    match source.format:
        case "text":
            yield FileRange(source.path, "text", 0, source.size_bytes, source.size_bytes)
        case "jsonl" if source.whole:
            yield FileRange(source.path, "jsonl", 0, sys.maxsize, source.size_bytes)
        case "jsonl":
            for start in range(0, source.size_bytes, target):
                stop = min(start + target, source.size_bytes)
                yield FileRange(source.path, "jsonl", start, stop, stop - start)
        case "parquet":
            for start, stop, size in row_groups(source.path, target, text_field):
                yield FileRange(source.path, "parquet", start, stop, size)
        case _:
            assert_never(source.format)
