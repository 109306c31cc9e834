"""When a run changes its number of ranks, and to which layout. Pure: time and capacity are arguments.

A change costs a checkpoint, new ranks and its reading, some seconds that are known from earlier changes; it
gains what the remaining steps take less. Global batch and order of samples stay, and so does the loss curve.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from braid.actors.config import Config, ElasticConfig
from braid.scheduling.trace.stragglers import Straggler

_GUESSED_COST_S = 15.0
"""Of a change, until a change has been measured."""
_WORTH = 1.1
"""A plan without a straggler has to be so many times faster."""


@dataclass(frozen=True)
class Degrees:
    """A layout that a run could have."""

    dp: int
    tp: int
    pp: int
    cp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    def of(self, config: Config) -> Config:
        parallel = config.parallel.model_copy(update=asdict(self))
        return config.model_copy(update={"parallel": parallel})


def degrees_of(config: Config) -> Degrees:
    parallel = config.parallel
    return Degrees(parallel.dp, parallel.tp, parallel.pp, parallel.cp, parallel.ep)


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


class Elasticity:
    """Decides after every step whether the run should change."""

    def __init__(self, elastic: ElasticConfig, runs: Callable[[Config], bool]) -> None:
        self._elastic, self._runs = elastic, runs
        self._seen: tuple[int, float] | None = None
        """A capacity, and since when it is there."""
        self.cost_s = _GUESSED_COST_S
        self._best: dict[tuple[Degrees, int], Degrees | None] = {}
        """Best layouts by the present layout and the capacity: a search takes as long as ranks are many."""

    def best(self, config: Config, capacity: int) -> Degrees | None:
        """`best_degrees`, searched for once."""
        key = degrees_of(config), capacity
        if key not in self._best:
            self._best[key] = best_degrees(config, capacity, self._runs, self._elastic)
        return self._best[key]

    def forget(self) -> None:
        """Search anew: other layouts fit now."""
        self._best.clear()

    def look(
        self, config: Config, capacity: int, leaving: bool, now: float, step_s: float, steps_left: int
    ) -> Change | None:
        """The change to be made now, if one is.

        capacity: ranks that there is room for, the run's own included, without nodes that are ``leaving``
        (draining; then there is nothing to weigh). step_s: how long a step takes now.
        """
        if self._seen is None or self._seen[0] != capacity:
            self._seen = capacity, now
        if not leaving and not self._settled(now):
            return None
        best = self.best(config, capacity)
        here = degrees_of(config)
        if best is None or best == here:
            return None
        if leaving:
            return Change(best, f"a node is leaving: {here.ranks} -> {best.ranks} ranks")
        if best.ranks <= here.ranks:
            return None
        gain_s = steps_left * step_s * (1 - here.ranks / best.ranks)
        if gain_s <= self.cost_s:
            return None
        return Change(
            best,
            f"there is room for more: {here.ranks} -> {best.ranks} ranks; about {gain_s:.0f} s less for the "
            f"{steps_left} steps left, for about {self.cost_s:.0f} s of change",
        )

    def without(
        self,
        config: Config,
        straggler: Straggler,
        address: str,
        capacity: int,
        now: float,
        step_s: float,
        steps_left: int,
    ) -> Change | None:
        """The change that leaves a slow rank's node out, if that is faster. ``capacity``: without that node.

        All ranks wait for the slow one; the time of a step is taken to be shared evenly by the ranks. Where
        nodes have just come or gone, what to do about that comes first: one change costs less than two.
        """
        if not self._settled(now):
            return None
        here = degrees_of(config)
        best = self.best(config, min(capacity, here.ranks))
        if best is None or best.ranks * straggler.times <= here.ranks * _WORTH:
            return None
        if steps_left * step_s * (1 - here.ranks / (best.ranks * straggler.times)) <= self.cost_s:
            return None
        reason = f"rank {straggler.rank} on {address} takes {straggler.times:.2f} times as long as others"
        return Change(best, f"{reason}: on without it")

    def _settled(self, now: float) -> bool:
        """Whether the capacity has been the same for long enough."""
        return self._seen is not None and now - self._seen[1] >= self._elastic.settle_s
