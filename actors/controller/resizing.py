"""Asks what room the nodes have, and says when a run should go on with other ranks (`elastic` decides)."""

import time
from collections.abc import Callable, Generator

from braid.actors.config import Config, ConfigError
from braid.actors.controller.elastic import Change, Membership, best_degrees
from braid.actors.controller.group import Launcher, NoRoomError, WorkerGroup
from braid.actors.controller.records import Event, Incident
from braid.scheduling.stragglers import Straggler

_NODES_SECONDS = 1.0
"""Between two questions for the room that there is."""


class Resizing:
    """Follows the nodes for one run. With ``elastic.max_ranks`` unset it only notices nodes that leave."""

    def __init__(self, config: Config, launcher: Launcher, vocabulary: int) -> None:
        self._launcher, self._vocabulary = launcher, vocabulary
        self._elastic = config.elastic
        self.membership = (
            Membership(config.elastic, self._fits) if config.elastic.max_ranks is not None else None
        )
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
        capacity, self.leaving = self._launcher.capacity(group)
        if self.membership is None:
            return None
        change = self.membership.look(config, capacity, self.leaving, now, step_s(), steps_left)
        if change is None and slowest is not None:
            address = group.addresses[slowest.rank]
            change = self.membership.without(config, slowest, address, capacity, now, step_s(), steps_left)
        return change

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
        deadline = time.monotonic() + self._elastic.wait_s
        told = False
        while True:
            capacity = max(left, self._launcher.capacity(None)[0])
            best = best_degrees(config, capacity, self._fits, self._elastic)
            if best is not None:
                return Change(best, f"{why}: {text}")
            if time.monotonic() > deadline or stopped():
                raise NoRoomError(f"{text}; no layout from elastic.min_ranks on fits {capacity} ranks")
            if not told:
                told = True
                yield Incident(kind="waiting", text=f"{text}; waiting for nodes", step=step)
            time.sleep(_NODES_SECONDS)

    def _fits(self, config: Config) -> bool:
        try:
            config.check(self._vocabulary)
        except ConfigError:
            return False
        return True
