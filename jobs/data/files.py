"""Files of a corpus: on this machine's file systems or at any fsspec URL, as they are or compressed."""

import bz2
import contextlib
import gzip
import hashlib
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from glob import glob, has_magic
from typing import Any, BinaryIO

from braid.actors.config.urls import file_system, is_url

KEY = "data.files"


def _zstd(file: BinaryIO) -> Any:
    import pyarrow as pa  # here: it takes a while to load

    return io.BufferedReader(pa.CompressedInputStream(file, "zstd"))


_DECOMPRESSED: Mapping[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": _zstd,
}
"""By ending. Several compressed streams one after the other are one file."""
_VERSIONS = (
    "etag",
    "last_modified",
    "lastmodified",
    "last-modified",
    "updated",
    "mtime",
    "created",
    "md5hash",
)
"""What object stores and web servers tell of a file's version, in one spelling or another."""


class MissingSourcesError(ValueError):
    """The corpus is not there: tokens that were made of it may be."""


@dataclass(frozen=True)
class File:
    """One file as it was found."""

    path: str
    """Absolute, or a URL."""
    size_bytes: int
    modified_ns: int
    """Of files at a URL: a number that changes with their version."""
    whole: bool
    """It is compressed, or its server sends no parts: it can only be read from its beginning."""


def endings(path: str) -> tuple[str, str]:
    """The name's ending before that of a compression, and the compression's: ``.jsonl`` and ``.gz``."""
    stem, ending = os.path.splitext(path.lower())
    return (os.path.splitext(stem)[1], ending) if ending in _DECOMPRESSED else (ending, "")


def find(entry: str) -> list[File]:
    """The files that a path, a glob or a URL names. `ValueError` if it finds none."""
    entry = _without_scheme(entry)
    if is_url(entry):
        return _find_url(entry)
    name = os.path.abspath(entry)
    if os.path.isdir(name):
        raise _is_folder(entry)
    if os.path.isfile(name):  # before globbing: a name may hold brackets
        return [local(name)]
    found = [path for path in glob(name, recursive=True) if os.path.isfile(path)]
    if not found:
        raise MissingSourcesError(
            f"{KEY}: {entry!r} finds no file (in {os.getcwd()}); correct the path or the glob"
        )
    return [local(path) for path in found]


def local(path: str) -> File:
    """A file of this machine's file systems."""
    status = os.stat(path)
    return File(path, status.st_size, status.st_mtime_ns, bool(endings(path)[1]))


def _without_scheme(entry: str) -> str:
    scheme = next((s for s in ("file://", "file:", "local://", "local:") if entry.startswith(s)), "")
    return entry.removeprefix(scheme)


def _is_folder(entry: str) -> ValueError:
    return ValueError(f"{KEY}: {entry!r} is a folder; write {entry.rstrip('/') + '/**/*.txt'!r} or alike")


def _find_url(entry: str) -> list[File]:
    files, place = file_system(KEY, entry)
    try:
        if has_magic(place):
            found = files.glob(place, detail=True)
        elif files.isfile(place):
            found = {place: files.info(place)}
        elif files.isdir(place):
            raise _is_folder(entry)
        else:
            found = {}
        return _described(entry, files, place, found)
    except ValueError:
        raise
    except Exception as fault:  # file systems raise what they like
        raise MissingSourcesError(
            f"{KEY}: {entry!r} cannot be looked up ({_reason(fault)}); correct the URL, or see to the access"
        ) from None


def _described(entry: str, files: Any, place: str, found: Mapping[str, Mapping[str, Any]]) -> list[File]:
    if "::" in entry and list(found) != [place]:
        raise ValueError(f"{KEY}: {entry!r} is a chain of file systems with a glob; name its files")
    described = []
    for path, facts in found.items():
        if facts.get("type", "file") == "file":
            if facts.get("size") is None:  # a listing of the web
                facts = files.info(path)
            url = entry if path == place else files.unstrip_protocol(path)
            whole = bool(endings(url)[1]) or (_is_web(files) and not facts.get("partial"))
            described.append(File(url, int(facts.get("size") or 0), _version(facts), whole))
    if not described:
        raise MissingSourcesError(f"{KEY}: {entry!r} finds no file; correct the URL or the glob")
    return described


def _is_web(files: Any) -> bool:
    """A file system whose servers may send whole files only, and of unknown size."""
    return "http" in files.protocol


def _version(facts: Mapping[str, Any]) -> int:
    told = sorted((key.lower(), str(value)) for key, value in facts.items() if key.lower() in _VERSIONS)
    return int.from_bytes(hashlib.sha256(repr(told).encode()).digest()[:7], "big")


@contextlib.contextmanager
def opened(path: str, *, parts: bool = False) -> Iterator[Any]:
    """The decompressed content of a file, to be read in the block; `ValueError` if that fails there.

    parts: not from the beginning to the end; not for files that are `File.whole`.
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
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as fault:
        raise unreadable(path, fault) from None
    except ValueError:
        raise
    except Exception as fault:
        if not is_url(path):
            raise
        raise unreadable(path, fault) from None


def unreadable(path: str, fault: Exception) -> ValueError:
    """What to tell of a file that is there and cannot be read."""
    return ValueError(f"{KEY}: cannot read {path!r} ({_reason(fault)}); repair or exclude it")


def _reason(fault: Exception) -> str:
    said = getattr(fault, "strerror", None) or str(fault) or type(fault).__name__
    return str(said).splitlines()[0]
