"""Assigns the tokens of a sample to ranks, and finds which queries attend to which keys.

With context parallelism a sample of s tokens is cut into 2 cp pieces of equal length; every rank has two.
Under a causal mask later pieces attend to more keys: rank r takes pieces r and 2 cp - 1 - r, so that all
ranks have equal work, also with the keys of each single rank (zigzag: Llama 3, Grattafiori et al. 2024,
section 3.3.2). If tokens attend only to their own document, pieces are assigned by the amount of their work.

Documents of a sample are given by the positions of their first tokens, ascending; the first position is 0
(also if the sample begins within a document).
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
    """One call of an attention kernel: rows of this rank's queries, rows of the given keys."""

    queries: slice
    keys: slice
    causal: bool
    """True: query i attends to keys 0 to i, as many as queries. False: to all keys."""
    samples: slice
    """Range of samples of the micro-batch."""


Blocks = tuple[AttentionBlock, ...]


@dataclass(frozen=True)
class TokenOrder:
    """The tokens that a rank has of one sample, or of all samples alike, and the keys that they attend to."""

    pieces: tuple[tuple[int, ...], ...]
    """Numbers of the pieces of each rank; all ranks have equally many pieces."""
    rank: int
    length: int
    """Number of tokens in a piece."""
    documents: tuple[int, ...] = (0,)
    sample: int | None = None
    """Number of the sample in the micro-batch; None: the order holds for all samples."""

    @property
    def own(self) -> list[int]:
        """Positions in the sample of this rank's tokens."""
        begins = (piece * self.length for piece in self.pieces[self.rank])
        return [place for begin in begins for place in range(begin, begin + self.length)]

    @property
    def samples(self) -> slice:
        """Range of the micro-batch's samples for which this order holds."""
        return slice(None) if self.sample is None else slice(self.sample, self.sample + 1)

    @cached_property
    def gathered(self) -> Blocks:
        """Attention of this rank's queries to the keys of all ranks, given in the order of the sample."""
        return tuple(self._blocks(range(sum(map(len, self.pieces)))))

    @cached_property
    def ring(self) -> tuple[Blocks, ...]:
        """Attention to one rank's keys per step: this rank's, then the previous rank's, and so on."""
        ranks = len(self.pieces)
        return tuple(tuple(self._blocks(self.pieces[(self.rank - n) % ranks])) for n in range(ranks))

    @cached_property
    def places(self) -> tuple[int, ...]:
        """For every piece of the sample, its index in the list of all ranks' pieces, rank after rank."""
        there = list(chain.from_iterable(self.pieces))
        return tuple(map(there.index, range(len(there))))

    def begin_of(self, place: int) -> int:
        """Return the position of the first token of the document that contains a position."""
        return self.documents[bisect_right(self.documents, place) - 1]

    def _blocks(self, keys: Sequence[int]) -> list[AttentionBlock]:
        """Return the attention to the keys of the given pieces, which are adjacent in memory."""
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
    """Return the rows of positions ``begin`` to ``end`` in the keys of pieces, as long slices."""
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
    """Return the token order for samples of one document each; a single rank has all tokens."""
    if ranks == 1:
        return TokenOrder(((0,),), 0, sequence)
    pieces = tuple((number, 2 * ranks - 1 - number) for number in range(ranks))
    return TokenOrder(pieces, rank, sequence // (2 * ranks))


def document_order(
    ranks: int, rank: int, sequence: int, documents: Sequence[int], sample: int | None = None
) -> TokenOrder:
    """Return the token order for a sample of several documents: the piece with most work is paired with the
    piece with least work. With one document the result equals `causal_order`."""
    order = replace(causal_order(ranks, rank, sequence), documents=tuple(documents), sample=sample)
    if ranks == 1:
        return order
    work = _work(documents, sequence, 2 * ranks)
    heaviest = sorted(range(2 * ranks), key=lambda piece: (work[piece], piece), reverse=True)
    pairs = (sorted((heaviest[n], heaviest[-1 - n])) for n in range(ranks))
    return replace(order, pieces=tuple(tuple(pair) for pair in reversed(list(pairs))))


def _work(documents: Sequence[int], sequence: int, pieces: int) -> list[int]:
    """Return, for each piece, the number of (query, key) pairs that its queries attend to."""
    length, found = sequence // pieces, [0] * pieces
    for first, behind in pairwise([*documents, sequence]):
        for piece in range(first // length, -(-behind // length)):
            low, high = max(first, piece * length) - first, min(behind, (piece + 1) * length) - first
            found[piece] += (high * (high + 1) - low * (low + 1)) // 2
    return found


@dataclass(frozen=True)
class Documents:
    """Documents of a micro-batch in which tokens attend to their own document only."""

    orders: tuple[TokenOrder, ...]
    positions: Tensor
    """Position of each of this rank's T tokens, for position embeddings."""

    @cached_property
    def gathered(self) -> Blocks:
        """The blocks of `TokenOrder.gathered` for all samples."""
        return tuple(block for order in self.orders for block in order.gathered)

    @cached_property
    def ring(self) -> tuple[Blocks, ...]:
        """The blocks of `TokenOrder.ring`, step by step, for all samples."""
        steps = zip(*(order.ring for order in self.orders), strict=True)
        return tuple(tuple(chain.from_iterable(step)) for step in steps)

    def on(self, device: torch.device) -> "Documents":
        return replace(self, positions=self.positions.to(device, non_blocking=True))

    def part(self, number: int, parts: int) -> "Documents":
        """Return the documents of part ``number`` of the samples, which are divided into equal ``parts``."""
        samples = len(self.orders) // parts
        first = number * samples
        orders = (
            replace(order, sample=None if order.sample is None else order.sample - first)
            for order in self.orders[first : first + samples]
        )
        return Documents(tuple(orders), self.positions.chunk(parts)[number])


def documents_of(orders: Sequence[TokenOrder], *, restart: bool) -> Documents:
    """Make `Documents` of a micro-batch. ``restart``: count positions from the first token of each document,
    not from that of the sample."""
    counted = ((order, place) for order in orders for place in order.own)
    positions = [place - order.begin_of(place) if restart else place for order, place in counted]
    return Documents(tuple(orders), torch.tensor(positions))
