"""Which tokens of a sample a rank has, and which queries meet which keys.

With context parallelism a sample of s tokens is cut into 2 cp pieces of equal length, of which every rank has
two. Under a causal mask a later piece meets more keys: rank r takes pieces r and 2 cp - 1 - r, so that all
have equal work, with the keys of every other rank too (zigzag: Llama 3, Grattafiori et al. 2024, section
3.3.2). Where tokens meet those of their own document only, pieces go to ranks by the work that there is in
them.

An `AttentionBlock` is what one call of a kernel computes: queries that meet all of some keys, or their
own and earlier keys.

Documents of a sample are the places of their first tokens, ascending, the first one 0 (also where the sample
begins within a document).
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

Pieces = tuple[int, ...]
"""Of one rank."""


@dataclass(frozen=True)
class AttentionBlock:
    """Rows of a sample's queries on this rank, and rows of the keys that it is given."""

    queries: tuple[int, int]
    """The first, and the one behind the last."""
    keys: tuple[int, int]
    causal: bool
    """As many of both, of which a query meets those up to its own place; else it meets all."""
    sample: int | None = None
    """Its number in the micro-batch; None: of all."""


@dataclass(frozen=True)
class TokenOrder:
    """Which tokens of a sample, or of all alike, a rank has, and what they attend to."""

    pieces: tuple[Pieces, ...]
    """Of every rank, as many."""
    rank: int
    length: int
    """Tokens of a piece."""
    documents: tuple[int, ...] = (0,)
    sample: int | None = None

    @property
    def own(self) -> list[int]:
        """Places of this rank's tokens in the sample."""
        return [
            place
            for piece in self.pieces[self.rank]
            for place in range(piece * self.length, (piece + 1) * self.length)
        ]

    @cached_property
    def gathered(self) -> tuple[AttentionBlock, ...]:
        """What this rank's queries do with the keys of all ranks, in the order of the sample."""
        return tuple(self._blocks(range(sum(map(len, self.pieces)))))

    def ring(self, step: int) -> tuple[AttentionBlock, ...]:
        """With the keys of the rank that comes ``step`` before."""
        return self._ring[step]

    @cached_property
    def _ring(self) -> tuple[tuple[AttentionBlock, ...], ...]:
        ranks = len(self.pieces)
        return tuple(tuple(self._blocks(self.pieces[(self.rank - n) % ranks])) for n in range(ranks))

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Where every piece of the sample stands among those of all ranks, rank after rank."""
        there = [piece for own in self.pieces for piece in own]
        return tuple(there.index(piece) for piece in range(len(there)))

    def _blocks(self, keys: Sequence[int]) -> list[AttentionBlock]:
        """What this rank's queries have to do with the keys of some pieces, which stand one by one."""
        found, length = [], self.length
        for place, piece in enumerate(self.pieces[self.rank]):
            for begin, end in self._runs(piece * length, (piece + 1) * length):
                row = place * length + begin - piece * length
                rows = row, row + end - begin
                first = self.documents[bisect_right(self.documents, begin) - 1]
                for low, high in _rows(keys, length, first, begin):
                    found.append(AttentionBlock(rows, (low, high), causal=False, sample=self.sample))
                for low, high in _rows(keys, length, begin, end):
                    found.append(AttentionBlock(rows, (low, high), causal=True, sample=self.sample))
        return found

    def _runs(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Places ``begin`` to ``end`` by document."""
        inside = (first for first in self.documents if begin < first < end)
        return list(pairwise([begin, *inside, end]))


def _rows(keys: Sequence[int], length: int, begin: int, end: int) -> list[tuple[int, int]]:
    """Rows of the places ``begin`` to ``end`` of the sample among the keys of some pieces, as runs."""
    found: list[tuple[int, int]] = []
    for place, piece in enumerate(keys):
        low, high = max(begin, piece * length), min(end, (piece + 1) * length)
        if low < high:
            rows = (place * length + low - piece * length, place * length + high - piece * length)
            if found and found[-1][1] == rows[0]:
                rows = (found.pop()[0], rows[1])
            found.append(rows)
    return found


def causal_order(ranks: int, rank: int, sequence: int) -> TokenOrder:
    """That of samples of one document; of one rank, all of it."""
    if ranks == 1:
        return TokenOrder(((0,),), 0, sequence)
    pieces = tuple((number, 2 * ranks - 1 - number) for number in range(ranks))
    return TokenOrder(pieces, rank, sequence // (2 * ranks))


def document_order(
    ranks: int, rank: int, sequence: int, documents: Sequence[int], sample: int | None = None
) -> TokenOrder:
    """That of a sample of several documents: the piece with most work goes with the one with least.

    With one document it is `causal_order`.
    """
    order = replace(causal_order(ranks, rank, sequence), documents=tuple(documents), sample=sample)
    if ranks == 1:
        return order
    work = _work(documents, sequence, 2 * ranks)
    heaviest = sorted(range(2 * ranks), key=lambda piece: (work[piece], piece), reverse=True)
    pairs = (sorted((heaviest[n], heaviest[-1 - n])) for n in range(ranks))
    return replace(order, pieces=tuple(tuple(pair) for pair in reversed(list(pairs))))


def _work(documents: Sequence[int], sequence: int, pieces: int) -> list[int]:
    """Keys that the queries of each piece meet."""
    length, found = sequence // pieces, [0] * pieces
    for first, behind in pairwise([*documents, sequence]):
        for piece in range(first // length, -(-behind // length)):
            low, high = max(first, piece * length) - first, min(behind, (piece + 1) * length) - first
            found[piece] += (high * (high + 1) - low * (low + 1)) // 2
    return found


@dataclass(frozen=True)
class Documents:
    """Of a micro-batch whose tokens meet those of their own document only: the order of every sample."""

    orders: tuple[TokenOrder, ...]
    positions: Tensor
    """T: of this rank's tokens, for their embedding."""

    @cached_property
    def gathered(self) -> tuple[AttentionBlock, ...]:
        """As `TokenOrder.gathered`, of all samples."""
        return tuple(block for order in self.orders for block in order.gathered)

    def on(self, device: torch.device) -> "Documents":
        """The same for a device."""
        return replace(self, positions=self.positions.to(device, non_blocking=True))

    def part(self, number: int, parts: int) -> "Documents":
        """Of one of several equal parts of the samples."""
        samples = len(self.orders) // parts
        first = number * samples
        orders = (
            replace(order, sample=None if order.sample is None else order.sample - first)
            for order in self.orders[first : first + samples]
        )
        return Documents(tuple(orders), self.positions.chunk(parts)[number])

    def ring(self, step: int) -> tuple[AttentionBlock, ...]:
        """As `TokenOrder.ring`, of all samples."""
        return tuple(block for order in self.orders for block in order.ring(step))


def documents_of(orders: Sequence[TokenOrder], *, restart: bool) -> Documents:
    """``restart``: positions are counted from the begin of each document, else from that of the sample."""
    found = []
    for order in orders:
        for place in order.own:
            first = order.documents[bisect_right(order.documents, place) - 1] if restart else 0
            found.append(place - first)
    return Documents(tuple(orders), torch.tensor(found))
