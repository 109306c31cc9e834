"""Which tokens of a sample a rank has, and which queries meet which keys.

With context parallelism a sample of s tokens is cut into 2 cp pieces of equal length, of which every rank has
two. Under a causal mask a later piece meets more keys: rank r takes pieces r and 2 cp - 1 - r, so that all
have equal work, with the keys of every other rank too (zigzag: Llama 3, Grattafiori et al. 2024, section
3.3.2). Where tokens meet those of their own document only, pieces go to ranks by the work that there is in
them.

Documents of a sample are the places of their first tokens, ascending, the first one 0 (also where the sample
begins within a document).
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionBlock:
    """What one call of a kernel computes: rows of this rank's queries, and of the keys that it is given."""

    queries: slice
    keys: slice
    causal: bool
    """As many of both, of which a query meets those up to its own place; else it meets all."""
    samples: slice
    """Of the micro-batch."""


Blocks = tuple[AttentionBlock, ...]


@dataclass(frozen=True)
class TokenOrder:
    """Which tokens of a sample, or of all alike, a rank has, and what they attend to."""

    pieces: tuple[tuple[int, ...], ...]
    """Of every rank, as many."""
    rank: int
    length: int
    """Tokens of a piece."""
    documents: tuple[int, ...] = (0,)
    sample: int | None = None
    """Its number in the micro-batch; None: all of them."""

    @property
    def own(self) -> list[int]:
        """Places of this rank's tokens in the sample."""
        begins = (piece * self.length for piece in self.pieces[self.rank])
        return [place for begin in begins for place in range(begin, begin + self.length)]

    @property
    def samples(self) -> slice:
        """Of the micro-batch, in this order."""
        return slice(None) if self.sample is None else slice(self.sample, self.sample + 1)

    @cached_property
    def gathered(self) -> Blocks:
        """What this rank's queries do with the keys of all ranks, in the order of the sample."""
        return tuple(self._blocks(range(sum(map(len, self.pieces)))))

    @cached_property
    def ring(self) -> tuple[Blocks, ...]:
        """With the keys of every rank: first its own, then the previous rank's, and so on around."""
        ranks = len(self.pieces)
        return tuple(tuple(self._blocks(self.pieces[(self.rank - n) % ranks])) for n in range(ranks))

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Where every piece of the sample stands among those of all ranks, rank after rank."""
        there = list(chain.from_iterable(self.pieces))
        return tuple(map(there.index, range(len(there))))

    def begin_of(self, place: int) -> int:
        """Of the document that a place is in."""
        return self.documents[bisect_right(self.documents, place) - 1]

    def _blocks(self, keys: Sequence[int]) -> list[AttentionBlock]:
        """What this rank's queries have to do with the keys of some pieces, which stand side by side."""
        found, length = [], self.length
        for number, piece in enumerate(self.pieces[self.rank]):
            low, high = piece * length, (piece + 1) * length
            inside = (first for first in self.documents if low < first < high)
            for begin, end in pairwise([low, *inside, high]):
                row = number * length + begin - low
                for first, last, causal in ((self.begin_of(begin), begin, False), (begin, end, True)):
                    queries = slice(row, row + end - begin)
                    for rows in _rows(keys, length, first, last):
                        found.append(AttentionBlock(queries, rows, causal, self.samples))
        return found


def _rows(keys: Sequence[int], length: int, begin: int, end: int) -> list[slice]:
    """Rows of the places ``begin`` to ``end`` of the sample among the keys of some pieces, as runs."""
    found: list[slice] = []
    for number, piece in enumerate(keys):
        low, high = max(begin, piece * length), min(end, (piece + 1) * length)
        if low < high:
            first, behind = (number * length + place - piece * length for place in (low, high))
            if found and found[-1].stop == first:
                first = found.pop().start
            found.append(slice(first, behind))
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
    def gathered(self) -> Blocks:
        """As `TokenOrder.gathered`, of all samples."""
        return tuple(block for order in self.orders for block in order.gathered)

    @cached_property
    def ring(self) -> tuple[Blocks, ...]:
        """As `TokenOrder.ring`, of all samples."""
        steps = zip(*(order.ring for order in self.orders), strict=True)
        return tuple(tuple(chain.from_iterable(step)) for step in steps)

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


def documents_of(orders: Sequence[TokenOrder], *, restart: bool) -> Documents:
    """``restart``: positions are counted from the begin of each document, else from that of the sample."""
    counted = ((order, place) for order in orders for place in order.own)
    positions = [place - order.begin_of(place) if restart else place for order, place in counted]
    return Documents(tuple(orders), torch.tensor(positions))
