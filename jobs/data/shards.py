"""Writes the shards of one split of one work item: a stream of tokens, or rows of whole documents."""

import hashlib
import os
import secrets
from bisect import bisect_left, insort
from collections import Counter
from pathlib import Path
from typing import Any, Final

import numpy as np

from braid.actors.stage.data.token_files import BEGINS, COUNTS, ROW_COUNTS, TokenShard

_SHARD_TOKENS: Final = 1 << 27
"""Tokens after which a shard is full."""
_OPEN_TOKENS: Final = 1 << 22
"""Most tokens of open rows, to limit memory; if there are more, the fullest open row is written."""


class ShardWriter:
    """Writes one split of one work item, in shards of bounded size with unique names."""

    def __init__(self, folder: Path, split: str, number: int, dtype: np.dtype) -> None:
        self._folder, self._dtype = folder, dtype
        self._stem = f"{split}-item{number:06d}-{secrets.token_hex(8)}"
        self._files: list[Any] = []
        """The files of the current shard; none if there is no shard."""
        self.shards: list[TokenShard] = []

    def write(
        self, ids: np.ndarray, bytes_of_text: int = 0, documents: int = 0, **beside: np.ndarray
    ) -> None:
        """Append token ids (1-d) that stand for ``bytes_of_text`` bytes and end ``documents`` documents.

        ``beside``: content of the files beside the shard, by ending (`TokenShard.beside`), in every call.
        """
        if not len(ids):
            return
        if not self._files:
            self._name = f"{self._stem}-{len(self.shards):04d}"
            names = self._name, *(f"{self._name}.{ending}" for ending in beside)
            self._files = [open(self._folder / name, "wb") for name in names]  # noqa: SIM115 - `close`
            self._hash, self._counts = hashlib.sha256(), Counter[str]()
        for file, array in zip(self._files, (ids.astype(self._dtype), *beside.values()), strict=False):
            content = array.tobytes()
            file.write(content)
            self._hash.update(content)
        self._counts["tokens"] += len(ids)  # quicker than `update`
        self._counts["bytes_of_text"] += bytes_of_text
        self._counts["documents"] += documents
        if self._counts["tokens"] >= _SHARD_TOKENS:
            self.close()

    def close(self) -> None:
        """Finish the current shard and flush it to disk."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
            file.close()
        if self._files:
            self._files = []
            self.shards.append(TokenShard(file=self._name, sha256=self._hash.hexdigest(), **self._counts))


_Piece = tuple[np.ndarray, np.ndarray, int, int]
"""A document, or a part of it, in one row: ids, marks, bytes of text, and 1 if it ends there."""


class RowWriter:
    """Packs documents into rows of equal length without cutting them: best fit, in their order.

    A document goes into the fullest open row that has room for it, or else into a new row. The end token
    fills up rows. The result depends on the order of the documents alone.
    """

    def __init__(self, writer: ShardWriter, row_tokens: int, end: int, counts: Counter[str]) -> None:
        """``end``: id of the token that fills up rows. ``counts``: its ``tokens_padded`` are added up."""
        self._writer, self._row_tokens, self._end, self._counts = writer, row_tokens, end, counts
        self._document: list[tuple[np.ndarray, np.ndarray]] = []
        """Ids and marks of the document that has not ended."""
        self._bytes = 0
        self._open: list[tuple[int, int]] = []
        """Room and number of every open row, sorted."""
        self._rows: dict[int, list[_Piece]] = {}
        self._begun = 0

    @property
    def shards(self) -> list[TokenShard]:
        return self._writer.shards

    def write(
        self, ids: np.ndarray, bytes_of_text: int = 0, documents: int = 0, counted: np.ndarray | None = None
    ) -> None:
        """Append tokens to the document; ``documents``: 1 ends it. ``counted``: for each token whether the
        loss of predicting it counts; None: all count.

        A document's first token never counts. A document that is longer than a row fills rows of its own, and
        its next row begins with the last token of the row, so that every other token is predicted once.
        """
        marks = np.full(len(ids), COUNTS, np.uint8) if counted is None else counted.astype(np.uint8)
        self._document.append((ids, marks))
        self._bytes += bytes_of_text
        if documents:
            self._end_document(documents)

    def close(self) -> None:
        """Write all rows that are open."""
        self._end_document(0)
        for number in sorted(self._rows):
            self._flush(self._rows.pop(number))
        self._writer.close()

    def _end_document(self, documents: int) -> None:
        """Write the whole rows of the document, and put the rest of it into a row."""
        if not self._document:
            return
        ids, marks = (np.concatenate(parts) for parts in zip(*self._document, strict=True))
        size, self._document, self._bytes = self._bytes, [], 0
        marks[:1] = BEGINS
        while len(ids) > self._row_tokens:
            self._flush([(ids[: self._row_tokens], marks[: self._row_tokens], size, 0)])
            ids, marks, size = ids[self._row_tokens - 1 :], marks[self._row_tokens - 1 :], 0
            marks[0] = BEGINS
        if not (length := len(ids)):
            return
        at = bisect_left(self._open, (length, 0))
        if at < len(self._open):
            room, number = self._open.pop(at)
        else:
            room, number = self._row_tokens, self._begun
            self._begun += 1
        self._rows.setdefault(number, []).append((ids, marks, size, documents))
        insort(self._open, (room - length, number))
        if room == length or len(self._open) > max(16, _OPEN_TOKENS // self._row_tokens):
            self._flush(self._rows.pop(self._open.pop(0)[1]))

    def _flush(self, pieces: list[_Piece]) -> None:
        all_ids, all_marks, sizes, documents = zip(*pieces, strict=True)
        room = self._row_tokens - sum(map(len, all_ids))
        ids = np.concatenate([*all_ids, np.full(room, self._end)])
        marks = np.concatenate([*all_marks, np.zeros(room, np.uint8)])
        marks[len(marks) - room :][:1] = BEGINS
        self._counts["tokens_padded"] += room
        counted = np.array([np.count_nonzero(marks & COUNTS)], ROW_COUNTS)
        self._writer.write(ids, sum(sizes), sum(documents), marks=marks, counts=counted)
