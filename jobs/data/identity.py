"""What a data set was made from, and whether something else is still the same.

The same are, without reading anything, files of the same path, size and time. Those that were copied or
touched are read and compared by their content, which costs a small part of tokenising them; but of files at
URLs what the server tells of their version is believed.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from braid.actors.config import Config, DataConfig
from braid.actors.config.urls import is_url
from braid.actors.stage.data.token_files import INDEX_VERSION, DataIndex
from braid.jobs.data.corpus import find_sources
from braid.jobs.data.executors import Executor
from braid.jobs.data.files import Source, unreadable
from braid.jobs.data.tokenizer import Tokenizer, tokenizer_of

_PIECE_BYTES = 1 << 26
"""Of a file, hashed by one task; the identity of a content depends on it."""


@dataclass(frozen=True)
class DataRequest:
    """A corpus as it was found."""

    data: DataConfig
    sources: tuple[Source, ...]
    tokenizer: Tokenizer
    _contents: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    """What the sources that were read hold, by path."""

    @classmethod
    def of(cls, config: Config) -> "DataRequest":
        return cls(config.data, find_sources(config.data), tokenizer_of(config))

    @property
    def digest(self) -> str:
        """Identity of paths, sizes, times, tokenizer and parameters: known without reading a file."""
        sources = [(s.path, s.format, s.size_bytes, s.modified_ns) for s in self.sources]
        content = [INDEX_VERSION, sources, self.tokenizer.fingerprint, parameters_of(self.data)]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def facts(self) -> tuple[tuple[str, int, int], ...]:
        return tuple(source.facts for source in self.sources)

    def contents(self, executor: Executor) -> tuple[str, ...]:
        """What every source holds, as a short text; its format belongs to it."""
        self._read(self.sources, executor)
        return tuple(self._contents[source.path] for source in self.sources)

    def fits(self, index: DataIndex, executor: Executor) -> bool:
        """Whether a data set was made from this request, or from copies of its files."""
        if index.request == self.digest:
            return True
        sizes = [size for _, size, _ in index.sources]
        if (
            not made_with(index, self.tokenizer, self.data)
            or len(index.contents) != len(sizes)
            or [source.size_bytes for source in self.sources] != sizes
        ):
            return False
        moved = [s for s, facts in zip(self.sources, index.sources, strict=True) if s.facts != facts]
        self._read(moved, executor)
        return all(
            self._contents.get(source.path, known) == known and known.startswith(f"{source.format}:")
            for source, known in zip(self.sources, index.contents, strict=True)
        )

    def changed(self, index: DataIndex) -> list[str]:
        """Paths of sources that are new, gone, or of another size or time than when a data set was made."""
        known = set(index.sources)
        gone = {path for path, *_ in index.sources} - {source.path for source in self.sources}
        return [s.path for s in self.sources if s.facts not in known] + sorted(gone)

    def _read(self, sources: Sequence[Source], executor: Executor) -> None:
        new = [source for source in sources if source.path not in self._contents]
        for source in new:
            if is_url(source.path):  # not to be fetched twice
                self._contents[source.path] = f"{source.format}:{source.size_bytes}@{source.modified_ns}"
        unread = [source for source in new if not is_url(source.path)]
        digests: dict[tuple[str, int], bytes] = {}
        for found in executor(_hash_pieces, list(_batches(unread))):
            digests.update(found)
        for source in unread:
            whole = b"".join(digests[source.path, start] for start in _starts(source))
            self._contents[source.path] = f"{source.format}:{hashlib.sha256(whole).hexdigest()}"


def parameters_of(data: DataConfig) -> dict[str, Any]:
    """What tokens depend on besides the files and the tokenizer."""
    return {name: getattr(data, name) for name in ("text_field", "validation_fraction", "encoding_errors")}


def made_with(index: DataIndex, tokenizer: Tokenizer, data: DataConfig) -> bool:
    """Whether a data set has this tokenizer and these parameters, of whatever files it is."""
    return index.tokenizer_fingerprint == tokenizer.fingerprint and index.parameters == parameters_of(data)


def _starts(source: Source) -> range:
    return range(0, max(source.size_bytes, 1), _PIECE_BYTES)


def _batches(sources: Sequence[Source]) -> Iterator[list[tuple[str, int]]]:
    """Pieces of files for one task each: many of small files."""
    batch: list[tuple[str, int]] = []
    size = 0
    for source in sources:
        for start in _starts(source):
            batch.append((source.path, start))
            size += min(_PIECE_BYTES, source.size_bytes - start)
            if size >= _PIECE_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _hash_pieces(pieces: list[tuple[str, int]]) -> dict[tuple[str, int], bytes]:
    digests = {}
    for path, start in pieces:
        digest, left = hashlib.sha256(), _PIECE_BYTES
        try:
            with open(path, "rb") as file:
                os.lseek(file.fileno(), start, os.SEEK_SET)
                while left and (content := file.read(min(left, 1 << 20))):
                    digest.update(content)
                    left -= len(content)
        except OSError as fault:
            raise unreadable(path, fault) from None
        digests[path, start] = digest.digest()
    return digests
