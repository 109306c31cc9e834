"""Searches one static order in which a rank issues the operators of two passes, without barriers.

The executor turns an order into times: compute operators run one after the other; a collective is issued at
its position in the order, after the preceding compute operators, and runs on its stream behind the
collectives issued there earlier; an operator that needs the collective's result waits. Several methods
construct an order, and each order is improved by moving operators until no move helps; for small graphs
branch and bound finds the best order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from braid.scheduling.cost.physics import EPSILON, Lane, run_compute, run_lanes
from braid.scheduling.generate.fixed_orders import round_robin
from braid.scheduling.plan.pairing import Pairing
from braid.scheduling.plan.strands import PairProblem, bits

_FOREVER = float("inf")

MOST_STATES = 2_000_000


@dataclass(frozen=True, kw_only=True)
class IssueOrder:
    """Order in which a rank issues both passes' operators (numbers in the `PairProblem`), and its ns."""

    operators: tuple[int, ...]
    ns: float


class State(NamedTuple):
    """State of a rank that has issued some operators: its clock in ns, and the transfers under way."""

    clock: float
    done: int
    """Bit mask of the operators that have been issued."""
    ready: tuple[int, ...]
    """Numbers of the operators that may be issued next, ascending."""
    queues: tuple[tuple[tuple[int, float], ...], tuple[tuple[int, float], ...]]
    """For each of two links: (operator, remaining ns) of issued transfers; the first transfer runs now."""


class Machine:
    """Model of a rank that issues a problem's operators in order, with their solo times and slowdowns."""

    def __init__(self, problem: PairProblem) -> None:
        self.solo, self.streams, self.needs = problem.solo_ns, problem.streams, problem.before
        self.count = len(problem)
        self.slowdown: list[list[float]] = problem.slowdown.tolist()
        self.before = [tuple(bits(mask)) for mask in self.needs]
        self.awaited = [
            tuple((needed, self.streams[needed] - 1) for needed in operators if self.streams[needed])
            for operators in self.before
        ]
        """For every operator, (number, link 0 or 1) of each transfer that it waits for."""
        self.followers = [[n for n, ops in enumerate(self.before) if op in ops] for op in range(self.count)]
        self.tail = [*self.solo]
        """For every operator, the ns of the longest chain of dependent operators that begins with it."""
        for op in reversed(range(self.count)):
            for needed in self.before[op]:
                self.tail[needed] = max(self.tail[needed], self.solo[needed] + self.tail[op])

    def start(self) -> State:
        return State(0.0, 0, tuple(op for op in range(self.count) if not self.needs[op]), ((), ()))

    def issue(self, state: State, op: int) -> State:
        """Return the state after issuing the operator ``op``, which must be ready."""
        lanes = [[*state.queues[0]], [*state.queues[1]]]
        clock = self._advance(state.clock, lanes, op)
        done = state.done | 1 << op
        new = [follower for follower in self.followers[op] if not self.needs[follower] & ~done]
        remaining = [waiting for waiting in state.ready if waiting != op]
        ready = tuple(sorted((*remaining, *new)) if new else remaining)
        return State(clock, done, ready, (tuple(lanes[0]), tuple(lanes[1])))

    def _advance(self, clock: float, lanes: list[Lane], op: int) -> float:
        """Issue an operator, changing ``lanes``; return the clock at which the next operator may be
        issued."""
        for needed, link in self.awaited[op]:
            lane = lanes[link]
            while any(queued == needed for queued, _ in lane):
                clock += run_lanes(lanes, self.slowdown, _FOREVER)
        link = self.streams[op]
        if link:
            lanes[link - 1].append((op, self.solo[op]))
            return clock
        return clock + run_compute(lanes, self.slowdown, op, self.solo[op])

    def finish(self, state: State, order: Sequence[int] = (), limit: float = _FOREVER) -> float:
        """Issue ``order`` from a state and return the ns at which every operator has ended.

        Returns infinity if the clock reaches ``limit`` before all are issued.
        """
        clock, lanes = state.clock, [[*state.queues[0]], [*state.queues[1]]]
        for op in order:
            clock = self._advance(clock, lanes, op)
            if clock >= limit:
                return _FOREVER
        passed = 0.0
        while lanes[0] or lanes[1]:
            passed += run_lanes(lanes, self.slowdown, _FOREVER)
        return clock + passed

    def bound(self, state: State) -> float:
        """Return a lower bound of the end (ns) of all orders that continue a state: the larger of the busiest
        stream's remaining work and the longest chain."""
        work = [0.0, 0.0, 0.0]
        chain = 0.0
        for op in range(self.count):
            if not state.done >> op & 1:
                work[self.streams[op]] += self.solo[op]
                chain = max(chain, self.tail[op])
        for link in (0, 1):
            ahead = 0.0
            for op, remaining in state.queues[link]:
                ahead += remaining
                chain = max(chain, ahead + self.tail[op] - self.solo[op])
            work[link + 1] += ahead
        return state.clock + max(*work, chain)


def issue_ns(problem: PairProblem, order: Sequence[int]) -> float:
    """Return the ns that an order takes; raise `ValueError` if it issues an operator twice or before its
    inputs."""
    machine = Machine(problem)
    state = machine.start()
    for op in order:
        if op not in state.ready:
            raise ValueError(f"operator {op} stands before what it needs, or twice")
        state = machine.issue(state, op)
    return machine.finish(state)


