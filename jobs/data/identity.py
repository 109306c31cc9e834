"""Records what a data set was made from, and detects whether its files are still the same.

Files of the same path, size and time count as the same, without reading anything. Files that were copied or
touched are read and compared by content, which costs a small part of tokenising them; for files at URLs the
version that the server reports is trusted.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from braid.actors.config import Config, DataConfig
from braid.actors.config.paths import is_url
from braid.actors.stage.data.token_files import INDEX_VERSION, DataIndex
from braid.jobs.data.chat import ChatTemplate
from braid.jobs.data.corpus import MESSAGES, Source, WorkItem, cut, find_sources, unreadable
from braid.jobs.data.executors import Executor
from braid.jobs.data.hub import hub_items, hub_source
from braid.jobs.data.megatron import megatron_items
from braid.jobs.data.packing import RowPacking
from braid.jobs.data.tokenizer import Tokenizer, tokenizer_of

_PIECE_BYTES = 1 << 26
"""Bytes of each separately hashed piece of a file, and roughly of a hashing task; content hashes depend on
it."""


@dataclass(frozen=True)
class DataRequest:
    """A request for a data set: the corpus as it was found, and the tokenizer."""

    data: DataConfig
    sources: tuple[Source, ...]
    tokenizer: Tokenizer
    rows: RowPacking | None = None
    """The way in which documents become rows; None: the data set is a stream."""
    _contents: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Content hashes of the sources that were read, by path."""

    @classmethod
    def of(cls, config: Config) -> "DataRequest":
        data = config.data
        sources = find_sources(data) if data.hub is None else (hub_source(data.hub),)
        return replace(cls.without_files(config), sources=sources)

    @classmethod
    def without_files(cls, config: Config) -> "DataRequest":
        """Return the request for a configuration's data without looking for its files."""
        data, tokenizer, rows = config.data, tokenizer_of(config), None
        if config.row_tokens:
            template = ChatTemplate.of(data, tokenizer) if data.format == "chat" else None
            rows = RowPacking(config.row_tokens, template)
        return cls(data, (), tokenizer, rows)

    def items(self) -> tuple[WorkItem, ...]:
        """Cut the corpus into work; raise `ValueError` for data that cannot be read."""
        if self.data.hub is not None:
            return hub_items(self.data.hub, self.sources[0])
        if self.data.format == "megatron":
            return megatron_items(self.sources)
        chat = self.data.format == "chat"
        return cut(self.sources, MESSAGES if chat else self.data.text_field, chat=chat)

    @property
    def parameters(self) -> dict[str, Any]:
        """Settings on which tokens depend besides the files and the tokenizer."""
        names = ("text_field", "validation_fraction", "encoding_errors")
        told = {name: getattr(self.data, name) for name in names}
        if (hub := self.data.hub) is not None:
            told["hub"] = hub.model_dump(exclude={"id", "streaming"})
        if self.rows is not None:
            told["row_tokens"] = self.rows.tokens
            if (template := self.rows.template) is not None:
                told["chat_template"] = [template.source, *map(list, template.variables)]
        return told

    @property
    def digest(self) -> str:
        """Hash of paths, sizes, times, tokenizer and parameters; it is known without reading a file."""
        sources = [(s.path, s.format, s.size_bytes, s.modified_ns) for s in self.sources]
        content = [INDEX_VERSION, sources, self.tokenizer.fingerprint, self.parameters]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def facts(self) -> tuple[tuple[str, int, int], ...]:
        return tuple(source.facts for source in self.sources)

    def contents(self, executor: Executor) -> tuple[str, ...]:
        """Return the hash of every source's content and format, as a short text."""
        self._read(self.sources, executor)
        return tuple(self._contents[source.path] for source in self.sources)

    def suits(self, index: DataIndex) -> bool:
        """Return whether a data set has this tokenizer and these parameters, whatever its files are."""
        wanted = self.tokenizer.fingerprint, self.parameters
        return (index.tokenizer_fingerprint, index.parameters) == wanted

    def fits(self, index: DataIndex, executor: Executor) -> bool:
        """Return whether a data set was made from this request, or from copies of its files."""
        if index.request == self.digest:
            return True
        sizes = [size for _, size, _ in index.sources]
        if (
            not self.suits(index)
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
        """Return paths of sources that are new, gone, or of another size or time than when a data set was
        made."""
        known = set(index.sources)
        gone = {path for path, *_ in index.sources} - {source.path for source in self.sources}
        return [s.path for s in self.sources if s.facts not in known] + sorted(gone)

    def _read(self, sources: Sequence[Source], executor: Executor) -> None:
        new = {source.path: source for source in sources if source.path not in self._contents}
        digests = {  # versions of URLs, which need not be fetched twice
            path: f"{s.size_bytes}@{s.modified_ns}" for path, s in new.items() if is_url(path)
        }
        unread = [path for path in new if path not in digests]
        tasks = 1 + sum(new[path].size_bytes for path in unread) // _PIECE_BYTES
        for found in executor(_hashed, [paths for n in range(tasks) if (paths := unread[n::tasks])]):
            digests |= found
        self._contents.update({path: f"{s.format}:{digests[path]}" for path, s in new.items()})


def _hashed(paths: list[str]) -> dict[str, str]:
    """Return, by path, the hash of the hashes of a file's pieces; an empty file has one piece."""
    digests = {}
    for path in paths:
        pieces = list[bytes]()
        try:
            with open(path, "rb") as file:
                while (content := file.read(_PIECE_BYTES)) or not pieces:
                    pieces.append(hashlib.sha256(content).digest())
        except OSError as fault:
            raise unreadable(path, fault) from None
        digests[path] = hashlib.sha256(b"".join(pieces)).hexdigest()
    return digests
