"""Beam search for an order of issue over many operators: runs of several layers with the model's ends.

Orders are built operator by operator. Of all partial orders of a length the most promising are kept: those
with the least estimate of the end, which is the clock, the compute that is left, and a share of the
communication that is left (what of it will stay exposed, is not known; several shares are tried). Partial
orders that have issued the same operators compete for one place.
"""

from dataclasses import dataclass

from braid.scheduling.planner.list_schedule import IssueOrder, Machine, State
from braid.scheduling.planner.strands import PairProblem

WIDTH = 64
SHARES = (0.0, 0.3, 0.9)
"""Of the communication left, what the estimate adds: none suits problems that communication bounds."""


@dataclass(frozen=True)
class _Partial:
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
    for op in range(machine.count):
        left[machine.streams[op]] += machine.solo[op]
    beam = [_Partial(0.0, machine.start(), (), (left[0], left[1], left[2]))]
    for _ in range(machine.count):
        best: dict[tuple[int, int], _Partial] = {}
        for partial in beam:
            for op in machine.choices(partial.state):
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
    left = list(partial.left)
    left[machine.streams[op]] -= machine.solo[op]
    chain = max((machine.tail[choice] for choice in machine.choices(state)), default=0.0)
    loads = [left[0]]
    for link, queue in enumerate(state.queues, start=1):
        ahead = 0.0
        for queued, remaining in queue:
            ahead += remaining
            chain = max(chain, ahead + machine.tail[queued] - machine.solo[queued])
        loads.append(left[link] + ahead)
    estimate = state.clock + max(*loads, chain) + share * (loads[1] + loads[2])
    return _Partial(estimate, state, (*partial.order, op), (left[0], left[1], left[2]))
