"""What a tool that follows a run is told, and the numbers of a step that such tools draw."""

from collections.abc import Mapping
from typing import Any, Final

from braid.dashboards.run_files import flat, is_number

_NO_CHARTS: Final = ("step", "time", "samples", "generation")  # fields of a step's record that need no chart


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of ``metrics.jsonl``; numbers of a section are named ``SECTION/NAME``, a
    group of charts."""
    seconds = line.get("wall_seconds") or line["seconds"]
    found = {**flat(line), "tokens_per_second": line["tokens"] / seconds if seconds else None}
    numbers = {name.replace(".", "/"): value for name, value in found.items() if is_number(value)}
    return {name: float(value) for name, value in numbers.items() if name not in _NO_CHARTS}


class Tracker:
    """A tool that is told of a run; by default it takes nothing."""

    def step(self, line: Mapping[str, Any]) -> None:
        """Take a finished step; ``line``: its line of ``metrics.jsonl``."""

    def event(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Take an event of kind start, failure, checkpoint or end. The facts of an end have the key ``error``
        if the run has failed."""

    def close(self) -> None:
        """End: all has been told."""


class GoesOnError(Exception):
    """A tracker could not take something; it is told what comes next nevertheless."""
