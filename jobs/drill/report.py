"""Reports the outcome of a drill."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from braid.jobs.drill.plan import PlannedFault

COLUMNS = ("fault", "detected after", "recovered after", "steps lost", "restored from")


@dataclass
class FaultOutcome:
    """Outcome of one fault; times are in seconds."""

    fault: PlannedFault
    fired: float
    """Time at which it occurred, in seconds since 1970."""
    detected_after: float | None = None
    """None: there was nothing to detect."""
    recovered_after: float | None = None
    """Seconds from its detection to the end of the first step after it."""
    steps_lost: int = 0
    restored_from: str = ""
    parts: dict[str, float] = field(default_factory=dict)
    noticed: str = ""

    def note(self, incident: Mapping[str, Any]) -> None:
        """Copy what the controller has recorded about the fault."""
        self.detected_after = max(0.0, incident["time"] - self.fired)
        self.recovered_after = incident["recovered_after_seconds"]
        self.steps_lost = incident["steps_lost"]
        kept = incident["step"] - self.steps_lost  # by a change of nodes, whose incidents say no more
        checkpoint = f"checkpoint step-{kept}" if kept else "the beginning"
        self.restored_from = incident.get("restored_from", checkpoint)
        self.parts, self.noticed = incident["parts"], incident["text"]

    def cells(self) -> list[str]:
        """Return the cells of `COLUMNS`."""
        after = (self.detected_after, self.recovered_after)
        detected, recovered = ("" if seconds is None else f"{seconds:.2f} s" for seconds in after)
        lost = str(self.steps_lost) if detected else ""
        return [self.fault.name, detected, recovered, lost, self.restored_from or "(no rank failed)"]

    def __str__(self) -> str:
        return ", ".join(f"{title} {cell}" for title, cell in zip(COLUMNS, self.cells(), strict=True) if cell)


@dataclass
class Report:
    """Outcome of a whole drill."""

    outcomes: list[FaultOutcome]
    identical_losses: bool
    identical_parameters: bool
    identical_samples: bool
    largest_difference: float
    """Largest difference of a loss, relative to the undisturbed run."""
    seconds: float
    emulated_hosts: bool
    emulated_nodes: bool
    held: list[dict[str, int]]
    """Resources of the machine that the run held before the first fault and after the last one; empty if its
    number of ranks differed."""

    @property
    def passed(self) -> bool:
        """Whether the run came out as if no fault had occurred."""
        return self.identical_losses and self.identical_parameters and self.identical_samples

    def as_json(self) -> dict[str, Any]:
        """Convert to one JSON object."""
        return {**asdict(self), "passed": self.passed}


def show(console: Console, report: Report) -> None:
    """Print the table of faults, and whether the run came out as required."""
    where = "gloo, two emulated hosts" if report.emulated_hosts else "this machine"
    if report.emulated_nodes:
        where = "gloo, emulated nodes on one machine"
    columns = (Column(title, justify="right" if title in COLUMNS[1:4] else "left") for title in COLUMNS)
    table = Table(*columns, title=f"Fault drill ({where})", title_justify="left")
    for outcome in report.outcomes:
        table.add_row(*outcome.cells())
    console.print(table)

    lines = []
    for what in ("losses", "parameters", "samples"):
        same = getattr(report, f"identical_{what}")
        lines.append(f"{what}: {'[green]identical, bit for bit[/green]' if same else '[red]DIFFERENT[/red]'}")
    if not report.identical_losses:
        lines.append(f"largest relative difference of a loss: {report.largest_difference:.2e}")
    for when, held in zip(("before the first fault", "after the last fault"), report.held, strict=False):
        lines.append(f"{when}: " + ", ".join(f"{number} {what}" for what, number in held.items()))
    console.print(*lines, sep="\n", highlight=False)
