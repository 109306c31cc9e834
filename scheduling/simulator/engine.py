"""Runs the ranks of a compiled schedule.

A rank issues its commands in order. A compute task occupies it; a queued task starts at the moment it is
issued or when its lane is free, never before the compute tasks that were issued earlier have finished. While
tasks run together on a rank, each advances at 1 / (1 + sum of its slowdowns by the others); two on one link
share it. Links are shared between the ranks of a node in equal parts, which the profile's times contain.

Ranks meet in messages alone, so each runs on its own until it needs one that is still under way. When all of
them do, the transfer that ends first, over all ranks, is certain to end undisturbed.

A block that begins with the same transfers under way, with the same work left, always takes the same course:
it is run once and remembered.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from braid.scheduling.schedule import Block
from braid.scheduling.simulator.compile import (
    LAYER_LANES,
    Await,
    AwaitMessage,
    Body,
    Command,
    Issue,
    Place,
    Run,
    RunBlock,
    Synchronise,
    Task,
)

_EPSILON = 1e-6

Slowdown = Callable[[Task, Task], float]
"""How much longer the first task takes while the second one runs."""


@dataclass(frozen=True)
class Executed:
    """A task with the times at which it began and ended, in nanoseconds."""

    task: Task
    start: float
    end: float
    place: Place | None = None


@dataclass
class Queued:
    """A task on a lane: what is left of it, and when it started (None: it has not)."""

    task: Task
    token: object
    place: Place | None
    left: float
    start: float | None = None
    end: float | None = None


@dataclass(frozen=True)
class Fate:
    """What becomes of a transfer during a block; times relative to the block's begin."""

    left: float
    """Work left at the block's end."""
    start: float | None
    """When it started, if it did so within."""
    end: float | None
    """When it ended, if it did so within."""


@dataclass(frozen=True)
class Course:
    """How a block went, times relative to its begin."""

    duration: float
    executed: tuple[Executed, ...]
    fates: tuple[Fate, ...]
    """Of every transfer under way at the begin."""


