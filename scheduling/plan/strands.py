"""Two passes that share a rank, as the pairing search sees them: operators, times, precedence, contention."""

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
"""Streams by number: 0 computes, 1 and 2 communicate."""


@dataclass(frozen=True, kw_only=True)
class StrandGraph:
    """Operators of a pass. Sets of operators are bit masks; ``before`` holds, per operator, what it needs."""

    issues: tuple[Issue, ...]
    """Operators, with the number of their pass in the program."""
    streams: tuple[int, ...]
    solo_ns: tuple[float, ...]
    before: tuple[int, ...]
    weights: int = 0
    """The weight gradients."""
    last_layer: int = 0
    """The operators of the layer that the pass comes to last."""

    def __post_init__(self) -> None:
        assert len(self.issues) == len(self.streams) == len(self.solo_ns) == len(self.before)

    def __len__(self) -> int:
        return len(self.issues)

    @property
    def all(self) -> int:
        return (1 << len(self)) - 1

    @property
    def total_ns(self) -> float:
        """The pass by itself without any overlap."""
        return sum(self.solo_ns)

    def named(self, mask: int) -> tuple[str, ...]:
        """Names of some operators, in the order of the graph."""
        return tuple(self.issues[op].operator for op in bits(mask))

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """Per operator, everything that has to come before it."""
        masks: list[int] = []
        for op, direct in enumerate(self.before):
            assert direct < 1 << op, "operators must stand after what they need"
            mask = direct
            for other in bits(direct):
                mask |= masks[other]
            masks.append(mask)
        return tuple(masks)

    def ready(self, done: int) -> Iterator[int]:
        """Operators that may come next after those of a mask."""
        for op, direct in enumerate(self.before):
            if not done >> op & 1 and direct & ~done == 0:
                yield op


@dataclass(frozen=True, kw_only=True, eq=False)
class PairProblem:
    """A forward and a backward pass to run together. Problems of the same content are equal.

    Operators of both are numbered together, those of the forward pass first. ``slowdown[i, j]`` is how much
    longer operator i takes while j runs; operators of one stream never run together.
    """

    forward: StrandGraph
    backward: StrandGraph
    slowdown: FloatArray
    barrier_ns: float = 0.0
    """Price of a barrier; every paired segment ends with one."""

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
        """Per operator, the mask of what it needs."""
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
        """Both passes, one operator after the other."""
        return self.forward.total_ns + self.backward.total_ns

    @property
    def lower_bound_ns(self) -> float:
        """No schedule is faster than its busiest stream."""
        loads = [0.0, 0.0, 0.0]
        for stream, ns in zip(self.streams, self.solo_ns, strict=True):
            loads[stream] += ns
        return max(loads)


def leaving(problem: PairProblem, end: int) -> PairProblem:
    """The problem with the end (a mask) of the previous backward pass in the place of its own.

    Paired programs follow each other, so the end that a program leaves has all it needs from the next one's
    begin, but for what belongs to it too. Nothing that stays may need it.
    """
    graph = problem.backward
    before = tuple(mask & end if end >> n & 1 else mask for n, mask in enumerate(graph.before))
    assert not any(mask & end for n, mask in enumerate(graph.before) if not end >> n & 1)
    return replace(problem, backward=replace(graph, before=before))


def bits(mask: int) -> Iterator[int]:
    """Numbers of the bits that are set."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def strand_graph(graph: Graph, profile: Profile, turn: int) -> StrandGraph:
    """A pass with the profile's costs; precedence is data alone, so weight gradients may move.

    The last piece of a value stands behind the others.
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
            mask |= sum(1 << n for n, other in numbered if other.completed_by(op))
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
    """A forward pass (number 0) beside a backward pass (number 1)."""
    return PairProblem(
        forward=strand_graph(forward, profile, 0),
        backward=strand_graph(backward, profile, 1),
        slowdown=_slowdowns([*forward.operators, *backward.operators], profile),
        barrier_ns=float(profile.barrier_ns),
    )


def joint_problem(graphs: Sequence[Graph], profile: Profile, first: int = 0) -> PairProblem:
    """Several passes as the backward side of a problem without a forward side.

    What a pass computes stands behind the same operators of pass ``first`` and of earlier passes: so
    gradients are added up in the order of micro-batches.
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
