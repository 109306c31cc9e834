"""Reads the documents of a corpus's files, range by range: text, JSON-lines, Parquet; and conversations.

Any fault of a user's files raises a `ValueError` of one line that names the key, the value and a remedy.
"""

import codecs
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from braid.actors.config import DataConfig
from braid.jobs.data.chat import Conversation
from braid.jobs.data.corpus import (
    KEY,
    MESSAGES,
    NO_MESSAGES,
    FileRange,
    broken_parquet,
    choices,
    open_parquet,
    opened,
    refuse_array,
)
from braid.jobs.data.hub import hub_documents

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
# JSON can express characters that UTF-8 cannot
_HALF = r"half a surrogate pair (\ud800 ... \udfff), which is not UTF-8; repair the line"
TOOLS = "tools"
"""Field of an object that holds the tools of a conversation."""
_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}


def read_documents(part: FileRange, data: DataConfig) -> Iterator[str | None]:
    """Yield the documents of one range in order; None for a document that is left out because it is not
    UTF-8.

    A document may be empty. Raise `ValueError`, which names the file and the place in it, for bad content.
    """
    match part.format:
        case "text":
            with opened(part.path) as file:
                text = _decoded(file.read(), data, part.path, 0)
            if text and "\r" in text and "\n" not in text:  # lines as old Macs ended them
                text = text.replace("\r", "\n")
            yield text and text.removeprefix("\ufeff")  # a byte order mark is not text
        case "jsonl":
            for line, offset in _lines(part, data):
                yield None if line is None else _text_of_line(line, part.path, offset, data)
        case "parquet":
            for row, values in _rows(part, data.text_field):
                yield _decoded(values[data.text_field].as_py() or b"", data, row, 0)
        case "hub":
            yield from hub_documents(part, data)
        case "megatron":
            raise AssertionError("its documents are tokens already")


def read_conversations(part: FileRange, data: DataConfig) -> Iterator[Conversation | None]:
    """Yield the conversations of one range in order; None for a conversation that is left out because it is
    not UTF-8."""
    if part.format == "parquet":
        for row, values in _rows(part, MESSAGES, TOOLS, chat=True):
            try:
                content = {name: value.as_py() for name, value in values.items()}
            except UnicodeDecodeError:
                raise ValueError(f"{KEY}: {part.path!r} has text that is not UTF-8; convert it") from None
            yield _conversation(content, row.__str__)
        return
    for line, offset in _lines(part, data):
        place = partial(_line, part.path, offset)
        entry = None if line is None else _entry_of_line(line, part.path, offset, NO_MESSAGES)
        if entry is not None and "\\u" in (line or ""):
            entry = _without_surrogates(entry, place, data)
        yield None if entry is None else _conversation(entry, place)


def _conversation(entry: Mapping[str, Any], place: Callable[[], str]) -> Conversation:
    """Return the conversation of a JSON object; raise `ValueError` if there is none."""
    messages, tools = entry.get(MESSAGES), entry.get(TOOLS)
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{KEY}: {place()} has no list {MESSAGES!r}; {NO_MESSAGES}")
    kept = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"{KEY}: {place()}: message {number} is {_kind(message)}; {NO_MESSAGES}")
        told = {key: value for key, value in message.items() if value is not None}
        if not isinstance(told.get("role"), str) or not ("content" in told or "tool_calls" in told):
            raise ValueError(
                f"{KEY}: {place()}: message {number} has {', '.join(map(repr, told)) or 'nothing'}, and "
                f"needs 'role' and 'content'; {NO_MESSAGES}"
            )
        kept.append(told)
    return Conversation(kept, tools or None, place)


def _without_surrogates(value: Any, place: Callable[[], str], data: DataConfig) -> Any:
    """Return a JSON value without characters that UTF-8 cannot express; None if it is to be left out."""
    text = json.dumps(value, ensure_ascii=False)
    if not _LONE_SURROGATE.search(text):
        return value
    _refuse_if_strict(data, f"{place()} has {_HALF}")
    return json.loads(_LONE_SURROGATE.sub("\ufffd", text)) if data.encoding_errors == "replace" else None


