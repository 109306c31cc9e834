"""Packs documents into rows of equal length without cutting them: best fit, in the order of the documents.

A document goes into the fullest open row that has room for it, or else into a new row. The end token fills up
rows. The result depends on the order of the documents alone.
"""

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass
from typing import Final

import numpy as np

from braid.actors.stage.data.token_files import BEGINS, COUNTS, ROW_COUNTS, TokenShard
from braid.jobs.data.chat import ChatTemplate
from braid.jobs.data.shards import ShardWriter

_OPEN_TOKENS: Final = 1 << 22
"""Most tokens of open rows, to limit memory; if there are more, the fullest open row is written."""


@dataclass(frozen=True)
class RowPacking:
    """The way in which documents become rows: the number of tokens of a row, and the template of
    conversations (None: documents are texts)."""

    tokens: int
    template: ChatTemplate | None


class RowWriter:
    """Packs the documents of one split of one work item into rows, and writes the rows."""

    def __init__(self, writer: ShardWriter, row_tokens: int, end: int, counts: Counter[str]) -> None:
        """``end``: id of the token that fills up rows. ``counts``: its ``tokens_padded`` are added up."""
        self._writer, self._row_tokens, self._end, self._counts = writer, row_tokens, end, counts
        self._document = np.zeros((2, 0), np.int64)
        """Ids and marks of the document that has not ended: [2, tokens]."""
        self._bytes = 0
        self._open: list[tuple[int, int]] = []
        """Room and number of every open row, sorted."""
        self._rows: dict[int, list[tuple[np.ndarray, int, int]]] = {}
        """By number of the row: ids and marks of its documents, with their bytes of text and ends."""
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
        marks = np.full(len(ids), COUNTS) if counted is None else counted * COUNTS
        self._document = np.concatenate([self._document, [ids, marks]], axis=1)
        self._document[1, :1] = BEGINS
        self._bytes += bytes_of_text
        while self._document.shape[1] > self._row_tokens:
            self._flush([(self._document[:, : self._row_tokens], self._bytes, 0)])
            self._document, self._bytes = self._document[:, self._row_tokens - 1 :], 0
            self._document[1, 0] = BEGINS
        if documents:
            self._end_document(documents)

    def close(self) -> None:
        """Write all rows that are open."""
        self._end_document(0)
        for number in sorted(self._rows):
            self._flush(self._rows.pop(number))
        self._writer.close()

    def _end_document(self, documents: int) -> None:
        """Put the document into a row."""
        length, piece = self._document.shape[1], (self._document, self._bytes, documents)
        self._document, self._bytes = self._document[:, :0], 0
        if not length:
            return
        at = bisect_left(self._open, (length, 0))
        if at < len(self._open):
            room, number = self._open.pop(at)
        else:
            room, number = self._row_tokens, self._begun
            self._begun += 1
        self._rows.setdefault(number, []).append(piece)
        insort(self._open, (room - length, number))
        if room == length or len(self._open) > max(16, _OPEN_TOKENS // self._row_tokens):
            self._flush(self._rows.pop(self._open.pop(0)[1]))

    def _flush(self, pieces: list[tuple[np.ndarray, int, int]]) -> None:
        """Write a row."""
        contents, sizes, documents = zip(*pieces, strict=True)
        ids, marks = np.concatenate(contents, axis=1)
        length, counted = len(ids), np.array([np.count_nonzero(marks & COUNTS)], ROW_COUNTS)
        ids = np.pad(ids, (0, self._row_tokens - length), constant_values=self._end)
        marks = np.pad(marks, (0, self._row_tokens - length)).astype(np.uint8)
        marks[length : length + 1] = BEGINS
        self._counts["tokens_padded"] += self._row_tokens - length
        self._writer.write(ids, sum(sizes), sum(documents), marks=marks, counts=counted)
