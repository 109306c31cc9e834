"""A corpus: which files it has, how they are cut into work of equal size, and the documents in them.

Three formats: text (one document a file), JSON-lines (one object a line) and Parquet (one row a document);
the first two also compressed. Files are paths, globs or URLs (`braid.jobs.data.files`).
Whatever is wrong with a user's files is a ValueError of one line that names the key, the value and a remedy.
"""

import codecs
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final, Literal, assert_never, get_args

from braid.actors.config import ConfigError
from braid.actors.config.paths import PYTHON_STDLIB
from braid.actors.config.urls import file_system, is_url
from braid.jobs.data.files import File, endings, find, local, opened
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
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")

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
    tokenizer            'bytes' or the path of a Hugging Face tokenizer.json
    text_field           key (JSON-lines) or column (Parquet) of the text
    validation_fraction  share of the documents that are held out, 0 <= share < 1
    encoding_errors      text that is not UTF-8: refused ('strict'), repaired with U+FFFD ('replace'), or
                         left out, the whole document ('skip')
    """

    files: Sequence[str]
    exclude: Sequence[str] = ()
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    tokenizer: str = "bytes"
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
        raise ValueError(f"data.files: {path!r} ends in {ending + packed!r}; {remedy}")
    kind = _FORMATS.get(ending, "text") if wanted == AUTO else wanted
    if kind == "parquet" and packed:
        raise ValueError(f"data.files: {path!r} is Parquet in {packed!r}; unpack it first")
    return kind


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
            yield from _row_group_ranges(source.path, target, text_field)
        case _:
            assert_never(source.format)


def read_documents(part: FileRange, text_field: str, encoding_errors: EncodingErrors) -> Iterator[str | None]:
    """The documents of one range in order; None for one left out because it is not UTF-8.

    A document may be empty. Raises ValueError naming the file and the place in it.
    """
    match part.format:
        case "text":
            yield _read_text(part.path, encoding_errors)
        case "jsonl":
            yield from _read_lines(part, text_field, encoding_errors)
        case "parquet":
            yield from _read_rows(part, text_field, encoding_errors)
        case _:
            assert_never(part.format)


def _read_text(path: str, encoding_errors: EncodingErrors) -> str | None:
    with opened(path) as file:
        content = file.read()
    text = _decode(content, encoding_errors, path, 0)
    return text and text.removeprefix("\ufeff")  # a byte order mark is no text


def _decode(content: bytes, encoding_errors: EncodingErrors, place: str, offset: int) -> str | None:
    try:
        return content.decode()
    except UnicodeDecodeError as fault:
        match encoding_errors:
            case "strict":
                raise ValueError(
                    f"data.files: {place} is not UTF-8 at byte {offset + fault.start} "
                    f"(0x{content[fault.start]:02x}); convert it, or set data.encoding_errors to replace or "
                    "skip"
                ) from None
            case "replace":
                return content.decode(errors="replace")
            case "skip":
                return None
            case _:
                assert_never(encoding_errors)


def _read_lines(part: FileRange, text_field: str, encoding_errors: EncodingErrors) -> Iterator[str | None]:
    """Documents of the lines that begin in [start, stop): every line belongs to exactly one range."""
    with opened(part.path, parts=part.stop < sys.maxsize) as file:
        offset = 0
        if part.start:
            file.seek(part.start - 1)
            offset = part.start - 1 + len(file.readline())
        while offset < part.stop and (line := file.readline()):
            text = line if offset else line.removeprefix(codecs.BOM_UTF8)
            if not text.isspace():
                yield _read_line(text, part.path, offset, text_field, encoding_errors)
            offset += len(line)


def _read_line(
    line: bytes, path: str, offset: int, text_field: str, encoding_errors: EncodingErrors
) -> str | None:
    text = _decode(line, encoding_errors, path, offset)
    if text is None:
        return None
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as fault:
        # the fault's own line number is always 1
        reason = f"{fault.msg}, column {fault.colno}" if isinstance(fault, json.JSONDecodeError) else fault
        raise ValueError(
            f"data.files: {_line(path, offset)} is not JSON ({reason}); repair or delete the line"
        ) from None
    if not isinstance(entry, dict):
        raise ValueError(
            f"data.files: {_line(path, offset)} holds {_kind(entry)}, not an object; "
            f'write {{"{text_field}": "..."}}, or set data.format to text'
        )
    if text_field not in entry:
        raise ValueError(
            f"data.text_field: {text_field!r} is not in {_line(path, offset)}, {_choices(list(entry))}"
        )
    document = entry[text_field]
    if document is None:
        return ""
    if not isinstance(document, str):
        raise ValueError(
            f"data.text_field: {text_field!r} is {_kind(document)} in {_line(path, offset)}; "
            "name a field of text"
        )
    return _without_surrogates(document, encoding_errors, path, offset)


def _without_surrogates(document: str, encoding_errors: EncodingErrors, path: str, offset: int) -> str | None:
    r"""JSON can spell what UTF-8 cannot: half of a surrogate pair, as in "\ud83d"."""
    if document.isascii() or not _LONE_SURROGATE.search(document):
        return document
    match encoding_errors:
        case "strict":
            raise ValueError(
                f"data.files: {_line(path, offset)} has half a surrogate pair (\\ud800 ... \\udfff), which "
                "is not UTF-8; repair the line, or set data.encoding_errors to replace or skip"
            )
        case "replace":
            return _LONE_SURROGATE.sub("\ufffd", document)
        case "skip":
            return None
        case _:
            assert_never(encoding_errors)


def _line(path: str, offset: int) -> str:
    """ "PATH:LINE" of the byte at ``offset``: lines are counted only when somebody is told of one."""
    lines = 1
    with opened(path) as file:
        while offset > 0 and (content := file.read(min(offset, 1 << 20))):
            lines += content.count(b"\n")
            offset -= len(content)
    return f"{path}:{lines}"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _choices(names: list[str]) -> str:
    if not names:
        return "which has no field at all; exclude the file"
    listed = ", ".join(repr(name) for name in names[:12]) + (", ..." if len(names) > 12 else "")
    return f"which has {listed}; set data.text_field to the one that holds the text"


# Parquet. pyarrow is imported where it is used: text needs none of it, and it takes a while to load.


def _open_parquet(path: str, text_field: str) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # a small buffer streams a column chunk instead of reading it whole
        files, place = file_system("data.files", path) if is_url(path) else (None, path)
        file = pq.ParquetFile(place, filesystem=files, buffer_size=1 << 20, pre_buffer=False)
    except ConfigError:
        raise
    except (OSError, pa.ArrowException) as fault:
        raise _broken_parquet(path, fault) from None
    schema = file.schema_arrow
    if text_field not in schema.names:
        raise ValueError(f"data.text_field: {text_field!r} is not in {path!r}, {_choices(schema.names)}")
    kind = schema.field(text_field).type
    text = kind.value_type if pa.types.is_dictionary(kind) else kind
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    if not any(
        check(text) for check in (*checks, pa.types.is_binary, pa.types.is_large_binary, pa.types.is_null)
    ):
        raise ValueError(
            f"data.text_field: {text_field!r} has type {kind} in {path!r}; name a column of text"
        )
    return file


def _broken_parquet(path: str, fault: Exception) -> ValueError:
    reason = str(fault).splitlines()[0] if str(fault) else type(fault).__name__
    return ValueError(f"data.files: {path!r} is not readable Parquet ({reason}); repair or exclude it")


def _row_group_ranges(path: str, target: int, text_field: str) -> Iterator[FileRange]:
    with _open_parquet(path, text_field) as file:
        groups, metadata = file.num_row_groups, file.metadata
        start, size = 0, 0
        for group in range(groups):
            size += metadata.row_group(group).total_byte_size
            if size >= target or group == groups - 1:
                yield FileRange(path, "parquet", start, group + 1, size)
                start, size = group + 1, 0


def _read_rows(part: FileRange, text_field: str, encoding_errors: EncodingErrors) -> Iterator[str | None]:
    import pyarrow as pa

    with _open_parquet(part.path, text_field) as file:
        row = sum(file.metadata.row_group(group).num_rows for group in range(part.start))
        batches = file.iter_batches(
            batch_size=256, row_groups=range(part.start, part.stop), columns=[text_field], use_threads=False
        )
        try:
            for batch in batches:
                # as bytes: Parquet does not check that its strings are UTF-8
                for content in batch.column(0).cast(pa.large_binary()):
                    place = f"row {row} of {part.path!r}"
                    yield _decode(content.as_py() or b"", encoding_errors, place, 0)
                    row += 1
        except (OSError, pa.ArrowException) as fault:
            raise _broken_parquet(part.path, fault) from None
