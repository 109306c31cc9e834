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
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from braid.scheduling.cost.physics import STREAM_PAIRS, FloatArray, fluid_ns
from braid.scheduling.plan.strands import PairProblem, StrandGraph, bits

IntArray = NDArray[np.int64]

MOST_PREFIXES = 512
"""Of a graph whose pairings are all searched: beyond, seconds become minutes."""


Segment = tuple[int, int]
"""Masks of the forward and of the backward operators that run together; one side may be empty."""


class Pairing(NamedTuple):
    """Segments in order and the time they take."""

    segments: tuple[Segment, ...]
    ns: float


def may_join(graph: StrandGraph, op: int, others: int) -> bool:
    """Whether an operator can be in flight with others: both it and what it needs of them compute."""
    needed = graph.ancestors[op] & others
    return not needed or (graph.streams[op] == 0 and all(graph.streams[o] == 0 for o in bits(needed)))


def segment_ns(problem: PairProblem, forward: int, backward: int) -> float:
    """P(i, j) of equation 2: time of two segments (masks) together; without a partner, of one alone.

    The time is that of three streams with the segments' loads; a stream is slowed down by another by
    the mean of their operators' slowdowns, weighted by the operators' times. For two single operators it is
    the profiled time of the pair.
    """
    operators = list(bits(forward | backward << len(problem.forward)))
    solo, streams = problem.solo_ns, problem.streams
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


def pairing_of(problem: PairProblem, segments: Sequence[Segment]) -> Pairing:
    """A given sequence of paired segments with its cost."""
    return Pairing(tuple(segments), sum(segment_ns(problem, f, b) for f, b in segments))


def pair(problem: PairProblem) -> Pairing:
    """The cheapest pairing over all orders and segmentations: the shortest path over pairs of prefixes.

    ``table[f, b]`` is the least time to come to prefix f of the forward pass and b of the backward pass. It
    is filled row by row, then the way back goes along what attained the minimum.
    """
    count = len(problem.forward)
    f = _Segments(problem.forward, problem.slowdown[:count, :count])
    b = _Segments(problem.backward, problem.slowdown[count:, count:])
    of_forward, of_backward = problem.slowdown[:count, count:], problem.slowdown[count:, :count]
    sizes = np.array([mask.bit_count() for mask in b.prefixes])[b.source]
    levels = [b.by_target(np.flatnonzero(sizes == size)) for size in np.unique(sizes)]
    everything = b.by_target(np.arange(len(b.masks)))
    beside: dict[int, FloatArray] = {}

    def together(segment: int) -> FloatArray:
        """P(i, j) of one forward segment and every backward segment."""
        if (mask := f.masks[segment]) not in beside:
            loads, sums = f.loads[segment] + b.loads, f.sums[segment] + b.sums
            for place, (s, t) in enumerate(STREAM_PAIRS):
                sums[:, place] += b.on[t] @ (f.on[s][segment] @ of_forward)
                sums[:, place] += b.on[s] @ (of_backward @ f.on[t][segment])
            beside[mask] = fluid_ns(loads, _means(sums, loads)) + problem.barrier_ns
        return beside[mask]

    table = np.full((len(f.prefixes), len(b.prefixes)), np.inf)
    table[0, 0] = 0.0
    for place, row in enumerate(table):
        for rows, starts, targets in levels:  # the backward strand runs alone
            reached = np.minimum.reduceat(row[b.source[rows]] + b.alone_ns[rows], starts)
            row[targets] = np.minimum(row[targets], reached)
        for segment in map(int, np.flatnonzero(f.source == place)):
            target = table[f.target[segment]]
            np.minimum(target, row + f.alone_ns[segment], out=target)
            rows, starts, targets = everything
            reached = np.minimum.reduceat(row[b.source] + together(segment), starts)
            target[targets] = np.minimum(target[targets], reached)

    segments: list[Segment] = []
    at_f, at_b = len(f.prefixes) - 1, len(b.prefixes) - 1
    while at_f or at_b:
        choices: list[tuple[float, int, int, int, int]] = []
        into_b = [(int(n), int(b.source[n]), b.masks[n]) for n in np.flatnonzero(b.target == at_b)]
        for n, source, mask in into_b:
            choices.append((table[at_f, source] + b.alone_ns[n], at_f, source, 0, mask))
        for segment in map(int, np.flatnonzero(f.target == at_f)):
            before, mask_f = int(f.source[segment]), f.masks[segment]
            choices.append((table[before, at_b] + f.alone_ns[segment], before, at_b, mask_f, 0))
            for n, source, mask in into_b:
                ns = table[before, source] + together(segment)[n]
                choices.append((ns, before, source, mask_f, mask))
        _, at_f, at_b, mask_f, mask_b = min(choices)
        segments.append((mask_f, mask_b))
    return pairing_of(problem, segments[::-1])


