"""Runs the ranks of a compiled schedule.

A rank issues its commands in order. A compute task occupies it; a queued task starts at the moment it is
issued or when its lane is free, never before the compute tasks that were issued earlier have finished. While
tasks run together on a rank, each advances at 1 / (1 + sum of its slowdowns by the others); two on one link
share it. Links are shared between the ranks of a node in equal parts, which the profile's times contain.

Ranks meet in messages alone, so each runs on its own until it needs one that is still under way. When all of
them do, the transfer that ends first, over all ranks, is certain to end undisturbed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from braid.scheduling.simulator.compile import (
    LAYER_LANES,
    Await,
    AwaitMessage,
    Command,
    Issue,
    Mark,
    Place,
    Run,
    Synchronise,
    Task,
)

_EPSILON = 1e-6

Slowdown = Callable[[Task, Task], float]


@dataclass(frozen=True)
class Executed:
    """A task with the times at which it began and ended, in nanoseconds."""

    task: Task
    place: Place
    start: float
    end: float


@dataclass
class _Running:
    """A queued task: what is left of it, and when it started (negative: it has not)."""

    task: Task
    place: Place
    token: object
    left: float
    start: float = -1.0


@dataclass
class RankRun:
    """One rank: its clock, its lanes, what it has executed."""

    number: int
    commands: Sequence[Command]
    slowdown: Slowdown
    arrivals: dict[object, float]
    clock: float = 0.0
    stalled_ns: float = 0.0
    """Time spent waiting for messages of other ranks, and for own messages to leave."""
    executed: list[Executed] = field(default_factory=list)
    blocks: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end of every block."""

    def __post_init__(self) -> None:
        self._next = 0
        self._links = 0.0
        """The time up to which the lanes have been advanced; equals the clock but while stalled."""
        self._lanes: dict[str, list[_Running]] = {}
        self._finished: set[object] = set()
        self._began = 0.0

    @property
    def done(self) -> bool:
        """Whether all commands have been executed."""
        return self._next == len(self.commands)

    def run(self) -> None:
        """Go on until the end or until a message is needed whose arrival is not known yet."""
        while not self.done:
            if not self._execute(self.commands[self._next]):
                return
            self._next += 1
        self._drain(lambda: any(self._lanes.values()))

    def _execute(self, command: Command) -> bool:
        match command:
            case Run(task, place):
                self._compute(task, place)
            case Issue(task, place, token):
                lane = self._lanes.setdefault(task.lane, [])
                lane.append(_Running(task, place, token, task.solo_ns))
                if len(lane) == 1:
                    lane[0].start = self.clock
            case Await(token):
                before = self.clock
                self._drain(lambda: token not in self._finished)
                if isinstance(token, tuple) and token[0] == "message":
                    self.stalled_ns += self.clock - before
            case AwaitMessage(token):
                if token not in self.arrivals:
                    return False
                self._wait_until(self.arrivals[token])
            case Synchronise(ns):
                self._drain(lambda: any(self._lanes.get(lane) for lane in LAYER_LANES))
                self._idle(ns)
            case Mark(begins):
                if begins:
                    self._began = self.clock
                else:
                    self.blocks.append((self._began, self.clock))
        return True

    # -- time ------------------------------------------------------------------------------------------------

    def _compute(self, task: Task, place: Place) -> None:
        start, left = self.clock, task.solo_ns
        while left > _EPSILON:
            heads = self._heads()
            if not heads:
                self.clock += left
                break
            pace = 1.0 + sum(self.slowdown(task, head.task) for head in heads)
            passed = self._advance(heads, left * pace, task)
            left -= passed / pace
            self.clock += passed
        self._links = self.clock
        self.executed.append(Executed(task, place, start, self.clock))

    def _drain(self, unfinished: Callable[[], bool]) -> None:
        """Let the lanes run until what is waited for has finished."""
        while unfinished():
            self.clock += self._advance(self._heads(), float("inf"))
        self._links = self.clock

    def _idle(self, ns: float) -> None:
        self._wait(self.clock + ns)

    def _wait_until(self, time: float) -> None:
        time = max(time, self._links)
        if time > self.clock:
            self.stalled_ns += time - self.clock
            self._wait(time)

    def _wait(self, time: float) -> None:
        self.clock = self._links
        while self.clock < time - _EPSILON:
            heads = self._heads()
            self.clock = self.clock + self._advance(heads, time - self.clock) if heads else time
        self._links = self.clock

    def next_completion(self) -> float:
        """While stalled: when the next transfer ends if nothing else starts; infinity without one."""
        heads = self._heads()
        if not heads:
            return float("inf")
        return self._links + min(
            head.left * pace for head, pace in zip(heads, self._paces(heads), strict=True)
        )

    def complete_next(self) -> None:
        """While stalled: let the transfers run until the next one has ended."""
        clock = self.clock
        self.clock = self._links
        passed = self._advance(self._heads(), float("inf"))
        self._links += passed
        self.clock = clock

    # -- lanes -----------------------------------------------------------------------------------------------

    def _heads(self) -> list[_Running]:
        return [lane[0] for lane in self._lanes.values() if lane]

    def _paces(self, heads: list[_Running], compute: Task | None = None) -> list[float]:
        paces = []
        for head in heads:
            pace = 1.0 if compute is None else 1.0 + self.slowdown(compute, head.task)
            for other in heads:
                if other is not head:
                    shared = other.task.stream is head.task.stream
                    pace += 1.0 if shared else self.slowdown(head.task, other.task)
            paces.append(pace)
        return paces

    def _advance(self, heads: list[_Running], limit: float, compute: Task | None = None) -> float:
        """Run the heads until one ends or the limit is reached; the time that passed. The clock stays."""
        paces = self._paces(heads, compute)
        passed = min(limit, *(head.left * pace for head, pace in zip(heads, paces, strict=True)))
        for head, pace in zip(heads, paces, strict=True):
            head.left -= passed / pace
            if head.left <= _EPSILON:
                self._finish(head, self.clock + passed)
        return passed

    def _finish(self, head: _Running, time: float) -> None:
        lane = self._lanes[head.task.lane]
        lane.pop(0)
        if lane:
            lane[0].start = time
        self._finished.add(head.token)
        self.executed.append(Executed(head.task, head.place, head.start, time))
        if isinstance(head.token, tuple) and head.token[0] == "message":
            self.arrivals[head.token] = time


def run_ranks(commands: Sequence[Sequence[Command]], slowdown: Slowdown) -> list[RankRun]:
    """Run all ranks to their ends; `ValueError` on a deadlock, which a validated schedule does not have."""
    arrivals: dict[object, float] = {}
    ranks = [RankRun(n, list(own), slowdown, arrivals) for n, own in enumerate(commands)]
    while any(not rank.done for rank in ranks):
        before = len(arrivals)
        for rank in ranks:
            rank.run()
        waiting = [rank for rank in ranks if not rank.done]
        if waiting and len(arrivals) == before:
            first = min(waiting, key=RankRun.next_completion)
            if first.next_completion() == float("inf"):
                raise ValueError(f"deadlock: ranks {[rank.number for rank in waiting]} wait for each other")
            first.complete_next()
    return ranks
