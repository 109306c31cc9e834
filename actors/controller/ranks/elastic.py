"""Decides when a run changes its number of ranks, and to which layout.

A change costs some seconds, known from earlier changes, to save a checkpoint, start ranks and read it; it
saves time in every remaining step. Global batch and sample order stay, and so does the loss curve.
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
"""Assumed seconds that a change costs, until a change has been measured."""
_WORTH = 1.1
"""Least speed-up with which a plan without the straggler is worth a change."""
_NODES_SECONDS = 1.0
"""Seconds between two queries of how many ranks the cluster has room for."""


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
    """Return the layout with most ranks within ``capacity``; among equals, the one that changes tp and pp
    least.

    Context parallelism (cp) stays; expert parallelism (ep) stays or shrinks. ``runs(config)`` says whether
    model and batch fit a layout, and whether planning accepts it. Layouts are tried from the best one on, and
    the first that runs is returned. Return None if no layout of ``elastic.min_ranks`` or more ranks runs.
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
    """Yield every layout of at most ``limit`` ranks, with exactly ``cp`` and an ep of up to ``most_ep``."""
    for samples in range(1, limit // cp + 1):
        yield from degrees_with(samples, cp, most_ep)


def degrees_with(samples: int, cp: int = 1, most_ep: int = 1) -> Iterator[Degrees]:
    """Yield every layout of ``samples * cp`` ranks whose ep is at most ``most_ep``."""
    for tp in (n for n in range(1, samples + 1) if samples % n == 0):
        for pp in (n for n in range(1, samples // tp + 1) if samples // tp % n == 0):
            dp = samples // tp // pp
            for ep in (n for n in range(1, most_ep + 1) if dp * cp % n == 0):
                yield Degrees(dp, tp, pp, cp, ep)


@dataclass(frozen=True)
class Change:
    """The decision to go on with other ranks before the next step."""

    degrees: Degrees
    reason: str
    avoid: tuple[str, ...] = ()
    """Addresses of nodes on which no rank is placed, as long as the other nodes suffice."""


class Resizing:
    """Follows the cluster's nodes for one run, and decides after every step whether its layout should change.
    Without ``elastic.max_ranks`` it only notices nodes that leave."""

    def __init__(self, elastic: ElasticConfig, launcher: Launcher, runs: Callable[[Config], bool]) -> None:
        """``runs(config)`` says whether model and batch fit a layout, and whether its schedule can be
        planned."""
        self._elastic, self._launcher, self._runs = elastic, launcher, runs
        self._seen: tuple[int, float] | None = None
        """The newest capacity in ranks, and the time since which the cluster has had it."""
        self.cost_s = _GUESSED_COST_S
        self._best: dict[tuple[Degrees, int], Degrees | None] = {}
        """Best layout by present layout and capacity, kept because a search among many ranks takes long."""
        self._refused: set[Degrees] = set()
        self._quarantined: dict[str, tuple[float, float]] = {}
        """For each address of a slow node: the time until which the node is left out, and for how many
        seconds."""
        self._waiting_since: float | None = None
        """Time since which the run has had no ranks and waits for room; None while it has ranks."""
        self._asked = 0.0
        self.leaving = False
        """Whether Ray is draining a node on which the run has ranks."""

    def look(
        self, group: WorkerGroup, config: Config, slowest: Straggler | None, step_s: float, steps_left: int
    ) -> Change | None:
        """Return the change to make before the next step, if one is due; query the cluster at most once a
        second.

        ``step_s``: seconds that a step takes now.
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
        """Return the change to all ranks that there is room for (``capacity``, which includes the run's own
        ranks and leaves out nodes that are leaving). If a node leaves, change without weighing gain against
        cost."""
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
        """Return the change that leaves a slow rank's node out, if that is faster. ``capacity``: without that
        node.

        All ranks wait for the slow one; a step's time is assumed to be shared evenly by the ranks. If nodes
        have just come or gone, return None until that has settled: one change costs less than two.
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
        """Return `best_degrees` among layouts that were not refused, and remember the result."""
        key = degrees_of(config), capacity
        if key not in self._best:

            def runs(config: Config) -> bool:
                return degrees_of(config) not in self._refused and self._runs(config)

            self._best[key] = best_degrees(config, capacity, runs, self._elastic)
        return self._best[key]

    def refuse(self, degrees: Degrees) -> None:
        """Never propose this layout again: planning refused it for a reason that only measured costs show."""
        self._refused.add(degrees)
        self._best.clear()

    def _avoided(self, now: float) -> tuple[str, ...]:
        """Return the addresses of nodes on which no rank is to be placed at present."""
        return tuple(sorted(address for address, (until, _) in self._quarantined.items() if until > now))

    def what_is_left(
        self, error: NoRoomError, why: str, left: int, config: Config, step: int, stopped: Callable[[], bool]
    ) -> Generator[Event, None, Change]:
        """Return the change to a layout for the nodes that remain; wait for more nodes if they are too few.

        ``left``: ranks that have just given up their places, which Ray may not count as free yet. Raise
        ``error`` if the run is not elastic.
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
        """Note that ranks have started, so that the run no longer waits for room."""
        self._waiting_since = None


def can_be_planned(config: Config, vocabulary: int) -> bool:
    """Return whether model and batch fit a layout, and its schedule can be planned."""
    try:
        shape = config.check(vocabulary)
        # A schedule that is searched for needs measured costs, which come from a run of another schedule.
        build_schedule(config.with_schedule("megatron") if config.overlap.needs_profile else config, shape)
    except ValueError:
        return False
    return True
