"""Finds the files of a corpus (section ``data`` of a configuration) and cuts them into work of equal size.

Files lie on this machine's file systems or at any fsspec URL, plain or compressed. There are four formats:
text (one document a file), JSON-lines (one object a line), Parquet (one row a document), and Megatron's pairs
of files with tokens (`megatron.py`); the last two are never compressed as a whole. Any fault of a user's
files raises a `ValueError` of one line that names the key, the value and a remedy.
"""

import bz2
import codecs
import contextlib
import gzip
import hashlib
import io
import lzma
import os
import re
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from glob import glob, has_magic
from pathlib import Path
from typing import Any, BinaryIO, Literal

from braid.actors.config import ConfigError, DataConfig
from braid.actors.config.paths import PYTHON_STDLIB, file_system, is_url
from braid.jobs.output import first_line, listed

KEY = "data.files"
MESSAGES = "messages"
"""Field that holds the messages of a conversation, in data of the format chat."""
NO_MESSAGES = (
    'data.format=chat takes objects such as {"messages": [{"role": "user", "content": "..."}, {"role": '
    '"assistant", "content": "..."}]}'
)
Format = Literal["text", "jsonl", "parquet", "megatron", "hub"]


def _zstd(file: BinaryIO) -> Any:
    import pyarrow as pa  # imported here, because it loads slowly

    return io.BufferedReader(pa.CompressedInputStream(file, "zstd"))


_DECOMPRESSED: Mapping[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": _zstd,
}
"""Decompressors by file ending. Several compressed streams in a row are one file."""
_FORMATS: dict[str, Format] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines"), "jsonl"),
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
}
_UNREADABLE = {
    ".json": "set data.format to jsonl if every line is an object, or to text",
    **dict.fromkeys((".lz4", ".zip", ".tar", ".tgz", ".tbz2", ".txz", ".7z"), "unpack it first"),
    **dict.fromkeys((".arrow", ".feather"), "save it as Parquet"),
}
_TEXTS = {"string", "large_string", "string_view", "binary", "large_binary", "null"}
"""Arrow types that hold text."""
_VERSIONS = (
    *("etag", "last_modified", "lastmodified", "last-modified"),
    *("updated", "mtime", "created", "md5hash"),
)
"""Names under which object stores and web servers report a file's version."""
_STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib"}
_ARRAY = re.compile(rb"\s*\[\s*\{")

# Work is cut by the size of the corpus alone, so that the output does not depend on the executor.
_ITEMS = 256
_SMALLEST_ITEM_BYTES = 1 << 20
_LARGEST_ITEM_BYTES = 1 << 28


class MissingSourcesError(ValueError):
    """The corpus cannot be found; tokens that were made of it may still exist."""


@dataclass(frozen=True)
class Source:
    """An input file of the corpus, as it was found."""

    path: str
    """Absolute path, or a URL."""
    size_bytes: int
    modified_ns: int
    """Modification time; for a file at a URL, a number that changes with the file's version."""
    whole: bool
    """Whether the file can only be read from its beginning: it is compressed, or its server sends no
    parts."""
    format: Format = "text"

    @property
    def facts(self) -> tuple[str, int, int]:
        """Path, size and modification time, by which a file is recognised."""
        return self.path, self.size_bytes, self.modified_ns


@dataclass(frozen=True)
class FileRange:
    """Part of a source: byte range of JSON-lines, row groups of Parquet, documents of Megatron's files, rows
    or files of a data set of the Hub; text is always whole."""

    path: str
    format: Format
    start: int
    stop: int
    size_bytes: int


@dataclass(frozen=True)
class WorkItem:
    """The input of one task; the output keeps the order of the numbers."""

    number: int
    ranges: tuple[FileRange, ...]


# Find the files.


def find_sources(data: DataConfig) -> tuple[Source, ...]:
    """Return the corpus's files, each once, sorted by path."""
    if not data.files:
        raise ValueError(f"{KEY}: [] names no file; give paths, globs or {PYTHON_STDLIB!r}")
    sources: dict[str, Source] = {}
    entries = data.files if data.format != "megatron" else [path for e in data.files for path in pair_of(e)]
    for entry in entries:
        for source in _standard_library() if entry == PYTHON_STDLIB else _find(entry):
            path = source.path
            # a pattern without a slash is compared with the file's name, else with the whole path
            names = {pattern: path if "/" in pattern else os.path.basename(path) for pattern in data.exclude}
            if not any(fnmatch(name, pattern) for pattern, name in names.items()):
                kind: Format = "text" if entry == PYTHON_STDLIB else _format(path, data.format)
                sources[path] = replace(source, format=kind)
    if not sources:
        raise ValueError(f"data.exclude: {list(data.exclude)!r} leaves no file of {KEY}; drop a pattern")
    return tuple(sources[path] for path in sorted(sources))


def pair_of(entry: str) -> tuple[str, str]:
    """Return the paths, or globs, of Megatron's pair of files for either path, or for what they share."""
    stem, ending = os.path.splitext(entry)
    stem = stem if ending in (".bin", ".idx") else entry
    return f"{stem}.bin", f"{stem}.idx"


