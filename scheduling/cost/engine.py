"""Simulates the ranks that run linked code, given the prices of its operations.

A rank runs its operations in order. A compute operator occupies it; a transfer starts when it is issued or
when its lane is free, never before the compute operators issued earlier have finished. `physics` computes
how they slow each other down. Ranks of a node share links in equal parts, which the profile's times contain.

Ranks meet in messages alone, so each runs on its own until it needs a message that is still under way. When
all ranks wait, the transfer that ends first, over all ranks, is certain to end undisturbed.

A body that begins with the same transfers under way, with the same work remaining, always takes the same
course: it is run once and remembered.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

from braid.scheduling.cost.physics import EPSILON, Lane, run_compute, run_lanes
from braid.scheduling.cost.prices import LANES, Price, Prices
from braid.scheduling.schedule.code import Stretch
from braid.scheduling.schedule.operations import (
    Barrier,
    Compute,
    Node,
    Operation,
    Pass,
    Receive,
    Send,
    Shared,
    Start,
    Step,
    Wait,
)
from braid.scheduling.schedule.schedule import Block, Prefetch

_OF_LAYERS = 2
"""Number of the first lanes, which hold collectives of layers: a barrier waits for their transfers alone."""


@dataclass(frozen=True)
class Executed:
    """A simulated operation with its price, its begin and its end in nanoseconds."""

    operation: Operation
    price: Price
    start: float
    end: float


@dataclass
class _Flight:
    """A transfer that was issued, with its begin and end in nanoseconds (None if unknown so far)."""

    operation: Operation | None
    price: Price
    token: object
    start: float | None = None
    end: float | None = None


def _token(operation: Start | Wait) -> object:
    """Return the key that identifies a transfer from its start to its wait."""
    what = operation.what
    return (operation.turn, id(what)) if isinstance(what, Node) else what


def _shared(token: object) -> Shared | None:
    """Return ``token`` if it is a gather or sum, which one body may start and another wait for; else None."""
    return token if isinstance(token, Shared) else None


@dataclass(frozen=True)
class _Fate:
    """What becomes, during a body, of a transfer that was under way at its begin: ns of work that remain, and
    begin and end relative to the body's begin, None if they are not in the body."""

    remaining: float
    start: float | None
    end: float | None


@dataclass(frozen=True)
class Course:
    """Simulated execution of a body; all times are in nanoseconds relative to the body's begin."""

    duration: float
    executed: tuple[Executed, ...]
    fates: tuple[_Fate, ...]
    """Outcome for each transfer that was under way at the body's begin."""
    begun: tuple[tuple[int, _Flight, float], ...] = ()
    """(lane, transfer, remaining ns) for each transfer that the body began and that is under way at its
    end."""
    finished: tuple[object, ...] = ()
    """Gathers and sums that have ended during the body, but for which a later body waits."""
    taken: tuple[object, ...] = ()
    """Gathers and sums that earlier bodies began and for which this body has waited."""


@dataclass(frozen=True)
class BlockRun:
    """One execution of a block on a rank, which begins at ``start`` nanoseconds."""

    start: float
    course: Course
    stretch: Stretch


