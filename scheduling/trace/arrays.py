"""Computes unions of intervals, and overlap numbers from them (docs/design.md, Numbers of overlap)."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from braid.scheduling.trace.spans import OverlapNumbers

IntArray = NDArray[np.int64] | NDArray[np.float64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


def overlap_numbers(
    compute: IntArray,
    solo_ns: IntArray,
    links: Sequence[IntArray],
    blocks: IntArray,
    paired: BoolArray,
    waits: IntArray | None = None,
    axes: Mapping[str, IntArray] = MappingProxyType({}),
) -> OverlapNumbers:
    """Compute the numbers of one rank and step from intervals: arrays (n, 2) of begins and ends in
    nanoseconds.

    ``compute``: compute operators; ``solo_ns`` (n,): their times alone, -1 if not known. ``links``: transfers
    inside nodes, and transfers between nodes. ``blocks``: all blocks; ``paired`` (n,): which blocks are
    paired. ``waits``: from this rank's issue of a collective to its last member's issue. ``axes``: the
    transfers of each axis.
    """
    each = [union(link) for link in links]
    transfers: IntArray = np.concatenate(each)  # type: ignore[assignment]
    busy, in_flight, inside = union(compute), union(transfers), union(blocks)
    running = union(np.concatenate([busy, in_flight]))
    occupied = running if waits is None else union(np.concatenate([running, waits]))
    bubble = int(inside[-1, 1] - inside[0, 0] - length(inside)) if len(inside) else 0
    return OverlapNumbers(
        communication_ns=length(in_flight),
        hidden_ns=length(in_flight) + length(busy) - length(running),
        slowdown_ns=_slowdown_ns(compute, solo_ns, blocks[paired]),
        launch_gap_ns=length(union(np.concatenate([inside, occupied]))) - length(occupied),
        bubble_ns=bubble,
        compute_ns=length(busy),
        links_together_ns=sum(map(length, each)) - length(in_flight),
        waiting_ns=length(occupied) - length(running),
        exposed_by_axis_ns={
            axis: length(union(np.concatenate([busy, moves]))) - length(busy) for axis, moves in axes.items()
        },
    )


def union(intervals: IntArray) -> IntArray:
    """Merge intervals (n, 2) to disjoint ones in order, with gaps between them; empty intervals vanish."""
    ordered = intervals[intervals[:, 1] > intervals[:, 0]]
    if not len(ordered):
        return ordered
    ordered = ordered[np.argsort(ordered[:, 0], kind="stable")]
    reached = np.maximum.accumulate(ordered[:, 1])
    begins = np.flatnonzero(np.concatenate([[True], ordered[1:, 0] > reached[:-1]]))
    ends = np.concatenate([begins[1:] - 1, [len(ordered) - 1]])
    return np.stack([ordered[begins, 0], reached[ends]], axis=1)


def without(some: IntArray, others: IntArray) -> IntArray:
    """Return the time that lies in ``some`` intervals (n, 2) but not in ``others`` (m, 2), as disjoint
    intervals in order."""
    return outside(union(some), others)[1]


def outside(some: IntArray, others: IntArray) -> tuple[NDArray[np.int64], IntArray]:
    """Return the parts of each of ``some`` intervals (n, 2), which may overlap, that lie outside ``others``
    (m, 2).

    The result is the interval's index for each part, (p,), and the parts, (p, 2), in that order.
    """
    busy, numbers = union(others), np.flatnonzero(some[:, 1] > some[:, 0])
    some = some[numbers]
    ends = np.array([np.iinfo(np.int64).min, np.iinfo(np.int64).max])
    gaps = np.stack([np.append(ends[:1], busy[:, 1]), np.append(busy[:, 0], ends[1:])], axis=1)
    first = np.searchsorted(gaps[:, 1], some[:, 0], side="right")
    counts = np.maximum(0, np.searchsorted(gaps[:, 0], some[:, 1], side="left") - first)
    whose = np.repeat(np.arange(len(some)), counts)
    gap = np.arange(len(whose)) - np.repeat(np.cumsum(counts) - counts, counts) + first[whose]
    begins, lasts = np.maximum(some[whose, 0], gaps[gap, 0]), np.minimum(some[whose, 1], gaps[gap, 1])
    return numbers[whose], np.stack([begins, lasts], axis=1)


def shares(disjoint: IntArray, edges: FloatArray) -> FloatArray:
    """Return the length of ordered disjoint intervals (n, 2) within each column between edges (columns + 1,),
    as share of the column."""
    if not len(disjoint):
        return np.zeros(len(edges) - 1)
    lengths = np.concatenate([[0], np.cumsum(disjoint[:, 1] - disjoint[:, 0])])
    begun = np.searchsorted(disjoint[:, 0], edges, side="right")
    over = np.maximum(0, disjoint[np.maximum(begun - 1, 0), 1] - edges)
    covered_before = lengths[begun] - np.where(begun > 0, over, 0)
    filled: FloatArray = np.diff(covered_before) / np.diff(edges)
    return filled


def length(disjoint: IntArray) -> int:
    """Return the total length of disjoint intervals (n, 2)."""
    return int((disjoint[:, 1] - disjoint[:, 0]).sum())


def _slowdown_ns(compute: IntArray, solo_ns: IntArray, paired: IntArray) -> int | None:
    """Return compute time in paired blocks beyond solo times; None if the solo time of some operator there is
    not known."""
    if not len(paired):
        return 0
    paired = paired[np.argsort(paired[:, 0])]
    block = np.searchsorted(paired[:, 0], compute[:, 0], side="right") - 1
    inside = (block >= 0) & (compute[:, 0] < paired[block, 1])
    if (solo_ns[inside] < 0).any():
        return None
    return int((compute[inside, 1] - compute[inside, 0] - solo_ns[inside]).sum())