def _standard_library() -> list[Source]:
    """Return the sources of the running Python's standard library, without its tests and files that are not
    UTF-8."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in root.rglob("*.py"):
        if not _STDLIB_LEFT_OUT & set(path.relative_to(root).parts):
            with contextlib.suppress(UnicodeDecodeError):
                path.read_bytes().decode()
                found.append(_local(str(path)))
    if not found:
        raise ValueError(f"{KEY}: {PYTHON_STDLIB!r} finds no *.py in {root}; give files of your own")
    return found


def _find(entry: str) -> list[Source]:
    """Return the files that a path, a glob or a URL names. Raise `ValueError` if there are none."""
    entry = re.sub("^(file|local):(//)?", "", entry)
    if is_url(entry):
        return _find_url(entry)
    name = os.path.abspath(entry)
    if os.path.isdir(name):
        raise _is_folder(entry)
    # try a file before a glob: its name may hold brackets
    paths = [name] if os.path.isfile(name) else filter(os.path.isfile, glob(name, recursive=True))
    if found := [_local(path) for path in paths]:
        return found
    here = os.getcwd()
    raise MissingSourcesError(f"{KEY}: {entry!r} finds no file (in {here}); correct the path or the glob")


def _local(path: str) -> Source:
    status = os.stat(path)
    return Source(path, status.st_size, status.st_mtime_ns, bool(endings(path)[1]))


def _is_folder(entry: str) -> ValueError:
    return ValueError(f"{KEY}: {entry!r} is a folder; write {entry.rstrip('/') + '/**/*.txt'!r} or alike")


def _find_url(entry: str) -> list[Source]:
    files, place = file_system(KEY, entry)
    try:
        found = files.glob(place, detail=True)
        for path, facts in found.items():
            if facts.get("type", "file") == "file" and facts.get("size") is None:  # a listing of the web
                found[path] = files.info(path)
    except Exception as fault:  # file systems raise what they like
        raise MissingSourcesError(
            f"{KEY}: {entry!r} cannot be looked up ({_reason(fault)}); correct the URL, or see to the access"
        ) from None
    if not has_magic(place) and any(facts.get("type") == "directory" for facts in found.values()):
        raise _is_folder(entry)
    if "::" in entry and list(found) not in ([], [place]):
        raise ValueError(f"{KEY}: {entry!r} is a chain of file systems with a glob; name its files")
    sources = []
    for path, facts in found.items():
        if facts.get("type", "file") == "file":
            url = entry if path == place else files.unstrip_protocol(path)
            whole = bool(endings(url)[1]) or (_is_web(files) and not facts.get("partial"))
            sources.append(Source(url, int(facts.get("size") or 0), _version(facts), whole))
    if not sources:
        raise MissingSourcesError(f"{KEY}: {entry!r} finds no file; correct the URL or the glob")
    return sources


def _is_web(files: Any) -> bool:
    """Return whether a file system's servers may send whole files only, and of unknown size."""
    return "http" in files.protocol


def _version(facts: Mapping[str, Any]) -> int:
    told = sorted((key.lower(), str(value)) for key, value in facts.items() if key.lower() in _VERSIONS)
    return int.from_bytes(hashlib.sha256(repr(told).encode()).digest()[:7], "big")


def endings(path: str) -> tuple[str, str]:
    """Return the file name's ending before that of a compression, and the compression's: ``.jsonl`` and
    ``.gz``."""
    stem, ending = os.path.splitext(path.lower())
    return (os.path.splitext(stem)[1], ending) if ending in _DECOMPRESSED else (ending, "")


def _format(path: str, wanted: str) -> Format:
    ending, packed = endings(path)
    if wanted == "chat":
        kind: Format = "parquet" if _FORMATS.get(ending) == "parquet" else "jsonl"
    elif wanted != "auto":
        kind = wanted  # type: ignore[assignment]
    elif remedy := _UNREADABLE.get(ending):
        if ending == ".json":
            refuse_array(path)
        raise ValueError(f"{KEY}: {path!r} ends in {ending + packed!r}; {remedy}")
    else:
        kind = _FORMATS.get(ending, "text")
    if kind == "parquet" and packed:
        raise ValueError(f"{KEY}: {path!r} ends in {packed!r}, no Parquet; unpack it, or mend data.format")
    if kind == "megatron" and is_url(path):
        raise ValueError(f"{KEY}: {path!r} is a URL, and Megatron's files are read in place; copy them here")
    return kind


# Read a file.


