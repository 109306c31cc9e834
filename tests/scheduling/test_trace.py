"""Unions of intervals and the numbers of overlap, against counting each nanosecond; comparing traces."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.trace.arrays import outside, overlap_numbers, union, without
from braid.scheduling.trace.batches import batches_of
from braid.scheduling.trace.compare import compare_traces
from braid.scheduling.trace.spans import OverlapNumbers, Span
from tests.spans import Interval, intervals, merge

LONGEST = 40
INTERVALS = st.lists(
    st.tuples(st.integers(0, LONGEST), st.integers(0, LONGEST)).map(lambda pair: (min(pair), max(pair))),
    max_size=12,
)


def covered(pairs: Sequence[Interval]) -> set[int]:
    """The nanoseconds that lie in some interval."""
    return {ns for start, end in pairs for ns in range(start, end)}


def pairs_of(array: object) -> list[Interval]:
    """Rows of an array, which have to be disjoint, in order, with gaps between them."""
    found = [(int(a), int(b)) for a, b in array]  # type: ignore[attr-defined]
    assert found == merge(found)
    return found


@given(some=INTERVALS, others=INTERVALS)
def test_intervals(some: list[Interval], others: list[Interval]) -> None:
    taken = covered(others)
    assert covered(pairs_of(union(intervals(some)))) == covered(some)
    assert covered(pairs_of(without(intervals(some), intervals(others)))) == covered(some) - taken
    whose, parts = outside(intervals(some), intervals(others))
    for place, (begin, end) in enumerate(some):
        assert covered(pairs_of(parts[whose == place])) == set(range(begin, end)) - taken


def numbers_of(
    compute: list[tuple[int, int, int | None]],
    transfers: list[Interval],
    blocks: list[tuple[Interval, bool]],
    beside: Sequence[Interval] = (),
) -> OverlapNumbers:
    """From tuples: of compute operators begin, end and solo time; of blocks whether they are paired.

    ``beside``: transfers of another link.
    """
    return overlap_numbers(
        intervals((begin, end) for begin, end, _ in compute),
        np.array([-1 if solo is None else solo for _, _, solo in compute], np.int64),
        [intervals(transfers), intervals(beside)],
        intervals(interval for interval, _ in blocks),
        np.array([paired for _, paired in blocks], bool),
    )


@given(INTERVALS, INTERVALS, st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), max_size=6))
def test_overlap_numbers(
    compute: list[Interval], transfers: list[Interval], lengths: list[tuple[int, int]]
) -> None:
    blocks: list[tuple[Interval, bool]] = []
    now = 0
    for gap, length in lengths:
        blocks.append(((now + gap, now + gap + length), bool(length % 2)))
        now += gap + length
    beside = transfers[::2]
    numbers = numbers_of([(*i, None) for i in compute], transfers, blocks, beside)
    busy, moving = covered(compute), covered(transfers)
    assert numbers.compute_ns == len(busy)
    assert numbers.communication_ns == len(moving)
    assert (numbers.hidden_ns, numbers.exposed_ns) == (len(moving & busy), len(moving - busy))
    assert numbers.hidden_fraction == (pytest.approx(len(moving & busy) / len(moving)) if moving else None)
    assert numbers.links_together_ns == len(covered(beside))
    inside = covered([block for block, _ in blocks])
    assert numbers.launch_gap_ns == len(inside - busy - moving)
    assert numbers.bubble_ns == (max(inside) + 1 - min(inside) - len(inside) if inside else 0)


def test_slowdown_is_what_compute_takes_more_in_paired_blocks() -> None:
    blocks = [((0, 100), True), ((100, 200), False)]
    # The last one runs alone: it was not slowed by overlap.
    compute: list[tuple[int, int, int | None]] = [(0, 30, 20), (40, 80, 35), (110, 190, 10)]
    assert numbers_of(compute, [(0, 90)], blocks).slowdown_ns == 15
    assert numbers_of([*compute, (80, 85, None)], [], blocks).slowdown_ns is None
    assert numbers_of([(110, 150, None)], [], blocks).slowdown_ns == 0


def _span(operator: str, start: int, end: int, stream: Stream, rank: int = 0) -> Span:
    common = {"step": 0, "strand": "alpha", "micro_batch": 0, "chunk": 0, "layer": 0}
    return Span(rank=rank, operator=operator, stream=stream, start_ns=start, end_ns=end, **common)  # type: ignore[arg-type]


def test_traces_are_compared_operator_by_operator() -> None:
    first = [_span("qkv", 0, 10_000, Stream.COMPUTE), _span("gather", 10_000, 30_000, Stream.INTRA)]
    second = [_span("qkv", 0, 12_000, Stream.COMPUTE), _span("gather", 2_000, 52_000, Stream.INTRA)]
    second += [_span("qkv", 100, 14_100, Stream.COMPUTE, rank=1)]
    compared = compare_traces(batches_of(first), batches_of(second))
    assert [row.operator for row in compared.operators] == ["gather", "qkv"]
    gather, qkv = compared.operators
    assert (gather.first_ns, gather.second_ns, gather.difference_ns) == (20_000, 50_000, 5_000)
    assert (qkv.first_ns, qkv.second_ns, qkv.difference_ns) == (10_000, 13_000, 3_000)
    assert (qkv.first_count, qkv.second_count, gather.second_count) == (1, 1, 1)
    assert compared.first.hidden_fraction == 0
    assert compared.second.hidden_fraction == pytest.approx(0.2)
    assert compared.second.step_ns == (52_000 + 14_000) / 2