@dataclass(frozen=True)
class BlockRun:
    """One execution of a block."""

    start: float
    course: Course
    forward: Block | None
    backward: Block | None
    second: Block | None = None
    """Of twins, whose first one stands in its pass's place."""

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Those that there are."""
        return tuple(block for block in (self.forward, self.backward, self.second) if block is not None)


Courses = dict[tuple[object, ...], Course]


@dataclass
class RankRun:
    """One rank: its clock, its lanes, what it has executed."""

    number: int
    commands: Sequence[Command]
    slowdown: Slowdown
    arrivals: dict[object, float]
    courses: Courses
    clock: float = 0.0
    executed: list[Executed] = field(default_factory=list)
    """Transfers between ranks and the update; what blocks execute stands in their courses."""
    blocks: list[BlockRun] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._next = 0
        self._links = 0.0
        """The time up to which the lanes have been advanced; equals the clock but while stalled."""
        self._lanes: dict[str, list[Queued]] = {}
        self._finished: set[object] = set()

    @property
    def done(self) -> bool:
        """Whether all commands have been executed."""
        return self._next == len(self.commands)

    def run(self) -> None:
        """Go on until the end or until a message is needed whose arrival is not known yet."""
        while self._next < len(self.commands):
            command = self.commands[self._next]
            if isinstance(command, AwaitMessage):
                if command.token not in self.arrivals:
                    return
                self._wait_until(self.arrivals[command.token])
            elif isinstance(command, RunBlock):
                self._run_block(command)
            else:
                self._execute(command)
            self._next += 1
        self._drain(lambda: any(self._lanes.values()))

    def _execute(self, command: Run | Issue | Await | Synchronise) -> None:
        match command:
            case Run(task, place):
                self._compute(task, place)
            case Issue(task, token, place, busy_ns):
                lane = self._lanes.setdefault(task.lane, [])
                lane.append(Queued(task, token, place, task.solo_ns))
                if len(lane) == 1:
                    lane[0].start = self.clock
                self._wait(self.clock + busy_ns)
            case Await(token, busy_ns):
                self._drain(lambda: token not in self._finished)
                self._wait(self.clock + busy_ns)
            case Synchronise(ns):
                self._drain(lambda: any(self._lanes.get(lane) for lane in LAYER_LANES))
                self._wait(self.clock + ns)

    # -- blocks ----------------------------------------------------------------------------------------------

    def _run_block(self, command: RunBlock) -> None:
        under_way = [queued for lane in self._lanes.values() for queued in lane]
        key = (id(command.body), *((q.task.key, round(q.left), q.start is None) for q in under_way))
        course = self.courses.get(key)
        if course is None:
            course = self.courses[key] = self._first_course(command.body, under_way)
        begin = self.clock
        self.blocks.append(BlockRun(begin, course, command.forward, command.backward, command.second))
        for queued, fate in zip(under_way, course.fates, strict=True):
            queued.left = fate.left
            if fate.start is not None:
                queued.start = begin + fate.start
            if fate.end is not None:
                self._finish(queued, begin + fate.end)
        self.clock = self._links = begin + course.duration

    def _first_course(self, body: Body, under_way: list[Queued]) -> Course:
        """Run a block on a rank like this one, whose clock begins at zero."""
        rank = RankRun(self.number, (), self.slowdown, {}, {})
        copies = [
            Queued(q.task, _Before(number), None, q.left, None if q.start is None else 0.0)
            for number, q in enumerate(under_way)
        ]
        for copy in copies:
            rank._lanes.setdefault(copy.task.lane, []).append(copy)
        for command in body.commands:
            rank._execute(command)
        return Course(
            duration=rank.clock,
            executed=tuple(done for done in rank.executed if done.place is not None),
            fates=tuple(
                Fate(copy.left, copy.start if before.start is None else None, copy.end)
                for before, copy in zip(under_way, copies, strict=True)
            ),
        )

    # -- time ------------------------------------------------------------------------------------------------

    def _compute(self, task: Task, place: Place | None) -> None:
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
        self.executed.append(Executed(task, start, self.clock, place))

    def _drain(self, unfinished: Callable[[], bool]) -> None:
        """Let the lanes run until what is waited for has finished."""
        while unfinished():
            self.clock += self._advance(self._heads(), float("inf"))
        self._links = self.clock

    def _wait_until(self, time: float) -> None:
        self._wait(max(time, self._links, self.clock))

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
        paces = self._paces(heads)
        return self._links + min(head.left * pace for head, pace in zip(heads, paces, strict=True))

    def complete_next(self) -> None:
        """While stalled: let the transfers run until the next one has ended."""
        stalled_at, self.clock = self.clock, self._links
        self._links += self._advance(self._heads(), float("inf"))
        self.clock = stalled_at

    # -- lanes -----------------------------------------------------------------------------------------------

    def _heads(self) -> list[Queued]:
        return [lane[0] for lane in self._lanes.values() if lane]

    def _paces(self, heads: list[Queued], compute: Task | None = None) -> list[float]:
        paces = []
        for head in heads:
            pace = 1.0 if compute is None else 1.0 + self.slowdown(head.task, compute)
            for other in heads:
                if other is not head:
                    shared = other.task.stream is head.task.stream
                    pace += 1.0 if shared else self.slowdown(head.task, other.task)
            paces.append(pace)
        return paces

    def _advance(self, heads: list[Queued], limit: float, compute: Task | None = None) -> float:
        """Run the heads until one ends or the limit is reached; the time that passed. The clock stays."""
        paces = self._paces(heads, compute)
        passed = min(limit, *(head.left * pace for head, pace in zip(heads, paces, strict=True)))
        for head, pace in zip(heads, paces, strict=True):
            head.left -= passed / pace
            if head.left <= _EPSILON:
                self._finish(head, self.clock + passed)
        return passed

    def _finish(self, queued: Queued, time: float) -> None:
        queued.end = time
        lane = self._lanes[queued.task.lane]
        lane.remove(queued)
        if lane and lane[0].start is None:
            lane[0].start = time
        self._finished.add(queued.token)
        assert queued.start is not None
        self.executed.append(Executed(queued.task, queued.start, time, queued.place))
        if isinstance(queued.token, tuple) and queued.token[0] == "message":
            self.arrivals[queued.token] = time


@dataclass(frozen=True)
class _Before:
    """Token of a transfer that was under way when a block began."""

    number: int


def run_ranks(commands: Sequence[Sequence[Command]], slowdown: Slowdown) -> list[RankRun]:
    """Run all ranks to their ends; `ValueError` on a deadlock, which a validated schedule does not have."""
    arrivals: dict[object, float] = {}
    courses: Courses = {}
    ranks = [RankRun(n, list(own), slowdown, arrivals, courses) for n, own in enumerate(commands)]
    waiting = list(ranks)
    while waiting:
        before = len(arrivals)
        for rank in waiting:
            rank.run()
        waiting = [rank for rank in waiting if not rank.done]
        if waiting and len(arrivals) == before:
            first = min(waiting, key=RankRun.next_completion)
            if first.next_completion() == float("inf"):
                raise ValueError(f"deadlock: ranks {[rank.number for rank in waiting]} wait for each other")
            first.complete_next()
    return ranks