@contextlib.contextmanager
def opened(path: str, *, parts: bool = False) -> Iterator[Any]:
    """Open a file's decompressed content, to be read in the block; raise `ValueError` if reading fails there.

    ``parts``: the file is not read from beginning to end; not allowed for a `Source` that is ``whole``.
    """
    try:
        with contextlib.ExitStack() as stack:
            if is_url(path):
                files, place = file_system(KEY, path)
                stream = {"block_size": 0} if _is_web(files) and not parts else {}
                file = io.BufferedReader(stack.enter_context(files.open(place, "rb", **stream)))
            else:
                file = stack.enter_context(open(path, "rb"))
            if wrapped := _DECOMPRESSED.get(endings(path)[1]):
                file = stack.enter_context(wrapped(file))
            yield file
    except Exception as fault:  # file systems at URLs raise what they like
        of_file = isinstance(fault, OSError | EOFError | zlib.error | lzma.LZMAError)
        if of_file or (is_url(path) and not isinstance(fault, ValueError)):
            raise unreadable(path, fault) from None
        raise


def unreadable(path: str, fault: Exception) -> ValueError:
    """Make the error for an existing file that cannot be read."""
    return ValueError(f"{KEY}: cannot read {path!r} ({_reason(fault)}); repair or exclude it")


def _reason(fault: Exception) -> str:
    return getattr(fault, "strerror", None) or first_line(fault)


def refuse_array(path: str) -> None:
    """Raise `ValueError` for a file that begins as one JSON array of objects."""
    with opened(path) as file:
        begin = file.read(1 << 12)
    if _ARRAY.match(begin.removeprefix(codecs.BOM_UTF8)):
        raise ValueError(
            f"{KEY}: {path!r} is one JSON array, not JSON lines; make lines of it with: jq -c '.[]'"
        )


def open_parquet(path: str, field: str, *, chat: bool = False) -> Any:
    """Open a `pyarrow.parquet.ParquetFile`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # a small buffer streams a column chunk instead of reading it whole
        files, place = file_system(KEY, path) if is_url(path) else (None, path)
        file = pq.ParquetFile(place, filesystem=files, buffer_size=1 << 20, pre_buffer=False)
    except ConfigError:
        raise
    except (OSError, pa.ArrowException) as fault:
        raise broken_parquet(path, fault) from None
    schema = file.schema_arrow
    if chat:
        if field not in schema.names or not pa.types.is_list(schema.field(field).type):
            raise ValueError(f"{KEY}: {path!r} has no column {field!r} of lists; {NO_MESSAGES}")
        return file
    if field not in schema.names:
        raise ValueError(f"data.text_field: {field!r} is not in {path!r}, {choices(schema.names)}")
    kind = schema.field(field).type
    if str(kind.value_type if pa.types.is_dictionary(kind) else kind) not in _TEXTS:
        raise ValueError(f"data.text_field: {field!r} has type {kind} in {path!r}; name a column of text")
    return file


def broken_parquet(path: str, fault: Exception) -> ValueError:
    return ValueError(f"{KEY}: {path!r} is not readable Parquet ({_reason(fault)}); repair or exclude it")


def choices(names: list[str]) -> str:
    """Return the end of a message about a missing field: the fields that exist, or a remedy."""
    if not names:
        return "which has no field at all; exclude the file"
    remedy = "set data.format to chat, or " if MESSAGES in names else "set "
    return f"which has {listed([*map(repr, names)])}; {remedy}data.text_field to the one that holds the text"


# Cut into work items.


def cut(sources: Sequence[Source], text_field: str, *, chat: bool = False) -> tuple[WorkItem, ...]:
    """Cut sources into items of roughly equal size, in order; raise `ValueError` for unreadable Parquet.

    ``text_field``, ``chat``: see `open_parquet`.
    """
    target = item_bytes(sources)
    items: list[list[FileRange]] = []
    size = 0
    for part in (part for source in sources for part in _ranges(source, target, text_field, chat)):
        if not items or size + part.size_bytes > target:
            items.append([])
            size = 0
        items[-1].append(part)
        size += part.size_bytes
    return tuple(WorkItem(number, tuple(ranges)) for number, ranges in enumerate(items))


def item_bytes(sources: Sequence[Source]) -> int:
    """Return the size of a work item, about which the corpus alone decides."""
    total = sum(source.size_bytes for source in sources)
    return min(max(total // _ITEMS, _SMALLEST_ITEM_BYTES), _LARGEST_ITEM_BYTES)


def _ranges(source: Source, target: int, text_field: str, chat: bool) -> Iterator[FileRange]:
    path, kind, size = source.path, source.format, source.size_bytes
    match kind:
        case "text" | "jsonl" if kind == "text" or source.whole:
            yield FileRange(path, kind, 0, sys.maxsize, size)
        case "text" | "jsonl":
            for start in range(0, size, target):
                stop = min(start + target, size)
                yield FileRange(path, kind, start, stop, stop - start)
        case "parquet":
            start = size = 0
            with open_parquet(path, text_field, chat=chat) as file:
                for group in range(file.num_row_groups):
                    size += file.metadata.row_group(group).total_byte_size
                    if size >= target or group == file.num_row_groups - 1:
                        yield FileRange(path, kind, start, group + 1, size)
                        start, size = group + 1, 0
        case _:
            raise AssertionError(f"{kind} has a module of its own, which cuts it")
