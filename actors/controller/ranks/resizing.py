"""Asks what room the nodes have, and says when a run should go on with other ranks (`elastic` decides)."""

import time
from collections.abc import Callable, Generator
from dataclasses import replace

from braid.actors.config import Config
from braid.actors.controller.planning import build_schedule
from braid.actors.controller.ranks.elastic import Change, Degrees, Elasticity, degrees_of
from braid.actors.controller.ranks.group import Launcher, NoRoomError, StoppedError, WorkerGroup
from braid.actors.controller.records.run_records import Event, Incident
from braid.scheduling.trace.stragglers import Straggler

_NODES_SECONDS = 1.0
"""Between two questions for the room that there is."""


class Resizing:
    """Follows the nodes for one run. With ``elastic.max_ranks`` unset it only notices nodes that leave."""

    def __init__(self, config: Config, launcher: Launcher, vocabulary: int) -> None:
        self._launcher, self._vocabulary = launcher, vocabulary
        self._elastic = config.elastic
        self.membership = (
            Elasticity(config.elastic, self._fits) if config.elastic.max_ranks is not None else None
        )
        self._quarantined: dict[str, tuple[float, float]] = {}
        """Until when nodes are left out because they were slow, by address, and for how many seconds."""
        self._refused: set[Degrees] = set()
        self._waiting_since: float | None = None
        """Since when the run has been without ranks, waiting for room."""
        self._asked = 0.0
        self.leaving = False
        """Whether a node that has ranks is being drained."""

    def look(
        self,
        group: WorkerGroup,
        config: Config,
        slowest: Straggler | None,
        step_s: Callable[[], float],
        steps_left: int,
    ) -> Change | None:
        """The change to make before the next step, if one is due; asks for room once a second at most."""
        now = time.monotonic()
        if now - self._asked < _NODES_SECONDS:
            return None
        self._asked = now
        avoid = self._avoided(now)
        capacity, self.leaving = self._launcher.capacity(group, avoid)
        if self.membership is None:
            return None
        change = self.membership.look(config, capacity, self.leaving, now, step_s(), steps_left)
        if change is None and slowest is not None:
            address = group.addresses[slowest.rank]
            room, _ = self._launcher.capacity(group, (*avoid, address))
            change = self.membership.without(config, slowest, address, room, now, step_s(), steps_left)
            if change is not None:  # twice as long each time that a node is slow again
                _, last = self._quarantined.get(address, (0.0, self._elastic.quarantine_s / 2))
                self._quarantined[address] = now + 2 * last, 2 * last
                change = replace(change, reason=f"{change.reason}, for {2 * last:.0f} s")
        return change and replace(change, avoid=self._avoided(now))

    def _avoided(self, now: float) -> tuple[str, ...]:
        """Addresses of nodes that no rank is to be placed on at present."""
        return tuple(sorted(address for address, (until, _) in self._quarantined.items() if until > now))

    def what_is_left(
        self,
        config: Config,
        error: NoRoomError,
        why: str,
        left: int,
        step: int,
        stopped: Callable[[], bool],
    ) -> Generator[Event, None, Change]:
        """The change to what nodes there are, waiting for more if they are too few.

        left: ranks that have just given up their places, which Ray may not count as free yet. Raises the
        error of a run that is not elastic.
        """
        if self.membership is None:
            raise error
        text = str(error)
        self._waiting_since = self._waiting_since or time.monotonic()
        deadline = self._waiting_since + self._elastic.wait_s
        told = False
        while True:
            if stopped():
                raise StoppedError
            avoid = self._avoided(time.monotonic())
            capacity = max(left, self._launcher.capacity(None, avoid)[0])
            best = self.membership.best(config, capacity)
            if best is not None and time.monotonic() <= deadline:
                return Change(best, f"{why}: {text}", avoid)
            if avoid:  # better slow than not at all
                self._quarantined = {
                    address: (0.0, seconds) for address, (_, seconds) in self._quarantined.items()
                }
                continue
            if time.monotonic() > deadline:
                raise NoRoomError(f"{text}; no layout from elastic.min_ranks on fits {capacity} ranks")
            if not told:
                told = True
                yield Incident(kind="waiting", text=f"{text}; waiting for nodes", step=step)
            time.sleep(_NODES_SECONDS)

    def started(self) -> None:
        """Ranks have started: there is room."""
        self._waiting_since = None

    def refuse(self, degrees: Degrees) -> None:
        """Planning refuses a layout, for a reason that only measured costs show: it is not proposed again."""
        self._refused.add(degrees)
        if self.membership is not None:
            self.membership.forget()

    def _fits(self, config: Config) -> bool:
        """Whether model and batch fit a layout, and its schedule can be planned."""
        if degrees_of(config) in self._refused:
            return False
        try:
            shape = config.check(self._vocabulary)
            # Schedules that are searched for are planned from measured costs: of another schedule's run.
            measured = config.with_schedule("megatron") if config.overlap.needs_profile else config
            build_schedule(measured, shape)
        except ValueError:
            return False
        return True
