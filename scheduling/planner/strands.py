"""Two passes that share a rank, as the pairing search sees them: operators, times, precedence, contention."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from braid.scheduling.operators import Graph, Stream
from braid.scheduling.operators import Pass as Phase
from braid.scheduling.pattern import is_layer
from braid.scheduling.profile import Profile
from braid.scheduling.schedule_text import write_step

STREAMS = tuple(Stream)
"""Streams by number: 0 computes, 1 and 2 communicate."""

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class StrandGraph:
    """Operators of one pass over one layer; ``before`` holds, per operator, a bit mask of what it needs."""

    names: tuple[str, ...]
    streams: tuple[int, ...]
    solo_ns: tuple[float, ...]
    before: tuple[int, ...]
    weights: int = 0
    """Mask of the weight gradients."""
    places: tuple[int, ...] = ()
    """Per operator, of its part in the unit."""
    layers: tuple[bool, ...] = ()
    """Per operator, whether its part is a layer."""

    def __post_init__(self) -> None:
        assert len(self.names) == len(self.streams) == len(self.solo_ns) == len(self.before)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def all(self) -> int:
        """The mask of all operators."""
        return (1 << len(self)) - 1

    @property
    def total_ns(self) -> float:
        """Solo times added up: the pass by itself without any overlap."""
        return sum(self.solo_ns)

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
        """Operators that may come next after the mask ``done``."""
        for op, direct in enumerate(self.before):
            if not done >> op & 1 and direct & ~done == 0:
                yield op

    @cached_property
    def prefixes(self) -> tuple[int, ...]:
        """All masks that some order begins with (down-sets), in an order that grows."""
        found = {0}
        frontier = [0]
        while frontier:
            following = {done | 1 << op for done in frontier for op in self.ready(done)}
            found |= following
            frontier = list(following)
        return tuple(sorted(found, key=lambda mask: (mask.bit_count(), mask)))


@dataclass(frozen=True, kw_only=True, eq=False)
class PairProblem:
    """A forward and a backward pass to run together. Problems of the same content are equal.

    ``slowdown[i, j]`` is how much longer operator i takes while j runs, those of the forward pass first;
    operators of one stream never run together.
    """

    forward: StrandGraph
    backward: StrandGraph
    slowdown: FloatArray
    barrier_ns: float = 0.0
    """Price of a barrier; every paired segment ends with one."""

    def __post_init__(self) -> None:
        count = len(self.forward) + len(self.backward)
        assert self.slowdown.shape == (count, count)

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
        for graph in (self.forward, self.backward):
            for stream, ns in zip(graph.streams, graph.solo_ns, strict=True):
                loads[stream] += ns
        return max(loads)


def leaving(problem: PairProblem, end: Collection[str]) -> PairProblem:
    """The problem with the end of the backward pass before in the place of this one's.

    Paired programs follow each other, so the end that one leaves has all it needs from the next one's begin,
    but for what belongs to it too. Nothing that stays may need it.
    """
    graph = problem.backward
    left = sum(1 << n for n, name in enumerate(graph.names) if name in end)
    before = tuple(mask & left if left >> n & 1 else mask for n, mask in enumerate(graph.before))
    assert not any(mask & left for n, mask in enumerate(graph.before) if not left >> n & 1)
    return replace(problem, backward=replace(graph, before=before))


def bits(mask: int) -> Iterator[int]:
    """Numbers of the bits that are set."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def strand_graph(graph: Graph, profile: Profile) -> StrandGraph:
    """A pass with the profile's costs; precedence is data alone, so weight gradients may move.

    The last piece of a value stands behind the others.
    """
    writer = {name: n for n, op in enumerate(graph.operators) for name in op.writes}
    before = []
    for op in graph.operators:
        mask = 0
        for name in op.reads:
            if name in writer:
                mask |= 1 << writer[name]
        if op.completes:
            mask |= sum(1 << n for n, other in enumerate(graph.operators) if other.completed_by(op))
        before.append(mask)
    return StrandGraph(
        names=tuple(op.name for op in graph.operators),
        streams=tuple(STREAMS.index(op.stream) for op in graph.operators),
        solo_ns=tuple(float(profile.solo(op.key)) for op in graph.operators),
        before=tuple(before),
        weights=sum(1 << n for n, op in enumerate(graph.operators) if op.phase is Phase.WEIGHT_GRADIENT),
        places=tuple(op.place for op in graph.operators),
        layers=tuple(is_layer(op.part) for op in graph.operators),
    )


def pair_problem(forward: Graph, backward: Graph, profile: Profile) -> PairProblem:
    """A forward pass beside a backward pass."""
    operators = [*forward.operators, *backward.operators]
    slowdown = np.zeros((len(operators), len(operators)))
    cache: dict[tuple[str, str], float] = {}
    for i, first in enumerate(operators):
        for j, second in enumerate(operators):
            if first.stream is not second.stream:
                pair = first.key, second.key
                if pair not in cache:
                    cache[pair] = profile.slowdown(*pair)
                slowdown[i, j] = cache[pair]
    return PairProblem(
        forward=strand_graph(forward, profile),
        backward=strand_graph(backward, profile),
        slowdown=slowdown,
        barrier_ns=float(profile.barrier_ns),
    )


def joint_problem(graphs: Sequence[Graph], profile: Profile, first: int = 0) -> PairProblem:
    """Several passes as one, the backward side of a problem without another; operators named ``0:qkv``.

    What a pass computes stands behind the same operators of pass ``first``, and of those before it: so
    gradients are added up in the order of micro-batches.
    """
    turns = sorted(range(len(graphs)), key=lambda turn: (turn != first, turn))
    everything = Graph(
        operators=tuple(
            replace(
                op,
                name=write_step(turn, op.name),
                reads=_of(turn, op.reads),
                writes=_of(turn, op.writes),
                piece=op.piece and replace(op.piece, whole=write_step(turn, op.piece.whole)),
            )
            for turn in turns
            for op in graphs[turn].operators
        )
    )
    joint = pair_problem(Graph(operators=()), everything, profile)
    places = {name: n for n, name in enumerate(joint.backward.names)}
    before = list(joint.backward.before)
    for earlier, later in pairwise(turns):
        for op in graphs[later].operators:
            ahead = places.get(write_step(earlier, op.name))
            if ahead is not None and not op.kind.communicates:
                before[places[write_step(later, op.name)]] |= 1 << ahead
    return replace(joint, backward=replace(joint.backward, before=tuple(before)))


def _of(turn: int, values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(write_step(turn, value) for value in values)