class _Segments:
    """All segments of a graph as arrays, sorted by target.

    A row leads from prefix ``source`` to prefix ``target`` by the operators of ``masks``. ``on[s]`` holds the
    solo times of a segment's operators on stream s (segments, operators), else 0; ``loads`` their sums per
    stream; ``sums`` those of time x time x slowdown within a segment, per pair of streams; ``alone_ns`` what
    it takes by itself.
    """

    def __init__(self, graph: StrandGraph, slowdown: FloatArray) -> None:
        self.prefixes = _prefixes(graph)
        place = {mask: n for n, mask in enumerate(self.prefixes)}
        rows: list[tuple[int, int, int]] = []
        for done in self.prefixes:
            seen: set[int] = set()
            stack = [0]
            while stack:
                taken = stack.pop()
                for op in graph.ready(done | taken):
                    larger = taken | 1 << op
                    if larger not in seen and done | larger in place and may_join(graph, op, taken):
                        seen.add(larger)
                        stack.append(larger)
                        rows.append((place[done | larger], place[done], larger))
        rows.sort()
        self.target = np.array([row[0] for row in rows], dtype=np.int64)
        self.source = np.array([row[1] for row in rows], dtype=np.int64)
        self.masks = tuple(row[2] for row in rows)
        weights = np.zeros((len(rows), len(graph)))
        for n, mask in enumerate(self.masks):
            for op in bits(mask):
                weights[n, op] = graph.solo_ns[op]
        self.on: list[FloatArray] = [weights * (np.array(graph.streams) == s) for s in range(3)]
        self.loads = np.stack([own.sum(axis=1) for own in self.on], axis=1)
        within = [((self.on[s] @ slowdown) * self.on[t]).sum(axis=1) for s, t in STREAM_PAIRS]
        self.sums = np.stack(within, axis=1)
        self.alone_ns = fluid_ns(self.loads, _means(self.sums, self.loads))

    def by_target(self, rows: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Some rows, where runs of equal targets start among them, and these targets."""
        starts = np.flatnonzero(np.diff(self.target[rows], prepend=-1))
        return rows, starts, self.target[rows][starts]


def _means(sums: FloatArray, loads: FloatArray) -> FloatArray:
    """Weighted mean slowdowns per pair of streams from sums of products; 0 where a stream is empty."""
    products = np.stack([loads[:, a] * loads[:, b] for a, b in STREAM_PAIRS], axis=1)
    return np.divide(sums, products, out=np.zeros_like(sums), where=products > 0)


def _prefixes(graph: StrandGraph) -> tuple[int, ...]:
    """All masks that some order begins with (down-sets), smaller ones first.

    Where branches side by side (shared experts) make them too many, those of one order of weight gradients,
    which nothing waits for, and one of all others.
    """
    found = {0}
    frontier = found
    while frontier:
        frontier = {done | 1 << op for done in frontier for op in graph.ready(done)}
        found = found | frontier
    if len(found) > MOST_PREFIXES:
        for kind in (graph.weights, graph.all & ~graph.weights):
            in_order = {kind & ((1 << op) - 1) for op in range(len(graph) + 1)}
            found = {mask for mask in found if mask & kind in in_order}
    return tuple(sorted(found, key=lambda mask: (mask.bit_count(), mask)))
