"""Pairing by dynamic programming, exact over all orders and all segmentations (DHelix section 4.2).

A segment is a set of operators that can be in flight together: between two barriers no operator waits, so
within one strand's segment no operator needs a collective's result, and no collective needs a result (compute
operators run one after the other; independent operators of different streams are DHelix's self-overlapping
operators). Paired segments start together and end with a barrier.

The paper enumerates orders, cuts each pair of orders into segments and runs equation 2 on each. All of these
together are the paths through the lattice of prefixes (down-sets) of both graphs: a segment leads from a
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
"""Number of a graph's prefixes above which fewer are searched, because seconds would become minutes."""


Segment = tuple[int, int]
"""Bit masks of the forward operators and of the backward operators that run together; either may be 0."""


class Pairing(NamedTuple):
    """Sequence of segments in which two passes run, and the time that it takes in ns."""

    segments: tuple[Segment, ...]
    ns: float


def may_join(graph: StrandGraph, op: int, others: int) -> bool:
    """Return whether an operator can be in the segment of ``others`` (a mask) without a wait between them.

    It can if it depends on none of them, or if it and all of them that it depends on are compute operators.
    """
    needed = graph.ancestors[op] & others
    return not needed or (graph.streams[op] == 0 and all(graph.streams[o] == 0 for o in bits(needed)))


def segment_ns(problem: PairProblem, forward: int, backward: int) -> float:
    """Return P(i, j) of equation 2: the ns of a forward and a backward segment (masks) run together.

    If one mask is 0, the other segment runs alone.

    Three streams carry the segments' loads; a stream is slowed by another by the mean of their operators'
    slowdowns, weighted by the operators' times. For two single operators the result is the profiled time of
    the pair.
    """
    operators = list(bits(forward | backward << len(problem.forward)))
    solo, streams = problem.solo_ns, problem.streams
    loads = np.zeros((1, 3))
    for op in operators:
        loads[0, streams[op]] += solo[op]
    means = np.zeros((1, len(STREAM_PAIRS)))
    for index, (a, b) in enumerate(STREAM_PAIRS):
        if loads[0, a] and loads[0, b]:
            means[0, index] = sum(
                solo[i] * solo[j] * problem.slowdown[i, j]
                for i in operators
                for j in operators
                if streams[i] == a and streams[j] == b
            ) / (loads[0, a] * loads[0, b])
    barrier = problem.barrier_ns if forward and backward else 0.0
    return float(fluid_ns(loads, means)[0]) + barrier


def pairing_of(problem: PairProblem, segments: Sequence[Segment]) -> Pairing:
    """Return the pairing that consists of these segments, with its time."""
    return Pairing(tuple(segments), sum(segment_ns(problem, f, b) for f, b in segments))


