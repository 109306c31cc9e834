"""Processes one work item of a preparation: reads its documents, splits, tokenises and writes them.

It runs in any process and on any node that an executor chooses, and communicates with no other task.
"""

import hashlib
import os
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from braid.actors.config import DataConfig
from braid.actors.stage.data.token_files import TOKEN_DTYPES, TRAIN, VALIDATION, TokenShard
from braid.jobs.data.corpus import WorkItem
from braid.jobs.data.documents import read_documents
from braid.jobs.data.tokenizer import Tokenizer, load_tokenizer

D = TypeVar("D", str, np.ndarray)

_PIECE_CHARACTERS = 1 << 20  # longer documents are tokenised in pieces, to limit memory
_SHARD_TOKENS = 1 << 27  # tokens after which a shard is full


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


class ShardWriter:
    """Writes one split of one work item, in shards of bounded size with unique names."""

    def __init__(self, folder: Path, split: str, number: int, dtype: np.dtype) -> None:
        self._folder, self._dtype = folder, dtype
        self._stem = f"{split}-item{number:06d}-{secrets.token_hex(8)}"
        self._file: Any = None
        self.shards: list[TokenShard] = []

    def write(self, ids: np.ndarray, bytes_of_text: int = 0, documents: int = 0) -> None:
        """Append token ids (1-d) that stand for ``bytes_of_text`` bytes and end ``documents`` documents."""
        if not len(ids):
            return
        if self._file is None:
            self._name = f"{self._stem}-{len(self.shards):04d}"
            self._file = open(self._folder / self._name, "wb")  # noqa: SIM115 - closed by `close`
            self._hash, self._counts = hashlib.sha256(), Counter[str]()
        content = ids.astype(self._dtype).tobytes()
        self._file.write(content)
        self._hash.update(content)
        self._counts.update(tokens=len(ids), bytes_of_text=bytes_of_text, documents=documents)
        if self._counts["tokens"] >= _SHARD_TOKENS:
            self.close()

    def close(self) -> None:
        """Finish the current shard and flush it to disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
            shard = TokenShard(file=self._name, sha256=self._hash.hexdigest(), **self._counts)
            self.shards.append(shard)


def dtype_of(tokenizer: Tokenizer) -> Literal["uint16", "uint32"]:
    """Return the smaller of `TOKEN_DTYPES` that holds all of a tokenizer's ids."""
    return "uint16" if tokenizer.vocabulary <= 2**16 else "uint32"


def tokenise(
    folder: Path, data: DataConfig, tokenizer_name: str, fingerprint: str, split: Split, item: WorkItem
) -> ItemResult:
    """Read, split, tokenise and write the documents of one work item into ``folder``.

    ``fingerprint``: of the tokenizer when the preparation began. Raise `ValueError` for a bad document.
    """
    tokenizer = checked_tokenizer(tokenizer_name, data.end_token, fingerprint)
    end, dtype = np.array([tokenizer.end_of_document]), TOKEN_DTYPES[dtype_of(tokenizer)]
    train, validation = (ShardWriter(folder, name, item.number, dtype) for name in (TRAIN, VALIDATION))
    counts, lowest, highest = Counter[str](), 2**64, -1
    with closing(train), closing(validation):
        for document in chain.from_iterable(read_documents(part, data) for part in item.ranges):
            if not document or document.isspace():
                counts["documents_skipped" if document is None else "documents_empty"] += 1
                continue
            counts["documents"] += 1
            number = document_hash(document)
            lowest, highest = min(lowest, number), max(highest, number)
            for name, text, ends in split_document(split, document, number):
                writer = train if name == TRAIN else validation
                for piece in _pieces(text):
                    encoded = tokenizer.encode(piece)
                    counts["characters"] += len(piece)
                    counts["characters_lost"] += encoded.lost
                    counts["tokens_unknown"] += encoded.unknown
                    writer.write(encoded.ids, bytes_of_text=len(piece.encode()))
                if ends:
                    writer.write(end, documents=1)
    shards = {TRAIN: train.shards, VALIDATION: validation.shards}
    return ItemResult(item.number, shards, counts, lowest, highest)


@lru_cache(maxsize=1)
def checked_tokenizer(name: str, end: str | None, fingerprint: str) -> Tokenizer:
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


def split_document(split: Split, document: D, number: int) -> tuple[tuple[str, D, bool], ...]:
    """Return the parts of a document whose hash is ``number``, each as (split, text or tokens, whether the
    document ends there)."""
    if not split.tail:
        return ((VALIDATION if number < split.threshold else TRAIN, document, True),)
    stop = max(1, min(round(len(document) * (1 - split.tail)), len(document) - 1))
    if not len(document[stop:]):
        return ((TRAIN, document, True),)
    return (TRAIN, document[:stop], False), (VALIDATION, document[stop:], True)
