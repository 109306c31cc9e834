"""Counts what interrupts a run: failures, of which it tolerates a limited number, and changes of its
ranks."""

import contextlib
import time
from collections.abc import Iterator
from typing import Final

from braid.actors.config import FailureConfig
from braid.actors.controller.ranks.group import WorkerError
from braid.actors.controller.state.recovery import Interruption

MAX_TRIES: Final = 5
"""Most tries of one recovery: failures in a row between which no step was done."""
BACKOFF_S: Final = 1.0
"""Seconds to wait before the second try of a recovery; doubled with each further try."""
REFILL_STEPS: Final = 100
"""Number of new steps after which one failure no longer counts."""


class RestartBudget:
    """A number of failures that are tolerated; every ``refill_steps`` new steps, one failure no longer
    counts.

    So a run of a month outlives many failures, and a run that fails again and again at the same place ends.
    """

    def __init__(self, most: int, refill_steps: int = REFILL_STEPS) -> None:
        """``most``: failures that are tolerated at once; -1: any number."""
        self.most, self._refill_steps = most, refill_steps
        self.spent = 0
        self._good = self._furthest = 0

    def spend(self) -> bool:
        """Count one failure; return False if no more are tolerated."""
        if 0 <= self.most <= self.spent:
            return False
        self.spent += 1
        self._good = 0
        return True

    def step_done(self, step: int) -> None:
        """Note that ``step`` steps are done; repeated steps count once."""
        if step <= self._furthest:
            return
        self._furthest = step
        self._good += 1
        if self._good >= self._refill_steps and self.spent:
            self._good, self.spent = 0, self.spent - 1

    def __str__(self) -> str:
        return f"{self.spent} of {self.most}" if self.most >= 0 else f"{self.spent}"


class SpikeError(WorkerError):
    """A step is to be repeated because of its loss; the ranks are not at fault."""


class GuardError(WorkerError):
    """A guard ends the run, as the configuration asks; the ranks are not at fault."""


class Interruptions:
    """Counts a run's interruptions, and keeps the newest failure and change until a step is done."""

    def __init__(self, config: FailureConfig, failure: Interruption | None = None) -> None:
        self.budget = RestartBudget(config.max_restarts)
        self._spikes = RestartBudget(config.max_restarts)
        self.repeated: set[int] = set()
        """Steps that were repeated because of their loss, in any generation."""
        self._tries = 0
        """Failures since the last finished step."""
        self.failure = failure
        """The failure after which the present generation was formed, until a step is done."""
        self._changes: list[Interruption] = []
        """Changes of the ranks since the last finished step."""

    def goes_on_after(self, error: WorkerError) -> bool:
        """Return whether the run tolerates a failure; further tries of the same recovery do not use the
        budget."""
        if isinstance(error, SpikeError):
            return True
        self._tries += 1
        if self._tries > 1 and self.budget.most:
            return self._tries <= MAX_TRIES
        return self.budget.spend()

    def repeats(self, step: int) -> bool:
        """Return whether a step is to be repeated because of its loss: once per step, and not for too many
        steps."""
        if step in self.repeated or not self._spikes.spend():
            return False
        self.repeated.add(step)
        return True

    @property
    def wait_s(self) -> float:
        """Seconds to wait before the next try; longer with every failure in a row after which no step was
        done."""
        return BACKOFF_S * 2 ** (self._tries - 2) if self._tries > 1 else 0.0

    @property
    def counted(self) -> str:
        """The number of failures so far, as text to append to a message about the last one."""
        tries = f", try {self._tries}" if self._tries > 1 else ""
        return f" (restart {self.budget}{tries})" if self._tries else ""

    def change(self, changed: Interruption) -> None:
        """Record a change of ranks: the next generation has other ranks, and its state from a checkpoint."""
        self._changes.append(changed)
        self.failure = None

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time of the block to the parts of the present failure or change, if there is one."""
        cause = self.failure or next(reversed(self._changes), None)
        begin = time.monotonic()
        yield
        if cause is not None:
            cause.parts[part] = time.monotonic() - begin

    def step_done(self, step: int, now: float) -> list[Interruption]:
        """Note that ``step`` steps are done; return the changes and the failure that this ends."""
        self._tries = 0
        self.budget.step_done(step)
        self._spikes.step_done(step)
        over = [*self._changes, *([self.failure] if self.failure is not None else [])]
        self.failure, self._changes = None, []
        for cause in over:
            cause.parts["first step"] = now - cause.time - sum(cause.parts.values())
        return over
