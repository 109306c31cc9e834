"""Reports the outcome of a drill."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from braid.jobs.drill.census import Census
from braid.jobs.drill.plan import PlannedFault


@dataclass
class FaultOutcome:
    """Outcome of one fault; times are in seconds."""

    fault: PlannedFault
    fired: float
    """Time at which it occurred, in seconds since 1970."""
    detected_after: float | None = None
    """Seconds until it was detected; None: there was nothing to detect."""
    recovered_after: float | None = None
    """Seconds from its detection to the end of the first step after it."""
    steps_lost: int = 0
    restored_from: str = ""
    parts: dict[str, float] = field(default_factory=dict)
    noticed: str = ""
    """The controller's message about it."""

    def note(self, incident: Mapping[str, Any]) -> None:
        """Copy what the controller has recorded about the fault."""
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
    """Outcome of a whole drill."""

    outcomes: list[FaultOutcome]
    identical_losses: bool
    identical_parameters: bool
    identical_samples: bool
    largest_difference: float
    """Largest difference of a loss, relative to the undisturbed run."""
    allowed_difference: float
    """Largest difference that is allowed; 0: losses and parameters must be bit-identical."""
    interval: int
    """Steps between two checkpoints."""
    seconds: float
    emulated_hosts: bool
    emulated_nodes: bool
    held: list[Census]
    """Resources of the machine that the run held before the first fault and after the last one; empty if its
    number of ranks differed."""

    @property
    def close(self) -> bool:
        """Whether losses may differ, and differ by no more than allowed."""
        return 0 < self.allowed_difference >= self.largest_difference

    @property
    def passed(self) -> bool:
        """Whether the run came out as if no fault had occurred."""
        exact = self.identical_losses and self.identical_parameters
        return self.identical_samples and (exact or self.close)

    @property
    def most_lost(self) -> int:
        """Largest number of steps that one fault cost."""
        return max((outcome.steps_lost for outcome in self.outcomes), default=0)

    def as_json(self) -> dict[str, Any]:
        """Convert to one JSON object."""
        return {**asdict(self), "most_lost": self.most_lost, "passed": self.passed}


def show(console: Console, report: Report) -> None:
    """Print the table of faults, and whether the run came out as required."""
    where = "this machine"
    if report.emulated_hosts:
        where = "gloo, two emulated hosts"
    elif report.emulated_nodes:
        where = "gloo, emulated nodes on one machine"
    numbers = (Column(name, justify="right") for name in ("detected after", "recovered after", "steps lost"))
    table = Table(
        Column("fault", no_wrap=True),
        *numbers,
        Column("restored from", no_wrap=True),
        title=f"Fault drill ({where})",
        title_justify="left",
    )
    for outcome in report.outcomes:
        after = outcome.detected_after, outcome.recovered_after
        detected, recovered = ("" if seconds is None else f"{seconds:.2f} s" for seconds in after)
        lost = str(outcome.steps_lost) if detected else ""
        table.add_row(
            outcome.fault.name, detected, recovered, lost, outcome.restored_from or "no rank failed"
        )
    console.print(table)
    allowed = report.allowed_difference
    if allowed:
        console.print(
            f"asked: the samples of every step, and losses within {allowed:g}, as other numbers of ranks add "
            f"up in another order (train.deterministic_reduction asks for the same bits)",
            highlight=False,
        )
    for what, same, enough in (
        ("losses", report.identical_losses, f"within {allowed:g}" if report.close else ""),
        ("final parameters", report.identical_parameters, "not the same bits" if allowed else ""),
        ("samples of every step", report.identical_samples, ""),
    ):
        verdict = f"[green]{enough}[/green]" if enough else "[red]DIFFERENT[/red]"
        if same:
            verdict = "[green]identical, bit for bit[/green]"
        console.print(f"{what}: {verdict}", highlight=False)
    color = "green" if report.most_lost <= report.interval else "yellow"
    console.print(
        f"steps lost by one fault, at most: [{color}]{report.most_lost}; a checkpoint every "
        f"{report.interval}[/{color}]",
        highlight=False,
    )
    for when, held in zip(("before the first fault", "after the last fault"), report.held, strict=False):
        console.print(
            f"{when}: {held.processes} processes, {held.threads} threads, {held.files} files ({held.sockets} "
            f"sockets), {held.resident_bytes / 2**20:.0f} MiB",
            highlight=False,
        )
    if not report.identical_losses:
        console.print(f"largest relative difference of a loss: {report.largest_difference:.2e}")