def _decoded(content: bytes, data: DataConfig, place: str, offset: int) -> str | None:
    try:
        return content.decode()
    except UnicodeDecodeError as fault:
        byte = f"byte {offset + fault.start} (0x{content[fault.start]:02x})"
        _refuse_if_strict(data, f"{place} is not UTF-8 at {byte}; convert it")
        return content.decode(errors="replace") if data.encoding_errors == "replace" else None


def _refuse_if_strict(data: DataConfig, told: str) -> None:
    if data.encoding_errors == "strict":
        raise ValueError(f"{KEY}: {told}, or set data.encoding_errors to replace or skip") from None


def _lines(part: FileRange, data: DataConfig) -> Iterator[tuple[str | None, int]]:
    """Yield the lines that begin in [start, stop), with the number of their first byte: every line belongs to
    exactly one range. None: the line is left out because it is not UTF-8."""
    with opened(part.path, parts=part.stop < sys.maxsize) as file:
        offset = 0
        if part.start:
            file.seek(part.start - 1)
            offset = part.start - 1 + len(file.readline())
        while offset < part.stop and (line := file.readline()):
            content = line if offset else line.removeprefix(codecs.BOM_UTF8)
            if not content.isspace():
                yield _decoded(content, data, part.path, offset), offset
            offset += len(line)


def _entry_of_line(line: str, path: str, offset: int, remedy: str) -> dict[str, Any]:
    """Return the JSON object of a line. ``remedy``: what to write instead of another value."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as fault:
        refuse_array(path)
        if "\r" in line.strip():
            raise ValueError(
                f"{KEY}: {path!r} has lines that end in a carriage return alone; make lines of it with: "
                r"tr '\r' '\n'"
            ) from None
        # the fault's own line number is always 1
        reason = f"{fault.msg}, column {fault.colno}" if isinstance(fault, json.JSONDecodeError) else fault
        raise ValueError(
            f"{KEY}: {_line(path, offset)} is not JSON ({reason}); repair or delete the line"
        ) from None
    if not isinstance(entry, dict):
        refuse_array(path)
        raise ValueError(f"{KEY}: {_line(path, offset)} holds {_kind(entry)}, not an object; {remedy}")
    return entry


def _text_of_line(line: str, path: str, offset: int, data: DataConfig) -> str | None:
    field = data.text_field
    entry = _entry_of_line(line, path, offset, f'write {{"{field}": "..."}}, or set data.format to text')
    if field not in entry:
        raise ValueError(
            f"data.text_field: {field!r} is not in {_line(path, offset)}, {choices(list(entry))}"
        )
    document = entry[field]
    if document is None:
        return ""
    if not isinstance(document, str):
        raise ValueError(
            f"data.text_field: {field!r} is {_kind(document)} in {_line(path, offset)}; name a field of text"
        )
    if document.isascii() or not _LONE_SURROGATE.search(document):
        return document
    _refuse_if_strict(data, f"{_line(path, offset)} has {_HALF}")
    return _LONE_SURROGATE.sub("\ufffd", document) if data.encoding_errors == "replace" else None


def _line(path: str, offset: int) -> str:
    """Return "PATH:LINE" of the byte at ``offset``; lines are counted only when a message needs it."""
    lines = 1
    with opened(path) as file:
        while offset > 0 and (content := file.read(min(offset, 1 << 20))):
            lines += content.count(b"\n")
            offset -= len(content)
    return f"{path}:{lines}"


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "a number")


def _rows(part: FileRange, *columns: str, chat: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a range: each row's name for messages, and its values as scalars, by column. Columns
    that are not there are left out, but for the first one (`open_parquet`)."""
    import pyarrow as pa

    groups = range(part.start, part.stop)
    with open_parquet(part.path, columns[0], chat=chat) as file:
        row = sum(file.metadata.row_group(group).num_rows for group in range(part.start))
        names = [name for name in columns if name in file.schema_arrow.names]
        batches = file.iter_batches(batch_size=256, row_groups=groups, columns=names, use_threads=False)
        try:
            for batch in batches:
                # texts are read as bytes: Parquet does not check that its strings are UTF-8
                arrays = [batch.column(name) for name in names]
                arrays = arrays if chat else [arrays[0].cast(pa.large_binary())]
                for values in zip(*arrays, strict=True):
                    yield f"row {row} of {part.path!r}", dict(zip(names, values, strict=True))
                    row += 1
        except (OSError, pa.ArrowException) as fault:
            raise broken_parquet(part.path, fault) from None