@dataclass
class RankRun:
    """A simulated rank: its clock in nanoseconds, its lanes of transfers, and its executed operations."""

    number: int
    stretches: Sequence[Stretch]
    prices: Prices
    arrivals: dict[Pass, float]
    courses: dict[tuple[object, ...], Course]
    clock: float = 0.0
    executed: list[Executed] = field(default_factory=list)
    """Executed operations outside blocks, and transfers that end outside the block that began them."""
    blocks: list[BlockRun] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._next = 0
        self._links = 0.0
        """Time in ns up to which the lanes have advanced; it equals the clock except while the rank is
        stalled."""
        self._lanes: list[Lane] = [[] for _ in LANES]
        self._flights: list[list[_Flight]] = [[] for _ in LANES]
        self._finished: set[object] = set()
        self._waits: dict[int, frozenset[object]] = {}
        self._completion: float | None = None
        """Cached result of `next_completion` while the rank is stalled."""

    def run(self) -> Pass | None:
        """Run until the rank needs a message whose arrival is unknown; return the pass that the message is
        for.

        Returns None if the rank has run to its end.
        """
        self._completion = None
        while self._next < len(self.stretches):
            stretch = self.stretches[self._next]
            match stretch.instruction:
                case Block():
                    self._run_block(stretch)
                case Wait(Receive(moved)):
                    if moved not in self.arrivals:
                        return moved
                    self._wait(max(self.arrivals[moved], self._links, self.clock))
                case Start(Receive()):
                    pass  # a message arrives when it was sent: receives are started in time
                case _:
                    self._run(stretch)
            self._next += 1
        self._drain(lambda: any(self._lanes))
        return None

    def _run(self, stretch: Stretch) -> None:
        for operation in stretch.operations:
            match operation:
                case Compute():
                    price, start = self.prices.of(operation), self.clock
                    ended = partial(self._ended, start)
                    self.clock += run_compute(self._lanes, self.prices.slow, price.task, price.ns, ended)
                    self._links = self.clock
                    self.executed.append(Executed(operation, price, start, self.clock))
                case Start():
                    price, token = self.prices.of(operation), _token(operation)
                    if price.lane < 0:
                        self._finished.add(token)
                        continue
                    self._issue(price.lane, _Flight(operation, price, token), price.ns)
                    self._wait(self.clock + price.busy_ns)
                case Wait():
                    token = _token(operation)
                    self._drain(partial(self._is_under_way, token))
                    self._finished.discard(token)
                    self._wait(self.clock + self.prices.of(operation).busy_ns)
                case Barrier():
                    self._drain(lambda: any(self._lanes[:_OF_LAYERS]))
                    self._wait(self.clock + self.prices.barrier_ns)

    # -- blocks ----------------------------------------------------------------------------------------------

    def _run_block(self, stretch: Stretch) -> None:
        under_way = [
            (number, flight, remaining)
            for number, (flights, lane) in enumerate(zip(self._flights, self._lanes, strict=True))
            for flight, (_, remaining) in zip(flights, lane, strict=True)
        ]
        landed = frozenset(self._finished & self._awaited(stretch.operations))
        key = (
            id(stretch.operations),
            landed,
            *(
                (n, flight.price.task, round(remaining), flight.start is None, _shared(flight.token))
                for n, flight, remaining in under_way
            ),
        )
        course = self.courses.get(key)
        if course is None:
            course = self.courses[key] = self._first_course(stretch, under_way, landed)
        begin = self.clock
        self.blocks.append(BlockRun(begin, course, stretch))
        self._lanes = [[] for _ in LANES]
        self._flights = [[] for _ in LANES]
        for (number, flight, _), fate in zip(under_way, course.fates, strict=True):
            if fate.start is not None:
                flight.start = begin + fate.start
            self._lanes[number].append((flight.price.task, fate.remaining))
            self._flights[number].append(flight)
        for (number, flight, _), fate in zip(under_way, course.fates, strict=True):
            if fate.end is not None:
                index = self._flights[number].index(flight)
                self._lanes[number].pop(index)
                self._flights[number].pop(index)
                self._note(flight, begin + fate.end)
        for number, flight, remaining in course.begun:
            start = None if flight.start is None else begin + flight.start
            self._lanes[number].append((flight.price.task, remaining))
            self._flights[number].append(replace(flight, start=start))
        self._finished.difference_update(course.taken)
        self._finished.update(course.finished)
        self.clock = self._links = begin + course.duration

    def _awaited(self, operations: Sequence[Operation]) -> frozenset[object]:
        """Return the gathers and sums for which a body waits, also those that it began itself."""
        if id(operations) not in self._waits:
            waited = (op.what for op in operations if isinstance(op, Wait))
            self._waits[id(operations)] = frozenset(what for what in waited if _shared(what) is not None)
        return self._waits[id(operations)]

    def _first_course(
        self,
        stretch: Stretch,
        under_way: Sequence[tuple[int, _Flight, float]],
        landed: frozenset[object],
    ) -> Course:
        """Simulate a block on a copy of this rank, whose clock begins at zero, and return its course.

        ``under_way``: (lane, transfer, remaining ns) at the begin; ``landed``: gathers and sums that have
        ended.
        """
        rank = RankRun(self.number, (), self.prices, {}, {})
        rank._finished.update(landed)
        copies = []
        for index, (number, flight, remaining) in enumerate(under_way):
            token = _shared(flight.token) or ("before", index)
            copy = _Flight(None, flight.price, token, None if flight.start is None else 0.0)
            rank._lanes[number].append((flight.price.task, remaining))
            rank._flights[number].append(copy)
            copies.append(copy)
        rank._run(stretch)
        rests = {
            id(f): rest
            for fs, lane in zip(rank._flights, rank._lanes, strict=True)
            for f, (_, rest) in zip(fs, lane, strict=True)
        }
        earlier = {id(copy) for copy in copies}
        return Course(
            duration=rank.clock,
            executed=tuple(rank.executed),
            fates=tuple(
                _Fate(rests.get(id(copy), 0.0), copy.start if flight.start is None else None, copy.end)
                for (_, flight, _), copy in zip(under_way, copies, strict=True)
            ),
            begun=tuple(
                (number, flight, rests[id(flight)])
                for number, flights in enumerate(rank._flights)
                for flight in flights
                if id(flight) not in earlier
            ),
            finished=tuple(token for token in rank._finished if _shared(token) is not None),
            taken=(
                *landed,
                *(f.token for _, f, _ in under_way if f.token in self._awaited(stretch.operations)),
            ),
        )

    # -- time ------------------------------------------------------------------------------------------------

    def _drain(self, unfinished: Callable[[], bool]) -> None:
        """Advance clock and lanes, transfer by transfer, until ``unfinished`` returns False."""
        while unfinished():
            assert any(self._lanes), "what is waited for was never started"
            self._advance(float("inf"))
        self._links = self.clock

    def _wait(self, time: float) -> None:
        self.clock = self._links
        while self.clock < time - EPSILON:
            if any(self._lanes):
                self._advance(time - self.clock)
            else:
                self.clock = time
        self._links = self.clock

    def _advance(self, limit: float) -> None:
        ended = partial(self._ended, self.clock)
        self.clock += run_lanes(self._lanes, self.prices.slow, limit, ended=ended)

    def next_completion(self) -> float:
        """Return when the next transfer of this stalled rank ends (ns) if no other one starts; infinity if no
        transfer is under way."""
        if self._completion is None:
            self._completion = float("inf")
            if any(self._lanes):
                lanes = [[*lane] for lane in self._lanes]
                self._completion = self._links + run_lanes(lanes, self.prices.slow, float("inf"))
        return self._completion

    def complete_next(self) -> None:
        """Advance the lanes of this stalled rank until the next transfer has ended; the clock stays."""
        self._completion = None
        stalled_at, self.clock = self.clock, self._links
        self._advance(float("inf"))
        self._links, self.clock = self.clock, stalled_at

    # -- lanes -----------------------------------------------------------------------------------------------

    def _issue(self, lane: int, flight: _Flight, ns: float) -> None:
        if not self._lanes[lane]:
            flight.start = self.clock
        self._lanes[lane].append((flight.price.task, ns))
        self._flights[lane].append(flight)

    def _is_under_way(self, token: object) -> bool:
        return token not in self._finished

    def _ended(self, since: float, lane: int, passed: float) -> None:
        """Record that the first transfer of a lane has ended, ``passed`` nanoseconds after the time
        ``since``."""
        time = since + passed
        flight = self._flights[lane].pop(0)
        if self._flights[lane] and self._flights[lane][0].start is None:
            self._flights[lane][0].start = time
        self._note(flight, time)

    def _note(self, flight: _Flight, time: float) -> None:
        flight.end = time
        self._finished.add(flight.token)
        assert flight.start is not None
        if flight.operation is not None:
            self.executed.append(Executed(flight.operation, flight.price, flight.start, time))
        if isinstance(flight.token, Send):
            self.arrivals[flight.token.moved] = time


