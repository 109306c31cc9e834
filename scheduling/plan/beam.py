"""Beam search for the order in which a rank issues many operators: units of several layers, also with the
embedding or the head.

Orders grow operator by operator. Of all partial orders of a length, the beam keeps the orders with the
least estimated end: clock, remaining compute, and a share of the remaining communication (several shares are
tried, since it is unknown how much stays exposed). Partial orders that have issued the same operators compete
for one place in the beam.

When a paired block is nearly over, no compute remains to hide its last collectives. An end of a backward pass
that the block leaves to the next block is hidden there, and hides collectives there: blocks overlap like the
iterations of a software pipeline. No operator of a pass needs its weight gradients, so they can always be
left; so can all last operators of a backward pass that stops at the embedding and passes no gradient on.
"""

from functools import lru_cache
from typing import NamedTuple

from braid.scheduling.model.operators import Part
from braid.scheduling.plan.list_schedule import IssueOrder, Machine, State, improved
from braid.scheduling.plan.strands import PairProblem, StrandGraph, bits, leaving

WIDTH = 64
SHARES = (0.0, 0.3, 0.9)
"""Fractions of the remaining communication that the estimate adds; no single one suits all problems."""

BEAMS = ((96, 0.1), (192, 0.05), (64, 0.3))
"""Width and share of communication (see `beam_order`) of each beam search for orders in which consecutive
blocks overlap. Every result is improved by moves: the best beam's result seldom becomes the best order
(docs/log.md)."""

MANY = 100
"""Number of operators above which `unit_order` tries only the first of `BEAMS`, to save time."""
MOST = 160
"""Number of operators above which `unit_order` tries only one of `SHARES`, to save time."""


class _Partial(NamedTuple):
    estimate: float
    state: State
    order: tuple[int, ...]
    unissued: tuple[float, float, float]
    """Solo time of the operators that have not been issued, in ns per stream (compute, two of transfers)."""


def beam_order(problem: PairProblem, width: int = WIDTH, shares: tuple[float, ...] = SHARES) -> IssueOrder:
    """Return the fastest order found by beam searches of ``width``, one for each of ``shares``, the weights
    of remaining communication in the estimate."""
    machine = Machine(problem)
    return min((_search(machine, width, share) for share in shares), key=lambda order: order.ns)


def _search(machine: Machine, width: int, share: float) -> IssueOrder:
    unissued = [0.0, 0.0, 0.0]
    for stream, ns in zip(machine.streams, machine.solo, strict=True):
        unissued[stream] += ns
    beam = [_Partial(0.0, machine.start(), (), (unissued[0], unissued[1], unissued[2]))]
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
    return min(ends, key=lambda order: order.ns)


def _rank(partial: _Partial) -> tuple[float, float]:
    return partial.estimate, partial.state.clock


def _issue(machine: Machine, partial: _Partial, op: int, share: float) -> _Partial:
    state = machine.issue(partial.state, op)
    unissued = [*partial.unissued]
    unissued[machine.streams[op]] -= machine.solo[op]
    tail, solo = machine.tail, machine.solo
    chain = 0.0
    for choice in state.ready:
        if tail[choice] > chain:
            chain = tail[choice]
    loads = [unissued[0]]
    for link, queue in enumerate(state.queues, start=1):
        ahead = 0.0
        for queued, queued_ns in queue:
            ahead += queued_ns
            if (end := ahead + tail[queued] - solo[queued]) > chain:
                chain = end
        loads.append(unissued[link] + ahead)
    estimate = state.clock + max(*loads, chain) + share * (loads[1] + loads[2])
    return _Partial(estimate, state, (*partial.order, op), (unissued[0], unissued[1], unissued[2]))


# -- ends of backward passes -----------------------------------------------------------------------------


def gives_gradient(part: Part) -> bool:
    """Return whether the part's backward pass computes the gradient of the part's input."""
    gradients = {f"d.{name}" for name in part.inputs if name not in part.constants}
    return any(gradients & set(op.writes) for op in part.backward.operators)


@lru_cache(maxsize=1024)
def unit_order(problem: PairProblem, *, goes_on: bool, whole: bool = False) -> tuple[int, IssueOrder]:
    """Return the mask of operators left to the next block (0 for none), and the best order of two units.

    ``goes_on``: whether an equal block follows. ``whole``: the order leaves the backward pass's last
    collective and everything after it, and its input must need no gradient; otherwise it may leave weight
    gradients of the layer visited last.
    """
    graph = problem.backward
    movable = graph.weights & graph.last_layer
    if goes_on and whole:
        end = _last_collective_on(graph) | movable
        ring = leaving(problem, end)
        beams = BEAMS[:1] if len(ring) > MANY else BEAMS
        orders = [improved(ring, beam_order(ring, width, (share,))) for width, share in beams]
        return end, min(orders, key=lambda order: order.ns)
    shares = SHARES[1:2] if len(problem) > MOST else SHARES
    end, best = 0, beam_order(problem, shares=shares)
    if goes_on:
        leaving_order = beam_order(leaving(problem, movable), shares=shares)
        if leaving_order.ns < best.ns * (1 - 1e-6):
            end, best = movable, leaving_order
    return end, improved(leaving(problem, end), best)


def _last_collective_on(graph: StrandGraph) -> int:
    """Return the mask of all operators from the last collective of the layer visited last to the pass's
    end."""
    layer = list(bits(graph.last_layer))
    first = next((op for op in reversed(layer) if graph.streams[op]), layer[-1])
    return graph.all & ~((1 << first) - 1)


def possible_ends(problem: PairProblem) -> list[int]:
    """Return the masks of operators that a backward pass may leave to the next block: 0, each long weight
    gradient, and all long weight gradients together.

    A weight gradient is long if it takes at least a twentieth of its pass.
    """
    graph = problem.backward
    movable = [1 << n for n in bits(graph.weights) if graph.solo_ns[n] >= graph.total_ns / 20]
    return [0, *movable, *([sum(movable)] if len(movable) > 1 else [])]
