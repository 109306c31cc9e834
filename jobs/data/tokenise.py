"""Processes one work item of a preparation: reads its documents, splits, tokenises and writes them.

It runs in any process and on any node that an executor chooses, and communicates with no other task.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from braid.actors.config import DataConfig
from braid.actors.stage.data.token_files import TOKEN_DTYPES, TRAIN, VALIDATION, TokenShard
from braid.jobs.data.chat import ChatTemplate, encode
from braid.jobs.data.corpus import FileRange, WorkItem
from braid.jobs.data.documents import read_conversations, read_documents
from braid.jobs.data.megatron import read_tokens, token_hash
from braid.jobs.data.shards import RowWriter, ShardWriter
from braid.jobs.data.tokenizer import Tokenizer, load_tokenizer

D = TypeVar("D", str, np.ndarray)

_PIECE_CHARACTERS = 1 << 20  # longer documents are tokenised in pieces, to limit memory


@dataclass(frozen=True)
class Split:
    """The rule for validation data: documents whose hash is below ``threshold`` (of 2**64); or, if the corpus
    is one document, perhaps repeated, the last ``tail`` of its characters (a share, 0: none)."""

    threshold: int = 0
    tail: float = 0.0


@dataclass(frozen=True)
class ItemResult:
    """Shards that one work item wrote, under temporary names, and the extremes of its documents' hashes."""

    number: int
    shards: dict[str, list[TokenShard]]
    counts: Counter[str]
    """``documents``, and the fields of `DataIndex` that count features and faults of the text."""
    lowest_hash: int
    highest_hash: int


def dtype_of(tokenizer: Tokenizer) -> Literal["uint16", "uint32"]:
    """Return the smaller of `TOKEN_DTYPES` that holds all of a tokenizer's ids."""
    return "uint16" if tokenizer.vocabulary <= 2**16 else "uint32"


@dataclass(frozen=True)
class Tokenisation:
    """Reads, splits, tokenises and writes documents into ``folder``."""

    folder: Path
    data: DataConfig
    tokenizer_name: str
    fingerprint: str
    """Of the tokenizer when the preparation began."""
    row_tokens: int
    """0: the documents become a stream."""
    template: ChatTemplate | None
    split: Split

    def __call__(self, item: WorkItem) -> ItemResult:
        """Process one work item. Raise `ValueError` for a bad document."""
        tokenizer = _tokenizer(self.tokenizer_name, self.data.end_token, self.fingerprint)
        dtype, end = TOKEN_DTYPES[dtype_of(tokenizer)], tokenizer.end_of_document
        counts, lowest, highest = Counter[str](), 2**64, -1
        writers: dict[str, Any] = {}
        with ExitStack() as stack:
            for name in (TRAIN, VALIDATION):
                writer: Any = ShardWriter(self.folder, name, item.number, dtype)
                if self.row_tokens:
                    writer = RowWriter(writer, self.row_tokens, end, counts)
                writers[name] = stack.enter_context(closing(writer))
            write = self._write_texts
            if self.data.format == "megatron":
                write = self._copy_tokens
            elif self.template is not None:
                write = self._write_conversations
            for part in item.ranges:
                for number in write(part, tokenizer, counts, writers):
                    counts["documents"] += 1
                    lowest, highest = min(lowest, number), max(highest, number)
        shards = {name: writer.shards for name, writer in writers.items()}
        return ItemResult(item.number, shards, counts, lowest, highest)

    def _write_texts(
        self, part: FileRange, tokenizer: Tokenizer, counts: Counter[str], writers: Mapping[str, Any]
    ) -> Iterator[int]:
        end = np.array([tokenizer.end_of_document])
        for document in read_documents(part, self.data):
            if not document or document.isspace():
                counts["documents_skipped" if document is None else "documents_empty"] += 1
                continue
            number = document_hash(document)
            yield number
            for name, text, ends in _split_document(self.split, document, number):
                for piece in _pieces(text):
                    encoded = tokenizer.encode(piece)
                    counts["characters"] += len(piece)
                    counts["characters_lost"] += encoded.lost
                    counts["tokens_unknown"] += encoded.unknown
                    writers[name].write(encoded.ids, len(piece.encode()))
                if ends:
                    writers[name].write(end, documents=1)

    def _copy_tokens(
        self, part: FileRange, tokenizer: Tokenizer, counts: Counter[str], writers: Mapping[str, Any]
    ) -> Iterator[int]:
        for ids in read_tokens(part, tokenizer):
            if not len(ids):
                counts["documents_empty"] += 1
                continue
            number = token_hash(ids)
            yield number
            for name, tokens, ends in _split_document(self.split, ids, number):
                writers[name].write(tokens, documents=int(ends))

    def _write_conversations(
        self, part: FileRange, tokenizer: Tokenizer, counts: Counter[str], writers: Mapping[str, Any]
    ) -> Iterator[int]:
        """Write every conversation of a range, but for conversations that are longer than a row, or have no
        token that counts; yield the hashes of their texts."""
        assert self.template is not None
        for conversation in read_conversations(part, self.data):
            if conversation is None:
                counts["documents_skipped"] += 1
                continue
            text, answers = self.template.render(conversation)
            encoded, counted = encode(tokenizer, (text, answers))
            long = len(encoded.ids) > self.row_tokens
            if long or not counted[1:].any():
                counts["documents_long" if long else "documents_silent"] += 1
                continue
            counts["characters"] += len(text)
            counts["tokens_unknown"] += encoded.unknown
            number = document_hash(text)
            yield number
            name = VALIDATION if number < self.split.threshold else TRAIN
            writers[name].write(encoded.ids, documents=1, counted=counted)


@lru_cache(maxsize=1)
def _tokenizer(name: str, end: str | None, fingerprint: str) -> Tokenizer:
    """Load a tokenizer once per process, since a large one takes longer to load than a work item takes."""
    tokenizer = load_tokenizer(name, end)
    if tokenizer.fingerprint != fingerprint:
        raise ValueError(f"data.tokenizer: {name!r} changed, or differs between nodes; make it one file")
    return tokenizer


def _pieces(text: str) -> Iterator[str]:
    """Yield ``text`` in pieces of bounded size, cut after a line's end if there is one."""
    start = 0
    while len(text) - start > _PIECE_CHARACTERS:
        stop = text.rfind("\n", start, start + _PIECE_CHARACTERS) + 1 or start + _PIECE_CHARACTERS
        yield text[start:stop]
        start = stop
    yield text[start:]


def document_hash(text: str) -> int:
    """Return a uniformly distributed number in [0, 2**64) that depends on the text alone."""
    digest = hashlib.blake2b(digest_size=8)
    for piece in _pieces(text):
        digest.update(piece.encode())
    return int.from_bytes(digest.digest(), "big")


def _split_document(split: Split, document: D, number: int) -> tuple[tuple[str, D, bool], ...]:
    """Return the parts of a document whose hash is ``number``, each as (split, text or tokens, whether the
    document ends there)."""
    if not split.tail:
        return ((VALIDATION if number < split.threshold else TRAIN, document, True),)
    stop = max(1, min(round(len(document) * (1 - split.tail)), len(document) - 1))
    if not len(document[stop:]):
        return ((TRAIN, document, True),)
    return (TRAIN, document[:stop], False), (VALIDATION, document[stop:], True)
