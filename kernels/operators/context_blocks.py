"""Which queries meet which keys, where ranks have only some of a sequence's tokens (context parallelism).

A sample of s tokens is cut into 2 cp pieces of equal length, of which every rank has two. Under a causal mask
a later piece meets more keys: rank r takes pieces r and 2 cp - 1 - r, so that all have equal work, with the
keys of every other rank too (zigzag: Llama 3, Grattafiori et al. 2024, section 3.3.2). Where tokens meet their
own document's only (`documents`), pieces go to ranks by the work that there is in them.

A `Block` is what one call of a kernel computes: some queries that meet all of some keys, or their own and
earlier ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Block:
    """Rows of a sample's queries on this rank, and rows of the keys that it is given."""

    queries: tuple[int, int]
    """The first, and the one behind the last."""
    keys: tuple[int, int]
    causal: bool
    """As many of both, of which a query meets those up to its own place; else it meets all."""
    sample: int | None = None
    """None: of all samples."""


def zigzag(ranks: int) -> tuple[tuple[int, int], ...]:
    """The two pieces of every rank, under a causal mask."""
    return tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks))


def balanced(work: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The two pieces of every rank, given the work in each: the heaviest piece with the lightest, and so on.

    Under a causal mask alone, that is `zigzag`.
    """
    order = sorted(range(len(work)), key=lambda piece: (-work[piece], -piece))
    pairs = ((order[n], order[-1 - n]) for n in range(len(work) // 2))
    return tuple((min(pair), max(pair)) for pair in pairs)


def piece_work(starts: Sequence[int], pieces: int) -> list[int]:
    """Keys that the queries of each piece meet. ``starts``: where the document of every token begins."""
    length = len(starts) // pieces
    met = [place - start + 1 for place, start in enumerate(starts)]
    return [sum(met[piece * length : (piece + 1) * length]) for piece in range(pieces)]


def positions(pieces: Sequence[int], length: int) -> list[int]:
    """Places in the sample of the tokens of some pieces."""
    return [place for piece in pieces for place in range(piece * length, (piece + 1) * length)]


def blocks(
    queries: Sequence[int],
    keys: Sequence[int],
    length: int,
    starts: Sequence[int] | None = None,
    sample: int | None = None,
) -> list[Block]:
    """What queries of some pieces of ``length`` tokens have to do with the keys of some pieces.

    Rows are numbered piece by piece as they are given. ``starts``: where the document of every token of the
    sample begins; None: all tokens are of one.
    """
    found = []
    for place, piece in enumerate(queries):
        for begin, end in _runs(piece * length, (piece + 1) * length, starts):
            row = place * length + begin - piece * length
            first = 0 if starts is None else starts[begin]
            rows = row, row + end - begin
            for low, high in _key_rows(keys, length, first, begin):
                found.append(Block(rows, (low, high), causal=False, sample=sample))
            for low, high in _key_rows(keys, length, begin, end):
                found.append(Block(rows, (low, high), causal=True, sample=sample))
    return found


def _runs(begin: int, end: int, starts: Sequence[int] | None) -> list[tuple[int, int]]:
    """Tokens ``begin`` to ``end`` by document."""
    if starts is None:
        return [(begin, end)]
    firsts = [place for place in range(begin, end) if place == begin or starts[place] == place]
    return list(pairwise([*firsts, end]))


def _key_rows(keys: Sequence[int], length: int, begin: int, end: int) -> list[tuple[int, int]]:
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
