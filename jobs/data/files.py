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
from typing import Any, BinaryIO, Literal

from braid.actors.config.urls import file_system, is_url

KEY = "data.files"
Format = Literal["text", "jsonl", "parquet"]


def _zstd(file: BinaryIO) -> Any:
    import pyarrow as pa  # here: it takes a while to load

    return io.BufferedReader(pa.CompressedInputStream(file, "zstd"))


_DECOMPRESSED: Mapping[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": _zstd,
}
"""By ending. Several compressed streams in a row are one file."""
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
"""Names under which object stores and web servers tell a file's version."""


class MissingSourcesError(ValueError):
    """The corpus is not there; tokens that were made of it may be."""


@dataclass(frozen=True)
class Source:
    """One input file as it was found."""

    path: str
    """Absolute, or a URL."""
    size_bytes: int
    modified_ns: int
    """Of a file at a URL: a number that changes with the file's version."""
    whole: bool
    """The file can only be read from its beginning: it is compressed, or its server sends no parts."""
    format: Format = "text"

    @property
    def facts(self) -> tuple[str, int, int]:
        """Path, size and time."""
        return self.path, self.size_bytes, self.modified_ns


def endings(path: str) -> tuple[str, str]:
    """The name's ending before that of a compression, and the compression's: ``.jsonl`` and ``.gz``."""
    stem, ending = os.path.splitext(path.lower())
    return (os.path.splitext(stem)[1], ending) if ending in _DECOMPRESSED else (ending, "")


def find(entry: str) -> list[Source]:
    """The files that a path, a glob or a URL names. `ValueError` if there are none."""
    scheme = next((s for s in ("file://", "file:", "local://", "local:") if entry.startswith(s)), "")
    entry = entry.removeprefix(scheme)
    if is_url(entry):
        return _find_url(entry)
    name = os.path.abspath(entry)
    if os.path.isdir(name):
        raise _is_folder(entry)
    # a file before a glob: its name may hold brackets
    paths = [name] if os.path.isfile(name) else filter(os.path.isfile, glob(name, recursive=True))
    found = [local(path) for path in paths]
    if not found:
        raise MissingSourcesError(
            f"{KEY}: {entry!r} finds no file (in {os.getcwd()}); correct the path or the glob"
        )
    return found


def local(path: str) -> Source:
    status = os.stat(path)
    return Source(path, status.st_size, status.st_mtime_ns, bool(endings(path)[1]))


def _is_folder(entry: str) -> ValueError:
    return ValueError(f"{KEY}: {entry!r} is a folder; write {entry.rstrip('/') + '/**/*.txt'!r} or alike")


def _find_url(entry: str) -> list[Source]:
    files, place = file_system(KEY, entry)
    sources = []
    try:
        found = files.glob(place, detail=True)
        if not has_magic(place) and any(facts.get("type") == "directory" for facts in found.values()):
            raise _is_folder(entry)
        if "::" in entry and list(found) not in ([], [place]):
            raise ValueError(f"{KEY}: {entry!r} is a chain of file systems with a glob; name its files")
        for path, facts in found.items():
            if facts.get("type", "file") == "file":
                if facts.get("size") is None:  # a listing of the web
                    facts = files.info(path)
                url = entry if path == place else files.unstrip_protocol(path)
                whole = bool(endings(url)[1]) or (_is_web(files) and not facts.get("partial"))
                sources.append(Source(url, int(facts.get("size") or 0), _version(facts), whole))
    except ValueError:
        raise
    except Exception as fault:  # file systems raise what they like
        raise MissingSourcesError(
            f"{KEY}: {entry!r} cannot be looked up ({_reason(fault)}); correct the URL, or see to the access"
        ) from None
    if not sources:
        raise MissingSourcesError(f"{KEY}: {entry!r} finds no file; correct the URL or the glob")
    return sources


def _is_web(files: Any) -> bool:
    """A file system whose servers may send whole files only, and of unknown size."""
    return "http" in files.protocol


def _version(facts: Mapping[str, Any]) -> int:
    told = sorted((key.lower(), str(value)) for key, value in facts.items() if key.lower() in _VERSIONS)
    return int.from_bytes(hashlib.sha256(repr(told).encode()).digest()[:7], "big")


@contextlib.contextmanager
def opened(path: str, *, parts: bool = False) -> Iterator[Any]:
    """The decompressed content of a file, to be read in the block; `ValueError` if reading fails there.

    parts: the file is not read from its beginning to its end; not for a `Source` that is ``whole``.
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
    except Exception as fault:
        if isinstance(fault, ValueError) or not is_url(path):
            raise
        raise unreadable(path, fault) from None


def unreadable(path: str, fault: Exception) -> ValueError:
    """What to tell of a file that is there and cannot be read."""
    return ValueError(f"{KEY}: cannot read {path!r} ({_reason(fault)}); repair or exclude it")


def _reason(fault: Exception) -> str:
    said = getattr(fault, "strerror", None) or str(fault) or type(fault).__name__
    return str(said).splitlines()[0]
