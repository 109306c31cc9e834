"""What came of a drill."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from braid.jobs.drill.census import Census
from braid.jobs.drill.plan import PlannedFault


@dataclass
class FaultOutcome:
    """What came of a fault; seconds."""

    fault: PlannedFault
    fired: float
    """Seconds since 1970."""
    detected_after: float | None = None
    """None: nothing had to be detected."""
    recovered_after: float | None = None
    """From its detection to the end of the first step after it."""
    steps_lost: int = 0
    restored_from: str = ""
    parts: dict[str, float] = field(default_factory=dict)
    noticed: str = ""
    """What the controller said of it."""

    def note(self, incident: Mapping[str, Any]) -> None:
        """Take over what the controller has written down of it."""
        self.detected_after = max(0.0, incident["time"] - self.fired)
        self.recovered_after = incident["recovered_after_seconds"]
        self.steps_lost, self.restored_from = incident["steps_lost"], incident["restored_from"]
        self.parts, self.noticed = incident["parts"], incident["text"]

    def __str__(self) -> str:
        parts = [self.fault.name]
        if self.detected_after is not None:
            parts.append(f"detected after {self.detected_after:.2f} s")
        if self.recovered_after is not None:
            parts.append(f"recovered after {self.recovered_after:.2f} s")
        if self.restored_from:
            parts.append(f"from {self.restored_from}, {self.steps_lost} steps lost")
        return ", ".join(parts)


@dataclass
class Report:
    """A whole drill."""

    outcomes: list[FaultOutcome]
    identical_losses: bool
    identical_parameters: bool
    identical_samples: bool
    largest_difference: float
    """Of the losses, relative to those of the undisturbed run."""
    allowed_difference: float
    """As large as it may be; 0: losses and parameters have to be identical, bit for bit."""
    interval: int
    """Steps from one checkpoint to the next."""
    seconds: float
    emulated_hosts: bool
    emulated_nodes: bool
    held: list[Census]
    """What the run held of the machine before the first fault and after the last one; empty where it did not
    have as many ranks."""

    @property
    def passed(self) -> bool:
        """Whether the run came out as if nothing had been."""
        exact = self.identical_losses and self.identical_parameters
        close = 0 < self.allowed_difference >= self.largest_difference
        return self.identical_samples and (exact or close)

    @property
    def most_lost(self) -> int:
        """Steps that one fault cost, at most."""
        return max((outcome.steps_lost for outcome in self.outcomes), default=0)

    def as_json(self) -> dict[str, Any]:
        """One object."""
        return {**asdict(self), "most_lost": self.most_lost, "passed": self.passed}