def _from_update(stretches: Sequence[Stretch]) -> Sequence[Stretch]:
    """Return a stage's stretches; if they end with gathers for the next step, rotate them to begin with the
    update, at which all ranks meet."""
    if not stretches or not isinstance(stretches[-1].instruction, Prefetch):
        return stretches
    update = Compute(Step())
    at = next((n for n, stretch in enumerate(stretches) if stretch.instruction == update), 0)
    return (*stretches[at:], *stretches[:at])


def run_ranks(stages: Sequence[Sequence[Stretch]], prices: Prices) -> list[RankRun]:
    """Simulate one rank of each stage to the end of the step and return the ranks.

    Raises `ValueError` on a deadlock, which a validated schedule does not have.
    """
    arrivals: dict[Pass, float] = {}
    courses: dict[tuple[object, ...], Course] = {}
    ranks = [RankRun(n, _from_update(stage), prices, arrivals, courses) for n, stage in enumerate(stages)]
    ready, stalled, counted = list(ranks), dict[Pass, RankRun](), 0
    while ready or stalled:
        for rank in ready:
            if (needed := rank.run()) is not None:
                stalled[needed] = rank
        if stalled and len(arrivals) == counted:
            first = min(stalled.values(), key=RankRun.next_completion)
            if first.next_completion() == float("inf"):
                numbers = sorted(rank.number for rank in stalled.values())
                raise ValueError(f"deadlock: ranks {numbers} wait for each other")
            first.complete_next()
        news = islice(reversed(arrivals), len(arrivals) - counted)
        ready = [stalled.pop(moved) for moved in news if moved in stalled]
        counted = len(arrivals)
    return ranks
