"""How many failures a run puts up with. Pure."""

from typing import Final

REFILL_STEPS: Final = 100
"""So many new steps give one failure back."""


class RestartBudget:
    """Each failure takes one; so many good steps, which were not done before, give one back.

    So a run of a month outlives many failures, and one that fails again and again at the same place ends.
    """

    def __init__(self, most: int, refill_steps: int = REFILL_STEPS) -> None:
        """``most``: failures that are put up with at once; -1: as many as there are."""
        self.most, self._refill_steps = most, refill_steps
        self.spent = 0
        self._good = self._furthest = 0

    def spend(self) -> bool:
        """Take one; False if none is left."""
        if self.most < 0:
            self.spent += 1
            return True
        if self.spent >= self.most:
            return False
        self.spent += 1
        self._good = 0
        return True

    def step_done(self, step: int) -> None:
        """So many steps are done now; those that were repeated count once."""
        if step <= self._furthest:
            return
        self._furthest = step
        self._good += 1
        if self._good >= self._refill_steps and self.spent:
            self._good, self.spent = 0, self.spent - 1

    def __str__(self) -> str:
        return f"{self.spent} of {self.most}" if self.most >= 0 else f"{self.spent}"