def list_schedule(problem: PairProblem, starts: Sequence[Sequence[int]] = ()) -> IssueOrder:
    """Return a good order: construct several, improve the three fastest by local moves, take the best.

    ``starts``: additional orders to begin with, such as the one that `pairing_order` returns.
    """
    candidates = {tuple(order) for order in starts}
    candidates |= {switching_order(problem), _greedy_order(problem)}
    ranked = sorted((issue_ns(problem, order), order) for order in candidates)
    orders = [improved(problem, IssueOrder(operators=order, ns=ns)) for ns, order in ranked[:3]]
    return min(orders, key=lambda order: order.ns)


def pairing_order(problem: PairProblem, pairing: Pairing) -> tuple[int, ...]:
    """Return a pairing's operators as an order without barriers: each segment's collectives, then its
    compute."""
    streams, order = problem.streams, list[int]()
    for forward, backward in pairing.segments:
        ops = [*(len(problem.forward) + op for op in bits(backward)), *bits(forward)]
        order += sorted(ops, key=lambda op: streams[op] == 0)
    return tuple(order)


def _greedy_order(problem: PairProblem) -> tuple[int, ...]:
    """Return an order that issues collectives as soon as possible, and else compute operators that need not
    wait.

    Among several such operators the one with the longest chain of dependent operators comes first.
    """
    machine = Machine(problem)
    state, order = machine.start(), []
    for _ in range(machine.count):
        under_way = {op for queue in state.queues for op, _ in queue}

        def urgency(op: int, under_way: set[int] = under_way) -> tuple[bool, bool, float]:
            waits = any(needed in under_way for needed in machine.before[op])
            return waits, machine.streams[op] == 0, -machine.tail[op]

        op = min(state.ready, key=urgency)
        state = machine.issue(state, op)
        order.append(op)
    return tuple(order)


def improved(problem: PairProblem, order: IssueOrder) -> IssueOrder:
    """Improve an order by moves until none helps: one to three neighbouring operators move to their best
    place."""
    machine = Machine(problem)
    best, best_ns = list(order.operators), order.ns
    better = True
    while better:
        better = False
        for length in (1, 2, 3):
            for start in range(len(best) - length + 1):
                moved, moved_ns = _best_move(machine, best, start, length)
                if moved_ns < best_ns * (1 - 1e-9):
                    best, best_ns, better = moved, moved_ns, True
    return IssueOrder(operators=tuple(best), ns=best_ns)


def _best_move(machine: Machine, order: list[int], start: int, length: int) -> tuple[list[int], float]:
    """Try all positions for the ``length`` operators from ``start`` on; return the fastest order and its
    ns."""
    moved = order[start : start + length]
    rest = order[:start] + order[start + length :]
    position = {op: n for n, op in enumerate(rest)}
    inside = set(moved)
    earliest = max(
        (position[n] + 1 for op in moved for n in machine.before[op] if n not in inside), default=0
    )
    latest = min(
        (position[o] for o in rest if any(n in inside for n in machine.before[o])), default=len(rest)
    )
    best, best_ns = order, float("inf")
    # States up to the earliest position are common to all moves.
    state = machine.start()
    for op in rest[:earliest]:
        state = machine.issue(state, op)
    for target in range(earliest, latest + 1):
        if target > earliest:
            state = machine.issue(state, rest[target - 1])
        if target == start:
            continue
        ns = machine.finish(state, (*moved, *rest[target:]), best_ns)
        if ns < best_ns:
            best, best_ns = rest[:target] + moved + rest[target:], ns
    return best, best_ns


def exact_order(problem: PairProblem) -> IssueOrder:
    """Find the fastest order by branch and bound; raise `ValueError` after `MOST_STATES` visited states."""
    machine = Machine(problem)
    best = list_schedule(problem)
    seen: dict[tuple[object, ...], float] = {}
    stack: list[tuple[float, State, tuple[int, ...]]] = [(0.0, machine.start(), ())]
    visited = 0
    while stack:
        bound, state, order = stack.pop()
        if bound >= best.ns - EPSILON:
            continue
        if len(order) == machine.count:
            if (ns := machine.finish(state)) < best.ns:
                best = IssueOrder(operators=order, ns=ns)
            continue
        visited += 1
        if visited > MOST_STATES:
            raise ValueError(
                f"the exact search visited {MOST_STATES} states without an end; use fewer operators"
            )
        # Skip a state if another one issued the same operators no later and has the same work remaining. Less
        # work remaining is not enough: a link's next collective then starts sooner, perhaps beside an
        # operator that it slows down more than the wait would have cost.
        under_way = tuple((op, round(remaining, 3)) for queue in state.queues for op, remaining in queue)
        if seen.get((state.done, under_way), _FOREVER) <= state.clock + EPSILON:
            continue
        seen[state.done, under_way] = state.clock
        following = []
        for op in state.ready:
            after = machine.issue(state, op)
            following.append((machine.bound(after), after, (*order, op)))
        stack += sorted(following, key=lambda entry: -entry[0])
    return best


def turns_order(problem: PairProblem) -> tuple[int, ...]:
    """Return an order in which the passes take turns, operator by operator."""
    count = len(problem.forward)
    return round_robin((range(count), range(count, len(problem))))


def switching_order(problem: PairProblem) -> tuple[int, ...]:
    """Return an order that switches to the other pass whenever a pass has issued a collective."""
    remaining = [[*range(len(problem.forward))], [*range(len(problem.forward), len(problem))]]
    order: list[int] = []
    turn = 1
    while remaining[0] or remaining[1]:
        while remaining[turn]:
            order.append(remaining[turn].pop(0))
            if problem.streams[order[-1]]:
                break
        turn = 1 - turn
    return tuple(order)
