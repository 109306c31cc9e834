"""Two passes that share a rank, as a search problem: operators, times, precedence, contention."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, pairwise

import numpy as np

from braid.scheduling.cost.physics import FloatArray
from braid.scheduling.cost.profile import Profile
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.model.operators import Graph, Operator, Phase
from braid.scheduling.schedule.order import Issue
from braid.scheduling.text.pattern import is_layer

STREAMS = tuple(Stream)
"""All streams; their indices are the stream numbers below: 0 computes, 1 and 2 communicate."""


@dataclass(frozen=True, kw_only=True)
class StrandGraph:
    """Operators of one pass as parallel tuples, numbered in the order of its graph; sets are bit masks.

    ``before``: for every operator, the mask of the operators that it directly depends on.
    """

    issues: tuple[Issue, ...]
    """Name of each operator, with the number of its pass in the program."""
    streams: tuple[int, ...]
    solo_ns: tuple[float, ...]
    before: tuple[int, ...]
    weights: int = 0
    """Mask of the operators that compute weight gradients."""
    last_layer: int = 0
    """Mask of the operators of the layer that the pass visits last."""

    def __post_init__(self) -> None:
        assert len(self.issues) == len(self.streams) == len(self.solo_ns) == len(self.before)

    def __len__(self) -> int:
        return len(self.issues)

    @property
    def all(self) -> int:
        return (1 << len(self)) - 1

    @property
    def total_ns(self) -> float:
        """Time in ns of the pass if its operators run one after the other."""
        return sum(self.solo_ns)

    def named(self, mask: int) -> tuple[str, ...]:
        """Return the names of operators in a mask, in the order of the graph."""
        return tuple(self.issues[op].operator for op in bits(mask))

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """For every operator, the mask of all operators on which it depends, directly or not."""
        masks: list[int] = []
        for op, direct in enumerate(self.before):
            assert direct < 1 << op, "operators must stand after what they need"
            mask = direct
            for needed in bits(direct):
                mask |= masks[needed]
            masks.append(mask)
        return tuple(masks)

    def ready(self, done: int) -> Iterator[int]:
        """Yield the operators not in the mask ``done`` whose dependencies are all in ``done``."""
        for op, direct in enumerate(self.before):
            if not done >> op & 1 and direct & ~done == 0:
                yield op


@dataclass(frozen=True, kw_only=True, eq=False)
class PairProblem:
    """A forward and a backward pass to run together. Problems of the same content are equal.

    Operators of both are numbered together, the forward pass first. ``slowdown[i, j]`` is the fraction by
    which operator i takes longer while j runs; operators of one stream never run together.
    """

    forward: StrandGraph
    backward: StrandGraph
    slowdown: FloatArray
    barrier_ns: float = 0.0
    """Time of a barrier in ns; every segment of both passes ends with a barrier."""

    def __post_init__(self) -> None:
        assert self.slowdown.shape == (len(self), len(self))

    def __len__(self) -> int:
        return len(self.forward) + len(self.backward)

    @property
    def streams(self) -> tuple[int, ...]:
        return self.forward.streams + self.backward.streams

    @property
    def solo_ns(self) -> tuple[float, ...]:
        return self.forward.solo_ns + self.backward.solo_ns

    @property
    def before(self) -> tuple[int, ...]:
        """For every operator of both passes, the mask of the operators that it directly depends on."""
        return self.forward.before + tuple(mask << len(self.forward) for mask in self.backward.before)

    @cached_property
    def _content(self) -> tuple[object, ...]:
        return self.forward, self.backward, self.slowdown.tobytes(), self.barrier_ns

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PairProblem) and self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)

    @property
    def serial_ns(self) -> float:
        """Time in ns of both passes if all operators run one after the other."""
        return self.forward.total_ns + self.backward.total_ns

    @property
    def lower_bound_ns(self) -> float:
        """Time of the busiest stream's operators in ns; no order is faster."""
        loads = [0.0, 0.0, 0.0]
        for stream, ns in zip(self.streams, self.solo_ns, strict=True):
            loads[stream] += ns
        return max(loads)


