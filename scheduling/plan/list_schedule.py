"""Two strands without barriers: one static order in which a rank issues the operators of both.

An order is a schedule by the executor's rule: compute operators run one after the other; a collective is
issued at its position in the order, after the preceding compute operators, and runs on its stream behind the
collectives issued there before; an operator that needs its result waits. So the search is over orders:
several methods make one, and each is improved by moving operators until no move helps; or branch and bound
finds the best, for small graphs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from braid.scheduling.cost.physics import EPSILON, Lane, run_compute, run_lanes
from braid.scheduling.generate.fixed_orders import round_robin
from braid.scheduling.plan.pairing import Pairing
from braid.scheduling.plan.strands import PairProblem, bits

_FOREVER = float("inf")


@dataclass(frozen=True, kw_only=True)
class IssueOrder:
    """Operators of both strands, by their numbers in the problem, in the order of issue; time in ns."""

    operators: tuple[int, ...]
    ns: float


class State(NamedTuple):
    """A rank after issuing some operators: its clock in ns, and the transfers under way on two links."""

    clock: float
    done: int
    """Mask of the operators that were issued."""
    ready: tuple[int, ...]
    """Operators that may be issued next, in the order of the graphs."""
    queues: tuple[tuple[tuple[int, float], ...], tuple[tuple[int, float], ...]]
    """Per link: operators issued and not finished, with the ns each still needs; the first one runs."""


class Machine:
    """The executor's rule on solo times and slowdowns."""

    def __init__(self, problem: PairProblem) -> None:
        self.solo, self.streams, self.needs = problem.solo_ns, problem.streams, problem.before
        self.count = len(problem)
        self.slowdown: list[list[float]] = problem.slowdown.tolist()
        self.before = [tuple(bits(mask)) for mask in self.needs]
        self.awaited = [
            tuple((needed, self.streams[needed] - 1) for needed in operators if self.streams[needed])
            for operators in self.before
        ]
        """Per operator, the transfers that it waits for, with their lanes."""
        self.followers = [[n for n, ops in enumerate(self.before) if op in ops] for op in range(self.count)]
        self.tail = [*self.solo]
        """Per operator, the longest chain of solo times that begins with it."""
        for op in reversed(range(self.count)):
            for needed in self.before[op]:
                self.tail[needed] = max(self.tail[needed], self.solo[needed] + self.tail[op])

    def start(self) -> State:
        return State(0.0, 0, tuple(op for op in range(self.count) if not self.needs[op]), ((), ()))

    def issue(self, state: State, op: int) -> State:
        """Return the state after issuing one more operator."""
        lanes = [[*state.queues[0]], [*state.queues[1]]]
        clock = self._advance(state.clock, lanes, op)
        done = state.done | 1 << op
        new = [follower for follower in self.followers[op] if not self.needs[follower] & ~done]
        remaining = [waiting for waiting in state.ready if waiting != op]
        ready = tuple(sorted((*remaining, *new)) if new else remaining)
        return State(clock, done, ready, (tuple(lanes[0]), tuple(lanes[1])))

    def _advance(self, clock: float, lanes: list[Lane], op: int) -> float:
        """Issue an operator; return the clock when the next one may be issued."""
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
        """Return when all operators of ``order`` and before have ended; infinity from ``limit`` on."""
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
        """Return a lower bound of any continuation's end: work per stream, and the longest chain."""
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
    """Return the ns of an order; `ValueError` for an operator before its inputs, or twice."""
    machine = Machine(problem)
    state = machine.start()
    for op in order:
        if op not in state.ready:
            raise ValueError(f"operator {op} stands before what it needs, or twice")
        state = machine.issue(state, op)
    return machine.finish(state)


def list_schedule(problem: PairProblem, starts: Sequence[Sequence[int]] = ()) -> IssueOrder:
    """Return a good order: the best of several, each improved by moving a few operators at a time.

    ``starts``: further orders to begin with, such as a pairing's (`pairing_order`).
    """
    candidates = {tuple(order) for order in starts}
    candidates |= {switching_order(problem), _greedy_order(problem)}
    ranked = sorted((issue_ns(problem, order), order) for order in candidates)
    orders = [improved(problem, IssueOrder(operators=order, ns=ns)) for ns, order in ranked[:3]]
    return min(orders, key=lambda order: order.ns)


def pairing_order(problem: PairProblem, pairing: Pairing) -> tuple[int, ...]:
    """Return a pairing's segments as an order without barriers: collectives first, then compute."""
    streams, order = problem.streams, list[int]()
    for forward, backward in pairing.segments:
        ops = [*(len(problem.forward) + op for op in bits(backward)), *bits(forward)]
        order += sorted(ops, key=lambda op: streams[op] == 0)
    return tuple(order)


def _greedy_order(problem: PairProblem) -> tuple[int, ...]:
    """Return an order of collectives as soon as possible, else compute operators that need not wait.

    Of several the operator with the longest chain behind it comes first.
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
    """Move one to three neighbouring operators to the position where they help most, until no move helps."""
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
    """Return the order with some neighbouring operators at their best position, and its ns."""
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


def exact_order(problem: PairProblem, limit: int = 2_000_000) -> IssueOrder:
    """Return the best order, by branch and bound; `ValueError` beyond ``limit`` visited states."""
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
        if visited > limit:
            raise ValueError(f"the exact search visited {limit} states without an end; use fewer operators")
        # Dominated: the same operators were issued no later, with as much work remaining. Less work remaining
        # is not enough: the next collective on a link then starts sooner, perhaps beside an operator that it
        # slows down more than the wait would have cost.
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
    """Return an order in which strands take turns, operator by operator, the backward strand first."""
    count = len(problem.forward)
    return round_robin((range(count), range(count, len(problem))))


def switching_order(problem: PairProblem) -> tuple[int, ...]:
    """Return an order in which a strand runs until it starts a collective, then the other strand runs."""
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
