"""Orders of issue over many operators, units of several layers with the model's ends: by beam search.

Orders are built operator by operator. Of all partial orders of a length the most promising are kept: those
with the least estimate of the end, which is the clock, the compute that is left, and a share of the
communication that is left (how much of it will stay exposed, is not known; several shares are tried). Partial
orders that have issued the same operators compete for one place.

When a paired block is nearly over, nothing is there to hide its last collectives behind. An end of a backward
pass that it leaves to the next block is hidden there, and hides what is there: blocks overlap like the
iterations of a software pipeline. Weight gradients are needed by nothing in their pass, so they can always be
left; so can all that comes last in a backward pass that gives its gradient to nobody: one that stops at the
embedding.
"""

from functools import lru_cache
from typing import NamedTuple

from braid.scheduling.model.operators import Part
from braid.scheduling.plan.list_schedule import IssueOrder, Machine, State, improved
from braid.scheduling.plan.strands import PairProblem, StrandGraph, bits, leaving

WIDTH = 64
SHARES = (0.0, 0.3, 0.9)
"""Of the communication left, what the estimate adds: none suits problems that communication bounds."""

BEAMS = ((96, 0.1), (192, 0.05), (64, 0.3))
"""Widths and shares of communication (`beam_order`) for orders in which blocks overlap. What each finds is
improved: moving operators seldom leads to the best order from where the best beam ends (docs/log.md)."""

MANY = 100
"""Operators beyond which there is time for the first beam alone."""
MOST = 160
"""Operators beyond which there is time for beams of one share of communication alone."""


class _Partial(NamedTuple):
    estimate: float
    state: State
    order: tuple[int, ...]
    left: tuple[float, float, float]
    """Work that has not been issued, per stream."""


def beam_order(problem: PairProblem, width: int = WIDTH, shares: tuple[float, ...] = SHARES) -> IssueOrder:
    """The best order that beams of some width find, one for each share."""
    machine = Machine(problem)
    return min((_search(machine, width, share) for share in shares), key=lambda found: found.ns)


def _search(machine: Machine, width: int, share: float) -> IssueOrder:
    left = [0.0, 0.0, 0.0]
    for stream, ns in zip(machine.streams, machine.solo, strict=True):
        left[stream] += ns
    beam = [_Partial(0.0, machine.start(), (), (left[0], left[1], left[2]))]
    for _ in range(machine.count):
        best: dict[int, _Partial] = {}
        for partial in beam:
            for op in partial.state.ready:
                following = _issue(machine, partial, op, share)
                rival = best.get(following.state.done)
                if rival is None or _rank(following) < _rank(rival):
                    best[following.state.done] = following
        beam = sorted(best.values(), key=_rank)[:width]
    ends = (IssueOrder(operators=partial.order, ns=machine.finish(partial.state)) for partial in beam)
    return min(ends, key=lambda found: found.ns)


def _rank(partial: _Partial) -> tuple[float, float]:
    return partial.estimate, partial.state.clock


def _issue(machine: Machine, partial: _Partial, op: int, share: float) -> _Partial:
    state = machine.issue(partial.state, op)
    left = [*partial.left]
    left[machine.streams[op]] -= machine.solo[op]
    tail, solo = machine.tail, machine.solo
    chain = 0.0
    for choice in state.ready:
        if tail[choice] > chain:
            chain = tail[choice]
    loads = [left[0]]
    for link, queue in enumerate(state.queues, start=1):
        ahead = 0.0
        for queued, remaining in queue:
            ahead += remaining
            if (end := ahead + tail[queued] - solo[queued]) > chain:
                chain = end
        loads.append(left[link] + ahead)
    estimate = state.clock + max(*loads, chain) + share * (loads[1] + loads[2])
    return _Partial(estimate, state, (*partial.order, op), (left[0], left[1], left[2]))


# -- ends that are left to the next block --------------------------------------------------------------------


def gives_gradient(part: Part) -> bool:
    """Whether something before a part needs the gradient of its input."""
    gradients = {f"d.{name}" for name in part.inputs if name not in part.constants}
    return any(gradients & set(op.writes) for op in part.backward.operators)


@lru_cache(maxsize=1024)
def unit_order(problem: PairProblem, *, goes_on: bool, whole: bool = False) -> tuple[int, IssueOrder]:
    """The best order for two units, and what it leaves to the next paired block (a mask), where they go on.

    whole: it leaves all that comes last in the backward pass, whose input must need no gradient; else it may
    leave weight gradients of the last layer.
    """
    graph = problem.backward
    movable = graph.weights & graph.last_layer
    if goes_on and whole:
        end = _last_collective_on(graph) | movable
        ring = leaving(problem, end)
        beams = BEAMS[:1] if len(ring) > MANY else BEAMS
        found = [improved(ring, beam_order(ring, width, (share,))) for width, share in beams]
        return end, min(found, key=lambda order: order.ns)
    shares = SHARES[1:2] if len(problem) > MOST else SHARES
    end, best = 0, beam_order(problem, shares=shares)
    if goes_on:
        later = beam_order(leaving(problem, movable), shares=shares)
        if later.ns < best.ns * (1 - 1e-6):
            end, best = movable, later
    return end, improved(leaving(problem, end), best)


def _last_collective_on(graph: StrandGraph) -> int:
    """The last layer's last collective and all that comes after it."""
    layer = list(bits(graph.last_layer))
    first = next((op for op in reversed(layer) if graph.streams[op]), layer[-1])
    return graph.all & ~((1 << first) - 1)


def possible_ends(problem: PairProblem) -> list[int]:
    """What may be left to the next layer: nothing, each long weight gradient, and all of these together.

    Long: a twentieth of its pass or more.
    """
    graph = problem.backward
    movable = [1 << n for n in bits(graph.weights) if graph.solo_ns[n] >= graph.total_ns / 20]
    return [0, *movable, *([sum(movable)] if len(movable) > 1 else [])]
