"""When a run changes its number of ranks, and to which layout.

A change costs a checkpoint, new ranks and its reading, some seconds that are known from earlier changes; it
gains what the remaining steps take less. Global batch and order of samples stay, and so does the loss curve.
"""

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass, replace

from braid.actors.config import Config, ElasticConfig
from braid.actors.controller.planning import build_schedule
from braid.actors.controller.ranks.group import Launcher, NoRoomError, StoppedError, WorkerGroup
from braid.actors.controller.records.run_records import Event, Incident
from braid.scheduling.trace.stragglers import Straggler

_GUESSED_COST_S = 15.0
"""Of a change, until a change has been measured."""
_WORTH = 1.1
"""A plan without a straggler has to be so many times faster."""
_NODES_SECONDS = 1.0
"""Between two questions for the room that there is."""


@dataclass(frozen=True)
class Degrees:
    dp: int
    tp: int
    pp: int
    cp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    def of(self, config: Config) -> Config:
        return config.changed(parallel=asdict(self))


def degrees_of(config: Config) -> Degrees:
    return Degrees(**{axis: getattr(config.parallel, axis) for axis in ("dp", "tp", "pp", "cp", "ep")})


def best_degrees(
    config: Config, capacity: int, runs: Callable[[Config], bool], elastic: ElasticConfig
) -> Degrees | None:
    """The layout with most ranks for a capacity; among equals, the least change of the model's cut.

    Samples are cut over as many ranks of cp as before; experts over as many of ep, or else over fewer.
    ``runs(config)``: whether model and batch fit a layout, and planning accepts it. Layouts are tried from
    the best one on, and the first that runs is returned. None if no layout of ``elastic.min_ranks`` or more
    ranks runs.
    """
    now = degrees_of(config)
    limit = min(capacity, elastic.max_ranks or capacity)
    for samples in range(limit // now.cp, 0, -1):
        if samples * now.cp < (elastic.min_ranks or 1):
            break
        best_first = sorted(
            degrees_with(samples, now.cp, now.ep),
            key=lambda to: (to.tp == now.tp, to.pp == now.pp, to.ep, to.dp, to.tp),
            reverse=True,
        )
        for degrees in best_first:
            if runs(degrees.of(config)):
                return degrees
    return None


def degrees_up_to(limit: int, cp: int = 1, most_ep: int = 1) -> Iterator[Degrees]:
    """Every way to lay out so many ranks, and every smaller number, with ``cp`` and up to ``most_ep``."""
    for samples in range(1, limit // cp + 1):
        yield from degrees_with(samples, cp, most_ep)


def degrees_with(samples: int, cp: int = 1, most_ep: int = 1) -> Iterator[Degrees]:
    """Every way to lay out ``samples`` times ``cp`` ranks with up to ``most_ep``."""
    for tp in (n for n in range(1, samples + 1) if samples % n == 0):
        for pp in (n for n in range(1, samples // tp + 1) if samples // tp % n == 0):
            dp = samples // tp // pp
            for ep in (n for n in range(1, most_ep + 1) if dp * cp % n == 0):
                yield Degrees(dp, tp, pp, cp, ep)


@dataclass(frozen=True)
class Change:
    """What a run does next instead of a step: go on with other ranks."""

    degrees: Degrees
    reason: str
    avoid: tuple[str, ...] = ()
    """Addresses of nodes that no rank is to be placed on, if others do."""


class Resizing:
    """Follows the nodes for one run, and decides after every step whether it should change. Without
    ``elastic.max_ranks`` it only notices nodes that leave."""

    def __init__(self, elastic: ElasticConfig, launcher: Launcher, runs: Callable[[Config], bool]) -> None:
        """``runs(config)``: whether model and batch fit a layout, and its schedule can be planned."""
        self._elastic, self._launcher, self._runs = elastic, launcher, runs
        self._seen: tuple[int, float] | None = None
        """A capacity, and since when it is there."""
        self.cost_s = _GUESSED_COST_S
        self._best: dict[tuple[Degrees, int], Degrees | None] = {}
        """Best layouts by the present layout and the capacity: a search takes as long as ranks are many."""
        self._refused: set[Degrees] = set()
        self._quarantined: dict[str, tuple[float, float]] = {}
        """Until when nodes are left out because they were slow, by address, and for how many seconds."""
        self._waiting_since: float | None = None
        """Since when the run has been without ranks, waiting for room."""
        self._asked = 0.0
        self.leaving = False
        """Whether a node that has ranks is being drained."""

    def look(
        self, group: WorkerGroup, config: Config, slowest: Straggler | None, step_s: float, steps_left: int
    ) -> Change | None:
        """The change to make before the next step, if one is due; asks for room once a second at most.

        ``step_s``: how long a step takes now.
        """
        now = time.monotonic()
        if now - self._asked < _NODES_SECONDS:
            return None
        self._asked = now
        avoid = self._avoided(now)
        capacity, self.leaving = self._launcher.capacity(group, avoid)
        if self._elastic.max_ranks is None:
            return None
        change = self.to_room(config, capacity, now, step_s, steps_left)
        if change is None and slowest is not None:
            address = group.addresses[slowest.rank]
            room, _ = self._launcher.capacity(group, (*avoid, address))
            change = self.without(slowest, address, config, room, now, step_s * steps_left)
            if change is not None:  # twice as long each time that a node is slow again
                _, last = self._quarantined.get(address, (0.0, self._elastic.quarantine_s / 2))
                self._quarantined[address] = now + 2 * last, 2 * last
                change = replace(change, reason=f"{change.reason}, for {2 * last:.0f} s")
        return change and replace(change, avoid=self._avoided(now))

    def to_room(
        self, config: Config, capacity: int, now: float, step_s: float, steps_left: int
    ) -> Change | None:
        """The change to the ranks that there is room for, the run's own included, without nodes that are
        leaving: where one is, there is nothing to weigh."""
        if self._seen is None or self._seen[0] != capacity:
            self._seen = capacity, now
        if not self.leaving and not self._settled(now):
            return None
        best, here = self.best(config, capacity), degrees_of(config)
        if best is None or best == here:
            return None
        if self.leaving:
            return Change(best, f"a node is leaving: {here.ranks} -> {best.ranks} ranks")
        gain_s = steps_left * step_s * (1 - here.ranks / best.ranks)
        if best.ranks <= here.ranks or gain_s <= self.cost_s:
            return None
        return Change(
            best,
            f"there is room for more: {here.ranks} -> {best.ranks} ranks; about {gain_s:.0f} s less for the "
            f"{steps_left} steps left, for about {self.cost_s:.0f} s of change",
        )

    def without(
        self, slow: Straggler, address: str, config: Config, capacity: int, now: float, left_s: float
    ) -> Change | None:
        """The change that leaves a slow rank's node out, if that is faster. ``capacity``: without that node.

        All ranks wait for the slow one; the time of a step is taken to be shared evenly by the ranks. Where
        nodes have just come or gone, what to do about that comes first: one change costs less than two.
        """
        here = degrees_of(config)
        if not self._settled(now) or (best := self.best(config, min(capacity, here.ranks))) is None:
            return None
        faster = best.ranks * slow.times / here.ranks
        if faster <= _WORTH or left_s * (1 - 1 / faster) <= self.cost_s:
            return None
        reason = f"rank {slow.rank} on {address} takes {slow.times:.2f} times as long as others"
        return Change(best, f"{reason}: on without it")

    def _settled(self, now: float) -> bool:
        return self._seen is not None and now - self._seen[1] >= self._elastic.settle_s

    def best(self, config: Config, capacity: int) -> Degrees | None:
        """`best_degrees` among layouts that are not refused, searched for once."""
        key = degrees_of(config), capacity
        if key not in self._best:

            def runs(config: Config) -> bool:
                return degrees_of(config) not in self._refused and self._runs(config)

            self._best[key] = best_degrees(config, capacity, runs, self._elastic)
        return self._best[key]

    def refuse(self, degrees: Degrees) -> None:
        """Planning refuses a layout, for a reason that only measured costs show: it is not proposed again."""
        self._refused.add(degrees)
        self._best.clear()

    def _avoided(self, now: float) -> tuple[str, ...]:
        """Addresses of nodes that no rank is to be placed on at present."""
        return tuple(sorted(address for address, (until, _) in self._quarantined.items() if until > now))

    def what_is_left(
        self, error: NoRoomError, why: str, left: int, config: Config, step: int, stopped: Callable[[], bool]
    ) -> Generator[Event, None, Change]:
        """The change to what nodes there are, waiting for more if they are too few.

        left: ranks that have just given up their places, which Ray may not count as free yet. Raises the
        error of a run that is not elastic.
        """
        if self._elastic.max_ranks is None:
            raise error
        self._waiting_since = self._waiting_since or time.monotonic()
        deadline = self._waiting_since + self._elastic.wait_s
        told = False
        while not stopped():
            avoid = self._avoided(time.monotonic())
            capacity = max(left, self._launcher.capacity(None, avoid)[0])
            best = self.best(config, capacity)
            if best is not None and time.monotonic() <= deadline:
                return Change(best, f"{why}: {error}", avoid)
            if avoid:  # better slow than not at all
                self._quarantined = {node: (0.0, seconds) for node, (_, seconds) in self._quarantined.items()}
                continue
            if time.monotonic() > deadline:
                raise NoRoomError(f"{error}; no layout from elastic.min_ranks on fits {capacity} ranks")
            if not told:
                told = True
                yield Incident(kind="waiting", text=f"{error}; waiting for nodes", step=step)
            time.sleep(_NODES_SECONDS)
        raise StoppedError

    def started(self) -> None:
        """Ranks have started: there is room."""
        self._waiting_since = None


def can_be_planned(config: Config, vocabulary: int) -> bool:
    """Whether model and batch fit a layout, and its schedule can be planned."""
    try:
        shape = config.check(vocabulary)
        # Schedules that are searched for are planned from measured costs: of another schedule's run.
        build_schedule(config.with_schedule("megatron") if config.overlap.needs_profile else config, shape)
    except ValueError:
        return False
    return True
