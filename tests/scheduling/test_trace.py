"""Interval arithmetic and the communication numbers, against counting nanosecond by nanosecond."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.scheduling.chrome_trace import chrome_trace
from braid.scheduling.compare_traces import compare_traces, read_trace
from braid.scheduling.operators import Stream
from braid.scheduling.trace import (
    Communication,
    Interval,
    OverlapNumbers,
    Span,
    communication,
    length_ns,
    merge,
    overlap_ns,
)
from braid.scheduling.trace_arrays import intervals, outside, overlap_numbers, union, without

LONGEST = 40
INTERVALS = st.lists(
    st.tuples(st.integers(0, LONGEST), st.integers(0, LONGEST)).map(lambda pair: (min(pair), max(pair))),
    max_size=12,
)


def covered(intervals: list[Interval]) -> set[int]:
    """The nanoseconds that lie in some interval."""
    return {ns for start, end in intervals for ns in range(start, end)}


@given(INTERVALS)
def test_merge_is_the_union(intervals: list[Interval]) -> None:
    merged = merge(intervals)
    assert covered(merged) == covered(intervals)
    assert all(start < end for start, end in merged)
    assert all(before[1] < after[0] for before, after in pairwise(merged))
    assert merge(merged) == merged
    assert merge(reversed(intervals)) == merged
    assert length_ns(merged) == len(covered(intervals))


@given(some=INTERVALS, others=INTERVALS)
def test_time_in_some_intervals_and_in_no_others(some: list[Interval], others: list[Interval]) -> None:
    found = [(int(a), int(b)) for a, b in without(intervals(some), intervals(others))]
    assert found == merge(found), "disjoint and in order"
    wanted = {t for a, b in some for t in range(a, b)} - {t for a, b in others for t in range(a, b)}
    assert {t for a, b in found for t in range(a, b)} == wanted
    assert length_ns(found) == len(wanted)


@given(some=INTERVALS, others=INTERVALS)
def test_parts_of_each_interval_that_lie_in_no_others(some: list[Interval], others: list[Interval]) -> None:
    whose, parts = outside(intervals(some), intervals(others))
    taken = {t for a, b in others for t in range(a, b)}
    for place, (begin, end) in enumerate(some):
        own = [(int(a), int(b)) for a, b in parts[whose == place]]
        assert own == merge(own), "disjoint and in order"
        assert {t for a, b in own for t in range(a, b)} == {t for t in range(begin, end) if t not in taken}


@given(INTERVALS, INTERVALS)
def test_overlap_is_the_intersection(first: list[Interval], second: list[Interval]) -> None:
    a, b = merge(first), merge(second)
    assert overlap_ns(a, b) == overlap_ns(b, a) == len(covered(first) & covered(second))
    assert overlap_ns(a, a) == length_ns(a)
    # |A or B| = |A| + |B| - |A and B|
    assert length_ns(merge(a + b)) == length_ns(a) + length_ns(b) - overlap_ns(a, b)


@given(INTERVALS, INTERVALS)
def test_hidden_and_exposed_make_up_the_communication(
    compute: list[Interval], transfers: list[Interval]
) -> None:
    numbers = communication(compute, transfers)
    in_flight, busy = covered(transfers), covered(compute)
    assert numbers.communication_ns == len(in_flight)
    assert numbers.exposed_ns == len(in_flight - busy)
    hidden = len(in_flight & busy)
    assert hidden + numbers.exposed_ns == numbers.communication_ns
    assert 0.0 <= numbers.hidden_fraction <= 1.0
    if in_flight:
        assert numbers.hidden_fraction == pytest.approx(hidden / len(in_flight))


@given(INTERVALS, INTERVALS, st.integers(-5, LONGEST), st.data())
def test_laws(compute: list[Interval], transfers: list[Interval], shift: int, data: st.DataObject) -> None:
    numbers = communication(compute, transfers)
    moved = [[(a + shift, b + shift) for a, b in intervals] for intervals in (compute, transfers)]
    assert communication(*moved) == numbers, "the origin of time does not matter"
    assert communication(compute * 2, transfers * 2) == numbers, "simultaneous spans count once"
    more = [*compute, data.draw(INTERVALS.filter(bool))[0]]
    assert communication(more, transfers).exposed_ns <= numbers.exposed_ns, "more compute hides more"
    assert communication([], transfers).exposed_ns == numbers.communication_ns, "nothing hides nothing"
    assert communication(transfers, transfers).exposed_ns == 0


@given(INTERVALS, st.integers(0, LONGEST))
def test_cutting_a_span_in_two_changes_nothing(intervals: list[Interval], cut: int) -> None:
    pieces = [
        piece
        for start, end in intervals
        for piece in ([(start, cut), (cut, end)] if start <= cut <= end else [(start, end)])
    ]
    assert merge(pieces) == merge(intervals)


def test_no_communication_counts_as_hidden() -> None:
    assert communication([(0, 5)], []) == Communication(communication_ns=0, exposed_ns=0)
    assert communication([], []).hidden_fraction == 1.0


def test_an_example() -> None:
    numbers = communication(compute=[(0, 10), (20, 30)], transfers=[(5, 15), (8, 25)])
    assert numbers == Communication(communication_ns=20, exposed_ns=10)
    assert numbers.hidden_fraction == 0.5


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
def test_overlap_numbers_add_up(
    compute: list[Interval], transfers: list[Interval], lengths: list[tuple[int, int]]
) -> None:
    blocks: list[tuple[Interval, bool]] = []
    now = 0
    for gap, length in lengths:
        blocks.append(((now + gap, now + gap + length), bool(length % 2)))
        now += gap + length
    beside = transfers[::2]
    numbers = numbers_of([(*i, None) for i in compute], transfers, blocks, beside)
    plain = communication(compute, transfers)
    assert numbers.links_together_ns == sum(end - begin for begin, end in merge(beside))
    assert numbers.communication_ns == plain.communication_ns
    assert numbers.exposed_ns == plain.exposed_ns
    assert numbers.hidden_fraction == pytest.approx(plain.hidden_fraction)
    inside = sum(length for _, length in lengths)
    whole = blocks[-1][0][1] - blocks[0][0][0] if blocks else 0
    assert numbers.bubble_ns == whole - inside
    assert 0 <= numbers.launch_gap_ns <= inside


def test_slowdown_is_what_compute_takes_more_in_paired_blocks() -> None:
    blocks = [((0, 100), True), ((100, 200), False)]
    # The last one runs alone: it was not slowed by overlap.
    compute: list[tuple[int, int, int | None]] = [(0, 30, 20), (40, 80, 35), (110, 190, 10)]
    assert numbers_of(compute, [(0, 90)], blocks).slowdown_ns == 15
    assert numbers_of([*compute, (80, 85, None)], [], blocks).slowdown_ns is None
    assert numbers_of([(110, 150, None)], [], blocks).slowdown_ns == 0


@given(INTERVALS)
def test_union_of_an_array_is_that_of_a_list(pairs: list[Interval]) -> None:
    assert [(int(a), int(b)) for a, b in union(intervals(pairs))] == merge(pairs)


def _span(operator: str, start: int, end: int, stream: Stream, rank: int = 0) -> Span:
    return Span(
        rank=rank,
        step=0,
        strand="alpha",
        micro_batch=0,
        chunk=0,
        layer=0,
        operator=operator,
        stream=stream,
        start_ns=start,
        end_ns=end,
    )


def test_traces_are_compared_operator_by_operator(tmp_path: Path) -> None:
    first = [_span("qkv", 0, 10_000, Stream.COMPUTE), _span("gather", 10_000, 30_000, Stream.INTRA)]
    second = [_span("qkv", 0, 12_000, Stream.COMPUTE), _span("gather", 2_000, 52_000, Stream.INTRA)]
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, spans in zip(paths, (first, second), strict=True):
        path.write_text(chrome_trace(spans), encoding="utf-8")
    compared = compare_traces(*map(read_trace, paths))
    assert [row.operator for row in compared.operators] == ["gather", "qkv"]
    gather, qkv = compared.operators
    assert (gather.first_ns, gather.second_ns, gather.difference_ns) == (20_000, 50_000, 30_000)
    assert qkv.difference_ns == 2_000
    assert compared.first.hidden_fraction == 0
    assert compared.second.hidden_fraction == pytest.approx(0.2)
    assert compared.second.step_ns == 52_000
    (tmp_path / "c.json").write_text('{"traceEvents": [{"ph": "X", "name": "other"}]}', encoding="utf-8")
    for name, message in (("missing.json", "cannot be read"), ("c.json", "not one of Braid's")):
        with pytest.raises(ValueError, match=message):
            read_trace(tmp_path / name)