def pair(problem: PairProblem) -> Pairing:
    """Return the cheapest pairing over all orders and segmentations: a shortest path over pairs of prefixes.

    ``table[f, b]`` is the least time to reach prefix f of the forward pass and b of the backward pass. It is
    filled row by row; then the path is read backwards along the steps that attained the minimum.
    """
    count = len(problem.forward)
    f = _Segments(problem.forward, problem.slowdown[:count, :count])
    b = _Segments(problem.backward, problem.slowdown[count:, count:])
    of_forward, of_backward = problem.slowdown[:count, count:], problem.slowdown[count:, :count]
    sizes = np.array([mask.bit_count() for mask in b.prefixes])[b.source]
    levels = [b.by_target(np.flatnonzero(sizes == size)) for size in np.unique(sizes)]
    everything = b.by_target(np.arange(len(b.masks)))
    paired_ns: dict[int, FloatArray] = {}

    def together(segment: int) -> FloatArray:
        """Return P(i, j), in ns, for one forward segment i and an array of all backward segments j."""
        if (mask := f.masks[segment]) not in paired_ns:
            loads, sums = f.loads[segment] + b.loads, f.sums[segment] + b.sums
            for index, (s, t) in enumerate(STREAM_PAIRS):
                sums[:, index] += b.on[t] @ (f.on[s][segment] @ of_forward)
                sums[:, index] += b.on[s] @ (of_backward @ f.on[t][segment])
            paired_ns[mask] = fluid_ns(loads, _means(sums, loads)) + problem.barrier_ns
        return paired_ns[mask]

    table = np.full((len(f.prefixes), len(b.prefixes)), np.inf)
    table[0, 0] = 0.0
    for prefix, row in enumerate(table):
        for rows, starts, targets in levels:  # the backward strand runs alone
            reached = np.minimum.reduceat(row[b.source[rows]] + b.alone_ns[rows], starts)
            row[targets] = np.minimum(row[targets], reached)
        for segment in map(int, np.flatnonzero(f.source == prefix)):
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
    """All segments of a graph as arrays with one row per segment, sorted by target.

    Segment n leads from the prefix ``source[n]`` to the prefix ``target[n]`` by the operators in the mask
    ``masks[n]``. ``on[s]``, of shape (segments, operators), holds the solo times of operators on stream s and
    else 0; ``loads`` has their sums per stream; ``sums`` has the sums of time x time x slowdown per pair of
    streams; ``alone_ns`` is the time of a segment by itself.
    """

    def __init__(self, graph: StrandGraph, slowdown: FloatArray) -> None:
        self.prefixes = _prefixes(graph)
        number = {mask: n for n, mask in enumerate(self.prefixes)}
        rows: list[tuple[int, int, int]] = []
        for done in self.prefixes:
            seen: set[int] = set()
            stack = [0]
            while stack:
                taken = stack.pop()
                for op in graph.ready(done | taken):
                    larger = taken | 1 << op
                    if larger not in seen and done | larger in number and may_join(graph, op, taken):
                        seen.add(larger)
                        stack.append(larger)
                        rows.append((number[done | larger], number[done], larger))
        rows.sort()
        self.target = np.array([row[0] for row in rows], dtype=np.int64)
        self.source = np.array([row[1] for row in rows], dtype=np.int64)
        self.masks = tuple(row[2] for row in rows)
        weights = np.zeros((len(rows), len(graph)))
        for n, mask in enumerate(self.masks):
            for op in bits(mask):
                weights[n, op] = graph.solo_ns[op]
        self.on: list[FloatArray] = [weights * (np.array(graph.streams) == s) for s in range(3)]
        self.loads = np.stack([times.sum(axis=1) for times in self.on], axis=1)
        within = [((self.on[s] @ slowdown) * self.on[t]).sum(axis=1) for s, t in STREAM_PAIRS]
        self.sums = np.stack(within, axis=1)
        self.alone_ns = fluid_ns(self.loads, _means(self.sums, self.loads))

    def by_target(self, rows: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Return ``rows``, the indices in ``rows`` at which a new target begins, and the targets
        themselves."""
        starts = np.flatnonzero(np.diff(self.target[rows], prepend=-1))
        return rows, starts, self.target[rows][starts]


def _means(sums: FloatArray, loads: FloatArray) -> FloatArray:
    """Return the time-weighted mean slowdown of each segment per pair of streams; 0 if a stream is empty."""
    products = np.stack([loads[:, a] * loads[:, b] for a, b in STREAM_PAIRS], axis=1)
    return np.divide(sums, products, out=np.zeros_like(sums), where=products > 0)


def _prefixes(graph: StrandGraph) -> tuple[int, ...]:
    """Return the masks of all operator sets with which a valid order can begin (down-sets), smallest first.

    If parallel branches (shared experts) make these too many, only sets are kept in which weight gradients,
    for which no operator waits, keep the graph's order among themselves, and other operators do too.
    """
    prefixes = {0}
    frontier = prefixes
    while frontier:
        frontier = {done | 1 << op for done in frontier for op in graph.ready(done)}
        prefixes = prefixes | frontier
    if len(prefixes) > MOST_PREFIXES:
        for kind in (graph.weights, graph.all & ~graph.weights):
            in_order = {kind & ((1 << op) - 1) for op in range(len(graph) + 1)}
            prefixes = {mask for mask in prefixes if mask & kind in in_order}
    return tuple(sorted(prefixes, key=lambda mask: (mask.bit_count(), mask)))
