"""Two passes that share a rank, as the pairing search sees them: operators, times, precedence, contention."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from braid.scheduling.operators import Graph, Stream
from braid.scheduling.profile import Profile, operator_key

STREAMS = tuple(Stream)
"""Streams by number: 0 computes, 1 and 2 communicate."""

STREAM_PAIRS = ((0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1))
"""A stream that suffers and the one that it suffers from."""

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class StrandGraph:
    """Operators of one pass over one layer; ``before`` holds, per operator, a bit mask of what it needs."""

    names: tuple[str, ...]
    streams: tuple[int, ...]
    solo_ns: tuple[float, ...]
    before: tuple[int, ...]

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


def put_off(problem: PairProblem, names: Collection[str]) -> PairProblem:
    """The problem with operators of the backward pass before in the place of this one's.

    Paired programs follow each other, so what one puts off has all it needs from the next one's begin, but
    for what is put off as well. Nothing that stays may need what is put off.
    """
    graph = problem.backward
    late = sum(1 << n for n, name in enumerate(graph.names) if name in names)
    before = tuple(mask & late if late >> n & 1 else mask for n, mask in enumerate(graph.before))
    assert not any(mask & late for n, mask in enumerate(graph.before) if not late >> n & 1)
    return replace(problem, backward=replace(graph, before=before))


def bits(mask: int) -> Iterator[int]:
    """Numbers of the bits that are set."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def strand_graph(part: str, graph: Graph, profile: Profile) -> StrandGraph:
    """A pass of a part with the profile's costs; precedence is data alone, so weight gradients may move."""
    writer = {name: n for n, op in enumerate(graph.operators) for name in op.writes}
    before = []
    for op in graph.operators:
        mask = 0
        for name in op.reads:
            if name in writer:
                mask |= 1 << writer[name]
        before.append(mask)
    return StrandGraph(
        names=tuple(op.name for op in graph.operators),
        streams=tuple(STREAMS.index(op.stream) for op in graph.operators),
        solo_ns=tuple(float(profile.operator_ns(part, op)) for op in graph.operators),
        before=tuple(before),
    )


def pair_problem(
    forward_part: str, forward: Graph, backward_part: str, backward: Graph, profile: Profile
) -> PairProblem:
    """The forward pass of one part beside the backward pass of another (or the same)."""
    operators = [(forward_part, op) for op in forward.operators]
    operators += [(backward_part, op) for op in backward.operators]
    keys = [operator_key(part, op) for part, op in operators]
    slowdown = np.zeros((len(keys), len(keys)))
    cache: dict[tuple[str, str], float] = {}
    for i, (_, first) in enumerate(operators):
        for j in range(len(keys)):
            if first.stream is not operators[j][1].stream:
                pair = (keys[i], keys[j])
                if pair not in cache:
                    cache[pair] = profile.slowdown(*pair)
                slowdown[i, j] = cache[pair]
    return PairProblem(
        forward=strand_graph(forward_part, forward, profile),
        backward=strand_graph(backward_part, backward, profile),
        slowdown=slowdown,
        barrier_ns=float(profile.barrier_ns),
    )


def twin_problem(part: str, graph: Graph, profile: Profile) -> PairProblem:
    """The same pass of two micro-batches over a part, as the backward side of a problem without another.

    What the second one computes stands behind the same of the first one, so that gradients are added up in
    the order of micro-batches. Operators are named ``1:qkv`` and ``2:qkv``.
    """
    alone = pair_problem(part, Graph(operators=()), part, graph, profile)
    one, count = alone.backward, len(alone.backward)
    behind = tuple(
        mask << count | (0 if stream else 1 << n)
        for n, (mask, stream) in enumerate(zip(one.before, one.streams, strict=True))
    )
    both = StrandGraph(
        names=(*(f"1:{name}" for name in one.names), *(f"2:{name}" for name in one.names)),
        streams=one.streams * 2,
        solo_ns=one.solo_ns * 2,
        before=(*one.before, *behind),
    )
    return replace(alone, backward=both, slowdown=np.tile(alone.slowdown, (2, 2)))


def end_problem(part: str, graph: Graph, late: Collection[str], profile: Profile) -> PairProblem:
    """A backward pass by itself, with what the one before has put off to it, as `twin_problem`.

    Its operators stand behind the same of the one before, which are named ``P:qkv.wgrad``.
    """
    alone = pair_problem(part, Graph(operators=()), part, graph, profile)
    one = alone.backward
    left = [n for n, name in enumerate(one.names) if name in late]
    place = {n: k for k, n in enumerate(left)}
    both = [*left, *range(len(one))]
    theirs = [sum(1 << place[other] for other in bits(one.before[n]) if other in place) for n in left]
    own = [
        mask << len(left) | (1 << place[n] if n in place and not one.streams[n] else 0)
        for n, mask in enumerate(one.before)
    ]
    ends = StrandGraph(
        names=(*(f"P:{one.names[n]}" for n in left), *one.names),
        streams=tuple(one.streams[n] for n in both),
        solo_ns=tuple(one.solo_ns[n] for n in both),
        before=(*theirs, *own),
    )
    return replace(alone, backward=ends, slowdown=alone.slowdown[np.ix_(both, both)])


def fluid_ns(loads: FloatArray, slowdowns: FloatArray) -> FloatArray:
    """Time in which three streams finish their loads when all start together.

    loads: (n, 3) in ns. slowdowns: (n, 6), of a stream by another as in `STREAM_PAIRS`. While several streams
    run, each advances at 1 / (1 + sum of its slowdowns by the others that run).
    """
    remaining = loads.astype(float, copy=True)
    total = np.zeros(len(loads))
    s01, s10, s02, s20, s12, s21 = slowdowns.T
    for _ in range(3):
        a0, a1, a2 = (remaining > 1e-9).T.astype(float)
        pace = np.stack([1 + a1 * s01 + a2 * s02, 1 + a0 * s10 + a2 * s12, 1 + a0 * s20 + a1 * s21], axis=1)
        active = remaining > 1e-9
        left = np.where(active, remaining * pace, np.inf).min(axis=1)
        left = np.where(np.isfinite(left), left, 0.0)
        total += left
        remaining = np.where(active, remaining - left[:, None] / pace, 0.0)
        remaining[remaining < 1e-6] = 0.0
    return total
