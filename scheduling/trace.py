"""Spans and the numbers made of them: the one schema of simulator and runtime (design section 7)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from braid.scheduling.operators import Stream

Interval = tuple[int, int]
"""Start and end in nanoseconds, end excluded."""

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Span:
    """One operator's execution on one rank."""

    rank: int
    step: int
    strand: str
    micro_batch: int
    chunk: int
    layer: int
    operator: str
    stream: Stream
    start_ns: int
    end_ns: int
    bytes: int = 0
    flops: int = 0


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals as disjoint ones in order, with gaps between them; empty ones vanish."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif start < end:
            merged.append((start, end))
    return merged


def length_ns(disjoint: Sequence[Interval]) -> int:
    """Total length of disjoint intervals."""
    return sum(end - start for start, end in disjoint)


def overlap_ns(first: Sequence[Interval], second: Sequence[Interval]) -> int:
    """Length of the intersection of two unions, each disjoint and in order."""
    total = i = j = 0
    while i < len(first) and j < len(second):
        start = max(first[i][0], second[j][0])
        end = min(first[i][1], second[j][1])
        total += max(0, end - start)
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Time with some communication in flight, and the part of it during which no compute operator ran."""

    communication_ns: int
    exposed_ns: int

    @property
    def hidden_fraction(self) -> float:
        """Share of the communication that compute hid; 1.0 where there was none."""
        if not self.communication_ns:
            return 1.0
        return 1.0 - self.exposed_ns / self.communication_ns


def communication(compute: Iterable[Interval], transfers: Iterable[Interval]) -> Communication:
    """The communication numbers of one rank and step from its spans."""
    in_flight = merge(transfers)
    hidden = overlap_ns(in_flight, merge(compute))
    total = length_ns(in_flight)
    return Communication(communication_ns=total, exposed_ns=total - hidden)


@dataclass(frozen=True, kw_only=True)
class OverlapNumbers:
    """What overlap came to on one rank in one step (design section 7); nanoseconds."""

    communication_ns: int
    hidden_ns: int
    slowdown_ns: int | None
    """Compute in paired blocks beyond the same operators' solo times; None without a profile."""
    launch_gap_ns: int
    """Inside blocks, with nothing running."""
    bubble_ns: int
    """Between blocks."""
    compute_ns: int

    @property
    def exposed_ns(self) -> int:
        """Communication during which nothing was computed."""
        return self.communication_ns - self.hidden_ns

    @property
    def hidden_fraction(self) -> float:
        """Share of the communication that compute hid; 1.0 where there was none."""
        return self.hidden_ns / self.communication_ns if self.communication_ns else 1.0


def overlap_numbers(
    compute: IntArray, solo_ns: IntArray, transfers: IntArray, blocks: IntArray, paired: BoolArray
) -> OverlapNumbers:
    """The numbers of one rank and step, from intervals: arrays (n, 2) of begins and ends in nanoseconds.

    compute: of compute operators; ``solo_ns`` (n,): what they take alone, -1 where that is not known. blocks:
    of all blocks; ``paired`` (n,): which are paired ones.
    """
    busy, in_flight, inside = union(compute), union(transfers), union(blocks)
    running = union(np.concatenate([busy, in_flight]))
    bubble = int(inside[-1, 1] - inside[0, 0] - _length(inside)) if len(inside) else 0
    return OverlapNumbers(
        communication_ns=_length(in_flight),
        hidden_ns=_length(in_flight) + _length(busy) - _length(running),
        slowdown_ns=_slowdown_ns(compute, solo_ns, blocks[paired]),
        launch_gap_ns=_length(union(np.concatenate([inside, running]))) - _length(running),
        bubble_ns=bubble,
        compute_ns=_length(busy),
    )


def union(intervals: IntArray) -> IntArray:
    """Intervals (n, 2) as disjoint ones in order, with gaps between them; empty ones vanish. As `merge`."""
    found = intervals[intervals[:, 1] > intervals[:, 0]]
    if not len(found):
        return np.zeros((0, 2), np.int64)
    found = found[np.argsort(found[:, 0], kind="stable")]
    reached = np.maximum.accumulate(found[:, 1])
    begins = np.flatnonzero(np.concatenate([[True], found[1:, 0] > reached[:-1]]))
    ends = np.concatenate([begins[1:] - 1, [len(found) - 1]])
    return np.stack([found[begins, 0], reached[ends]], axis=1)


def intervals(pairs: Iterable[Interval]) -> IntArray:
    """Pairs of begin and end as an array (n, 2)."""
    return np.array(list(pairs), np.int64).reshape(-1, 2)


def _length(disjoint: IntArray) -> int:
    return int((disjoint[:, 1] - disjoint[:, 0]).sum())


def _slowdown_ns(compute: IntArray, solo_ns: IntArray, paired: IntArray) -> int | None:
    """None if the solo time of some operator in a paired block is not known."""
    if not len(paired):
        return 0
    paired = paired[np.argsort(paired[:, 0])]
    place = np.searchsorted(paired[:, 0], compute[:, 0], side="right") - 1
    inside = (place >= 0) & (compute[:, 0] < paired[place, 1])
    if (solo_ns[inside] < 0).any():
        return None
    return int((compute[inside, 1] - compute[inside, 0] - solo_ns[inside]).sum())