def leaving(problem: PairProblem, end: int) -> PairProblem:
    """Return the problem in which the operators in the mask ``end`` belong to the previous backward pass.

    Equal programs follow each other: each leaves its end, and runs the end of the previous program. An end's
    operators then depend only on each other. No operator outside the end may depend on an operator in it.
    """
    graph = problem.backward
    before = tuple(mask & end if end >> n & 1 else mask for n, mask in enumerate(graph.before))
    assert not any(mask & end for n, mask in enumerate(graph.before) if not end >> n & 1)
    return replace(problem, backward=replace(graph, before=before))


def bits(mask: int) -> Iterator[int]:
    """Yield the indices of the set bits of a mask, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def strand_graph(graph: Graph, profile: Profile, turn: int) -> StrandGraph:
    """Return a pass's graph with the profile's costs; ``turn``: number of the pass in its program.

    Only data dependencies order operators, so weight gradients may move; but the last piece of a value comes
    after its other pieces.
    """
    numbered = list(enumerate(graph.operators))
    writer = {name: n for n, op in numbered for name in op.writes}
    before = []
    for op in graph.operators:
        mask = 0
        for name in op.reads:
            if name in writer:
                mask |= 1 << writer[name]
        if op.completes:
            mask |= sum(1 << n for n, piece in numbered if piece.completed_by(op))
        before.append(mask)
    last = next((op.place for op in reversed(graph.operators) if is_layer(op.part)), None)
    return StrandGraph(
        issues=tuple(Issue(turn, op.name) for op in graph.operators),
        streams=tuple(STREAMS.index(op.stream) for op in graph.operators),
        solo_ns=tuple(float(profile.solo(op.key)) for op in graph.operators),
        before=tuple(before),
        weights=sum(1 << n for n, op in numbered if op.phase is Phase.WEIGHT_GRADIENT),
        last_layer=sum(1 << n for n, op in numbered if op.place == last),
    )


def _slowdowns(operators: Sequence[Operator], profile: Profile) -> FloatArray:
    slowdown = np.zeros((len(operators), len(operators)))
    between = cache(profile.slowdown)
    for i, first in enumerate(operators):
        for j, second in enumerate(operators):
            if first.stream is not second.stream:
                slowdown[i, j] = between(first.key, second.key)
    return slowdown


def pair_problem(forward: Graph, backward: Graph, profile: Profile) -> PairProblem:
    """Return the search problem of overlapping a forward pass (pass 0) with a backward pass (pass 1)."""
    return PairProblem(
        forward=strand_graph(forward, profile, 0),
        backward=strand_graph(backward, profile, 1),
        slowdown=_slowdowns([*forward.operators, *backward.operators], profile),
        barrier_ns=float(profile.barrier_ns),
    )


def joint_problem(graphs: Sequence[Graph], profile: Profile, first: int = 0) -> PairProblem:
    """Return the search problem of overlapping several passes; all of them form its backward side.

    Each compute operator runs in pass ``first``, then in the other passes in their order, so that gradients
    are added up in the order of micro-batches.
    """
    turns = sorted(range(len(graphs)), key=lambda turn: (turn != first, turn))
    strands = [strand_graph(graphs[turn], profile, turn) for turn in turns]
    begins = [0, *accumulate(map(len, strands))]
    issues = tuple(issue for strand in strands for issue in strand.issues)
    before = [mask << begin for strand, begin in zip(strands, begins, strict=False) for mask in strand.before]
    positions = {issue: n for n, issue in enumerate(issues)}
    for earlier, later in pairwise(turns):
        for op in graphs[later].operators:
            ahead = positions.get(Issue(earlier, op.name))
            if ahead is not None and not op.kind.communicates:
                before[positions[Issue(later, op.name)]] |= 1 << ahead
    return PairProblem(
        forward=StrandGraph(issues=(), streams=(), solo_ns=(), before=()),
        backward=StrandGraph(
            issues=issues,
            streams=tuple(stream for strand in strands for stream in strand.streams),
            solo_ns=tuple(ns for strand in strands for ns in strand.solo_ns),
            before=tuple(before),
        ),
        slowdown=_slowdowns([op for turn in turns for op in graphs[turn].operators], profile),
        barrier_ns=float(profile.barrier_ns),
    )
