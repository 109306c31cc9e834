"""Tells what a data set was made from: files of the same path, size and time count as the same."""

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

from braid.actors.config import Config, DataConfig
from braid.actors.stage.data.token_files import INDEX_VERSION, DataIndex
from braid.jobs.data.chat import ChatTemplate
from braid.jobs.data.corpus import MESSAGES, Source, WorkItem, cut, find_sources
from braid.jobs.data.hub import hub_items, hub_source
from braid.jobs.data.megatron import megatron_items
from braid.jobs.data.tokenizer import Tokenizer, tokenizer_of


@dataclass(frozen=True)
class DataRequest:
    """A request for a data set: the corpus as it was found, and how it becomes tokens."""

    data: DataConfig
    tokenizer: Tokenizer
    row_tokens: int
    """Tokens of the rows that documents are packed into; 0: the data set is a stream."""
    template: ChatTemplate | None
    """The template of conversations; None: documents are texts."""
    sources: tuple[Source, ...] = ()

    @classmethod
    def of(cls, config: Config) -> "DataRequest":
        data = config.data
        sources = find_sources(data) if data.hub is None else (hub_source(data.hub),)
        return replace(cls.without_files(config), sources=sources)

    @classmethod
    def without_files(cls, config: Config) -> "DataRequest":
        """Return the request for a configuration's data without looking for its files."""
        data, tokenizer = config.data, tokenizer_of(config)
        template = ChatTemplate.of(data, tokenizer) if data.format == "chat" else None
        return cls(data, tokenizer, config.row_tokens, template)

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
        if self.row_tokens:
            told["row_tokens"] = self.row_tokens
        if self.template is not None:
            told["chat_template"] = [self.template.source, *map(list, self.template.variables)]
        return told

    @property
    def digest(self) -> str:
        """Hash of paths, sizes, times, tokenizer and parameters; it is known without reading a file."""
        sources = [(s.path, s.format, s.size_bytes, s.modified_ns) for s in self.sources]
        content = [INDEX_VERSION, sources, self.tokenizer.fingerprint, self.parameters]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def suits(self, index: DataIndex) -> bool:
        """Return whether a data set has this tokenizer and these parameters, whatever its files are."""
        wanted = self.tokenizer.fingerprint, self.parameters
        return (index.tokenizer_fingerprint, index.parameters) == wanted

    def changed(self, index: DataIndex) -> list[str]:
        """Return paths of sources that are new, gone, or of another size or time than when a data set was
        made."""
        known = set(index.sources)
        gone = {path for path, *_ in index.sources} - {source.path for source in self.sources}
        return [s.path for s in self.sources if s.facts not in known] + sorted(gone)
