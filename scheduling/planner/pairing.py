"""Pairing by dynamic programming, exact over all orders and all segmentations (DHelix section 4.2).

A segment is a set of operators that can be in flight together: between two barriers nothing waits, so within
one strand's segment nothing needs a collective's result, and no collective needs a result (compute operators
run one after the other; independent ones of different streams are DHelix's self-overlapping operators).
Paired segments start together and end with a barrier.

The paper enumerates orders, cuts each pair of orders into segments and runs equation 2 on each. All of them
together are the paths through the lattice of prefixes (down-sets) of both graphs: a segment leads from one
prefix to a larger one. So one shortest path over pairs of prefixes gives the best of all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from braid.scheduling.physics import STREAM_PAIRS, fluid_ns
from braid.scheduling.planner.strands import (
    FloatArray,
    PairProblem,
    StrandGraph,
    bits,
)

IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class PairedSegment:
    """Operators of each strand that run together; one side may be empty."""

    forward: tuple[str, ...]
    backward: tuple[str, ...]
    ns: float

    @property
    def paired(self) -> bool:
        """Whether both strands take part."""
        return bool(self.forward and self.backward)


MOST_PREFIXES = 512
"""Of a graph whose pairings are all searched: beyond, seconds become minutes."""


@dataclass(frozen=True, kw_only=True)
class Pairing:
    """Segments in order and the time they take."""

    segments: tuple[PairedSegment, ...]
    ns: float


@dataclass(frozen=True)
class _Segments:
    """All segments of a graph as arrays; a row leads from prefix ``source`` to prefix ``target``."""

    prefixes: tuple[int, ...]
    source: IntArray
    target: IntArray
    masks: tuple[int, ...]
    weights: FloatArray
    """(segments, operators): solo time of the operators that belong to the segment, else 0."""
    streams: tuple[int, ...]

    def on(self, stream: int) -> FloatArray:
        """Weights of the operators of a stream alone."""
        kept: FloatArray = self.weights * (np.array(self.streams) == stream)
        return kept


def pair(problem: PairProblem) -> Pairing:
    """The cheapest pairing over all orders and segmentations."""
    return _Search(problem).best()


def is_segment(graph: StrandGraph, mask: int) -> bool:
    """Whether the operators of a mask can be in flight together."""
    return all(_may_join(graph, op, mask) for op in bits(mask))


def _may_join(graph: StrandGraph, op: int, others: int) -> bool:
    """Whether an operator can be in flight with others: both it and what it needs of them compute."""
    needed = graph.ancestors[op] & others
    return not needed or (graph.streams[op] == 0 and all(graph.streams[o] == 0 for o in bits(needed)))


def segment_ns(problem: PairProblem, forward: int, backward: int) -> float:
    """P(i, j) of equation 2: time of two segments (masks) together; without a partner, of one alone.

    The time is that of three streams with the segments' loads; a stream is slowed down by another by
    the mean of their operators' slowdowns, weighted by the operators' times. For two single operators it is
    the profiled time of the pair.
    """
    count = len(problem.forward)
    operators = [*bits(forward), *(count + op for op in bits(backward))]
    solo = (*problem.forward.solo_ns, *problem.backward.solo_ns)
    streams = (*problem.forward.streams, *problem.backward.streams)
    loads = np.zeros((1, 3))
    for op in operators:
        loads[0, streams[op]] += solo[op]
    means = np.zeros((1, len(STREAM_PAIRS)))
    for place, (a, b) in enumerate(STREAM_PAIRS):
        if loads[0, a] and loads[0, b]:
            means[0, place] = sum(
                solo[i] * solo[j] * problem.slowdown[i, j]
                for i in operators
                for j in operators
                if streams[i] == a and streams[j] == b
            ) / (loads[0, a] * loads[0, b])
    barrier = problem.barrier_ns if forward and backward else 0.0
    return float(fluid_ns(loads, means)[0]) + barrier


def pairing_of(problem: PairProblem, masks: Sequence[tuple[int, int]]) -> Pairing:
    """A given sequence of paired segments with its cost."""
    segments = tuple(
        PairedSegment(
            forward=tuple(problem.forward.names[op] for op in bits(f)),
            backward=tuple(problem.backward.names[op] for op in bits(b)),
            ns=segment_ns(problem, f, b),
        )
        for f, b in masks
    )
    return Pairing(segments=segments, ns=sum(segment.ns for segment in segments))


class _Search:
    """Shortest path over pairs of prefixes, one row (a prefix of the forward pass) after the other."""

    def __init__(self, problem: PairProblem) -> None:
        self._problem = problem
        self._f = _segments(problem.forward)
        self._b = _segments(problem.backward)
        count = len(problem.forward)
        self._of_forward = problem.slowdown[:count, count:]
        self._of_backward = problem.slowdown[count:, :count]
        self._own_f = self._own(self._f, problem.slowdown[:count, :count])
        self._own_b = self._own(self._b, problem.slowdown[count:, count:])
        self._loads_f = np.stack([self._f.on(s).sum(axis=1) for s in range(3)], axis=1)
        self._loads_b = np.stack([self._b.on(s).sum(axis=1) for s in range(3)], axis=1)
        self._b_on = [self._b.on(s) for s in range(3)]
        self._f_on = [self._f.on(s) for s in range(3)]
        self._solo_f = fluid_ns(self._loads_f, _means(self._own_f, self._loads_f))
        self._solo_b = fluid_ns(self._loads_b, _means(self._own_b, self._loads_b))
        self._starts = np.flatnonzero(np.diff(self._b.target, prepend=-1))
        self._ends = self._b.target[self._starts]
        self._levels = self._level_slices()

    @staticmethod
    def _own(segments: _Segments, slowdown: FloatArray) -> FloatArray:
        """Sums of time x time x slowdown within each segment, per directed pair of streams."""
        sums = [((segments.on(a) @ slowdown) * segments.on(b)).sum(axis=1) for a, b in STREAM_PAIRS]
        return np.stack(sums, axis=1)

    def _level_slices(self) -> list[tuple[IntArray, IntArray, IntArray]]:
        """Segments of the backward pass by the size of their source, with the bounds of equal targets."""
        sizes = np.array([mask.bit_count() for mask in self._b.prefixes])[self._b.source]
        levels = []
        for size in np.unique(sizes):
            rows = np.flatnonzero(sizes == size)
            starts = np.flatnonzero(np.diff(self._b.target[rows], prepend=-1))
            levels.append((rows, starts, self._b.target[rows][starts]))
        return levels

    def _close(self, row: FloatArray) -> None:
        """Let the backward strand run alone from every state of a row."""
        for rows, starts, targets in self._levels:
            reached = np.minimum.reduceat(row[self._b.source[rows]] + self._solo_b[rows], starts)
            row[targets] = np.minimum(row[targets], reached)

    def _together(self, segment: int) -> FloatArray:
        """P(i, j) of one forward segment and every backward segment."""
        loads = self._loads_f[segment] + self._loads_b
        sums = self._own_f[segment] + self._own_b
        for place, (a, b) in enumerate(STREAM_PAIRS):
            sums[:, place] += self._b_on[b] @ (self._f_on[a][segment] @ self._of_forward)
            sums[:, place] += self._b_on[a] @ (self._of_backward @ self._f_on[b][segment])
        return fluid_ns(loads, _means(sums, loads)) + self._problem.barrier_ns

    def best(self) -> Pairing:
        """Fill the table forwards, then walk back along what attained the minimum."""
        table = np.full((len(self._f.prefixes), len(self._b.prefixes)), np.inf)
        table[0, 0] = 0.0
        together: dict[int, FloatArray] = {}
        by_source: dict[int, list[int]] = {}
        for n, source in enumerate(self._f.source):
            by_source.setdefault(int(source), []).append(n)
        cache: dict[int, FloatArray] = {}
        for place in range(len(self._f.prefixes)):
            row = table[place]
            self._close(row)
            for segment in by_source.get(place, ()):
                mask = self._f.masks[segment]
                if mask not in cache:
                    cache[mask] = self._together(segment)
                together[segment] = cache[mask]
                target = table[self._f.target[segment]]
                np.minimum(target, row + self._solo_f[segment], out=target)
                reached = np.minimum.reduceat(row[self._b.source] + cache[mask], self._starts)
                target[self._ends] = np.minimum(target[self._ends], reached)
        return pairing_of(self._problem, self._walk_back(table, together))

    def _walk_back(self, table: FloatArray, together: dict[int, FloatArray]) -> list[tuple[int, int]]:
        masks: list[tuple[int, int]] = []
        f, b = len(self._f.prefixes) - 1, len(self._b.prefixes) - 1
        while f or b:
            into_b = np.flatnonzero(self._b.target == b)
            choices: list[tuple[float, int, int, int, int]] = []
            for n in into_b:
                source = int(self._b.source[n])
                choices.append((table[f, source] + self._solo_b[n], f, source, 0, self._b.masks[n]))
            for segment in map(int, np.flatnonzero(self._f.target == f)):
                before, mask = int(self._f.source[segment]), self._f.masks[segment]
                choices.append((table[before, b] + self._solo_f[segment], before, b, mask, 0))
                for n in into_b:
                    source = int(self._b.source[n])
                    ns = table[before, source] + together[segment][n]
                    choices.append((ns, before, source, mask, self._b.masks[n]))
            _, f, b, mask_f, mask_b = min(choices)
            masks.append((mask_f, mask_b))
        return masks[::-1]


def _means(sums: FloatArray, loads: FloatArray) -> FloatArray:
    """Weighted mean slowdowns per pair of streams from sums of products; 0 where a stream is empty."""
    products = np.stack([loads[:, a] * loads[:, b] for a, b in STREAM_PAIRS], axis=1)
    return np.divide(sums, products, out=np.zeros_like(sums), where=products > 0)


def _prefixes(graph: StrandGraph) -> tuple[int, ...]:
    """All prefixes; where branches side by side (shared experts) make them too many, those of one order of
    weight gradients, which nothing waits for, and one of all others."""
    if len(graph.prefixes) <= MOST_PREFIXES:
        return graph.prefixes
    kinds = (graph.weights, graph.all & ~graph.weights)
    in_order = [{kind & ((1 << op) - 1) for op in range(len(graph) + 1)} for kind in kinds]
    return tuple(
        mask
        for mask in graph.prefixes
        if all(mask & kind in some for kind, some in zip(kinds, in_order, strict=True))
    )


def _segments(graph: StrandGraph) -> _Segments:
    """Every segment from every prefix, sorted by target."""
    prefixes = _prefixes(graph)
    place = {mask: n for n, mask in enumerate(prefixes)}
    rows: list[tuple[int, int, int]] = []
    for done in prefixes:
        seen: set[int] = set()
        stack = [0]
        while stack:
            taken = stack.pop()
            for op in graph.ready(done | taken):
                larger = taken | 1 << op
                if larger in seen or done | larger not in place or not _may_join(graph, op, taken):
                    continue
                seen.add(larger)
                stack.append(larger)
                rows.append((place[done | larger], place[done], larger))
    rows.sort()
    weights = np.zeros((len(rows), len(graph)))
    for n, (_, _, mask) in enumerate(rows):
        for op in bits(mask):
            weights[n, op] = graph.solo_ns[op]
    return _Segments(
        prefixes=prefixes,
        source=np.array([row[1] for row in rows], dtype=np.int64),
        target=np.array([row[0] for row in rows], dtype=np.int64),
        masks=tuple(row[2] for row in rows),
        weights=weights,
        streams=graph.streams,
    )
