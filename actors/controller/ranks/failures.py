"""What interrupts a run: failures, of which it tolerates only so many, and changes of its ranks."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from braid.actors.config import FailureConfig
from braid.actors.controller.ranks.group import WorkerError
from braid.actors.controller.state.recovery import Interruption

MAX_TRIES: Final = 5
"""Of one recovery: failures in a row between which no step was done."""
BACKOFF_S: Final = 1.0
"""Before the second try of a recovery; doubled each time."""
REFILL_STEPS: Final = 100
"""So many new steps give one failure back."""


class RestartBudget:
    """Each failure takes one; so many good steps, which were not done before, give one back.

    So a run of a month outlives many failures, and a run that fails again and again at the same place ends.
    """

    def __init__(self, most: int, refill_steps: int = REFILL_STEPS) -> None:
        """``most``: failures that are put up with at once; -1: as many as there are."""
        self.most, self._refill_steps = most, refill_steps
        self.spent = 0
        self._good = self._furthest = 0

    def spend(self) -> bool:
        """Take one; False if none is left."""
        if 0 <= self.most <= self.spent:
            return False
        self.spent += 1
        self._good = 0
        return True

    def step_done(self, step: int) -> None:
        """``step`` steps are done; repeated steps count once."""
        if step <= self._furthest:
            return
        self._furthest = step
        self._good += 1
        if self._good >= self._refill_steps and self.spent:
            self._good, self.spent = 0, self.spent - 1

    def __str__(self) -> str:
        return f"{self.spent} of {self.most}" if self.most >= 0 else f"{self.spent}"


class SpikeError(WorkerError):
    """A step is to be repeated because of its loss: nothing is wrong with the ranks."""


class GuardError(WorkerError):
    """A guard ends the run, as the configuration asks: nothing is wrong with the ranks."""


class Interruptions:
    """Counts the interruptions of a run, and keeps the newest failure and change until a step is done."""

    def __init__(self, config: FailureConfig, failure: Interruption | None = None) -> None:
        self._max_restarts = config.max_restarts
        self.budget = RestartBudget(config.max_restarts)
        self._spikes = RestartBudget(config.max_restarts)
        self.repeated: set[int] = set()
        """Steps that were repeated because of their loss, in all generations."""
        self._tries = 0
        """Failures since a step was done last."""
        self.failure = failure
        """What the present generation was formed for, until a step is done."""
        self._changed: Interruption | None = None
        """The change that the present generation was formed for, until a step is done."""

    def goes_on_after(self, error: WorkerError) -> bool:
        """Whether the run tolerates a failure: another try of a recovery costs nothing."""
        if isinstance(error, SpikeError):
            return True
        self._tries += 1
        if self._tries > 1 and self._max_restarts:
            return self._tries <= MAX_TRIES
        return self.budget.spend()

    def repeats(self, step: int) -> bool:
        """Whether a step is to be repeated because of its loss: once, and not too many steps."""
        if step in self.repeated or not self._spikes.spend():
            return False
        self.repeated.add(step)
        return True

    @property
    def wait_s(self) -> float:
        """Before the next try: failures in a row, none of which trained a step, are waited for longer."""
        return BACKOFF_S * 2 ** (self._tries - 2) if self._tries > 1 else 0.0

    @property
    def counted(self) -> str:
        """The failures so far, to add to a text about the last one."""
        tries = f", try {self._tries}" if self._tries > 1 else ""
        return f" (restart {self.budget}{tries})" if self._tries else ""

    def change(self, changed: Interruption) -> None:
        """The next generation has other ranks, and state from a checkpoint."""
        if (before := self._changed) is not None:  # no step was done with the ranks of that one: both are one
            ranks = [before.facts["ranks"][0], changed.facts["ranks"][1]]
            given_up, text = changed.time - before.time, f"{before.text}; then {changed.text}"
            changed = replace(before, text=text, facts={"ranks": ranks}, parts={"given up": given_up})
        self._changed = changed
        self.failure = None

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time of the block to the parts of the failure or change, if there is one."""
        cause = self.failure or self._changed
        begin = time.monotonic()
        yield
        if cause is not None:
            cause.parts[part] = time.monotonic() - begin

    def step_done(self, step: int, now: float) -> list[Interruption]:
        """So many steps are done: the failure and the change that are over with it."""
        self._tries = 0
        self.budget.step_done(step)
        self._spikes.step_done(step)
        over = [cause for cause in (self.failure, self._changed) if cause is not None]
        self.failure = self._changed = None
        for cause in over:
            cause.parts["first step"] = now - cause.time - sum(cause.parts.values())
        return over
