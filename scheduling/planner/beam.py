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
    ready: tuple[int, ...]
    """What may be issued next, in the order of the graphs."""


def beam_order(problem: PairProblem, width: int = WIDTH, shares: tuple[float, ...] = SHARES) -> IssueOrder:
    """The best order that beams of some width find, one for each share."""
    machine = Machine(problem)
    return min((_search(machine, width, share) for share in shares), key=lambda found: found.ns)


def _search(machine: Machine, width: int, share: float) -> IssueOrder:
    left = [0.0, 0.0, 0.0]
    for op in range(machine.count):
        left[machine.streams[op]] += machine.solo[op]
    begin = machine.start()
    ready = tuple(machine.choices(begin))
    beam = [_Partial(0.0, begin, (), (left[0], left[1], left[2]), ready)]
    for _ in range(machine.count):
        best: dict[tuple[int, int], _Partial] = {}
        for partial in beam:
            for op in partial.ready:
                following = _issue(machine, partial, op, share)
                key = following.state.done_f, following.state.done_b
                rival = best.get(key)
                if rival is None or _rank(following) < _rank(rival):
                    best[key] = following
        beam = sorted(best.values(), key=_rank)[:width]
    return min(
        (IssueOrder(operators=p.order, ns=machine.finish(p.state)) for p in beam), key=lambda found: found.ns
    )


def _rank(partial: _Partial) -> tuple[float, float]:
    return partial.estimate, partial.state.clock


def _issue(machine: Machine, partial: _Partial, op: int, share: float) -> _Partial:
    state = machine.issue(partial.state, op)
    left = [*partial.left]
    left[machine.streams[op]] -= machine.solo[op]
    ready = machine.ready_after(partial.ready, op, state)
    tail, solo = machine.tail, machine.solo
    chain = 0.0
    for choice in ready:
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
    return _Partial(estimate, state, (*partial.order, op), (left[0], left[1], left[2]), ready)
