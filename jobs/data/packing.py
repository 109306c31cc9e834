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
    """The way in which documents become rows."""

    tokens: int
    """Number of tokens of a row."""
    template: ChatTemplate | None
    """Template of conversations; None: documents are texts."""


@dataclass(frozen=True, eq=False)
class _Piece:
    """A document, or a part of it, in one row."""

    ids: np.ndarray
    marks: np.ndarray
    bytes_of_text: int
    documents: int


class RowWriter:
    """Packs the documents of one split of one work item into rows, and writes the rows."""

    def __init__(self, writer: ShardWriter, row_tokens: int, end: int, counts: Counter[str]) -> None:
        """``end``: id of the token that fills up rows. ``counts``: its ``tokens_padded`` are added up."""
        self._writer, self._row_tokens, self._end, self._counts = writer, row_tokens, end, counts
        self._ids, self._marks = np.zeros(0, np.int64), np.zeros(0, np.uint8)
        self._bytes = 0
        """Tokens of the document that has not ended, with their marks and bytes of text."""
        self._most = max(16, _OPEN_TOKENS // row_tokens)
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
        marks = np.full(len(ids), COUNTS, np.uint8) if counted is None else counted * np.uint8(COUNTS)
        if not len(self._ids):
            marks[:1] = BEGINS
        self._ids, self._marks = np.append(self._ids, ids), np.append(self._marks, marks)
        self._bytes += bytes_of_text
        done, row = 0, self._row_tokens
        while len(self._ids) - done > row:
            self._flush([self._taken(done, done + row, documents=0)])
            done += row - 1
            self._marks[done] = BEGINS
        self._ids, self._marks = self._ids[done:], self._marks[done:]
        if documents:
            self._end_document(documents)

    def close(self) -> None:
        """Write all rows that are open."""
        self._end_document(0)
        for number in sorted(self._rows):
            self._flush(self._rows[number])
        self._rows.clear()
        self._open.clear()
        self._writer.close()

    def _taken(self, begin: int, end: int, documents: int) -> _Piece:
        size, self._bytes = self._bytes, 0
        return _Piece(self._ids[begin:end], self._marks[begin:end], size, documents)

    def _end_document(self, documents: int) -> None:
        if length := len(self._ids):
            self._place(self._taken(0, length, documents))
            self._ids, self._marks = self._ids[:0], self._marks[:0]

    def _place(self, piece: _Piece) -> None:
        length = len(piece.ids)
        at = bisect_left(self._open, (length, 0))
        if at < len(self._open):
            room, number = self._open.pop(at)
        else:
            room, number = self._row_tokens, self._begun
            self._begun += 1
        self._rows.setdefault(number, []).append(piece)
        insort(self._open, (room - length, number))
        if room == length or len(self._open) > self._most:
            _, number = self._open.pop(0)
            self._flush(self._rows.pop(number))

    def _flush(self, pieces: list[_Piece]) -> None:
        """Write a row."""
        length = sum(len(piece.ids) for piece in pieces)
        ids = np.full(self._row_tokens, self._end, np.int64)
        marks = np.zeros(self._row_tokens, np.uint8)
        marks[length : length + 1] = BEGINS
        ids[:length] = np.concatenate([piece.ids for piece in pieces])
        marks[:length] = np.concatenate([piece.marks for piece in pieces])
        self._counts["tokens_padded"] += self._row_tokens - length
        self._writer.write(
            ids,
            sum(piece.bytes_of_text for piece in pieces),
            sum(piece.documents for piece in pieces),
            marks=marks.tobytes(),
            counts=np.array([np.count_nonzero(marks & COUNTS)], ROW_COUNTS).tobytes(),
        )
