"""Interval arithmetic and the communication numbers, against counting nanosecond by nanosecond."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.scheduling.trace import Communication, Interval, communication, length_ns, merge, overlap_ns

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
