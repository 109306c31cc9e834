"""Beam search for an order of issue over many operators: units of several layers with the model's ends.

Orders are built operator by operator. Of all partial orders of a length the most promising are kept: those
with the least estimate of the end, which is the clock, the compute that is left, and a share of the
communication that is left (what of it will stay exposed, is not known; several shares are tried). Partial
orders that have issued the same operators compete for one place.
"""

from typing import NamedTuple

from braid.scheduling.planner.list_schedule import IssueOrder, Machine, State
from braid.scheduling.planner.strands import PairProblem

WIDTH = 64
SHARES = (0.0, 0.3, 0.9)
"""Of the communication left, what the estimate adds: none suits problems that communication bounds."""


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
