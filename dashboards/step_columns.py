"""Numbers of a run's steps as columns, from the lines of ``metrics.jsonl``."""

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, Final

from braid.dashboards.run_files import numbers_in, value_of

COLUMNS: Final = (
    "step",
    "time",
    "seconds",
    "wall_seconds",
    "tokens",
    "loss",
    "grad_norm",
    "lr",
    "validation_loss",
    "validation_bits_per_byte",
    "mfu",
    "communication_seconds",
    "exposed_seconds",
    "hidden_fraction",
    "slowdown_seconds",
    "launch_gap_seconds",
    "bubble_seconds",
    "waiting_seconds",
    "generation",
)
AXES: Final = "exposed_by_axis"
"""Of every step a number for each axis of the mesh."""
OF_EXPERTS: Final = tuple(
    f"experts.{name}"
    for name in (
        "imbalance",
        "worst_imbalance",
        "entropy",
        "worst_entropy",
        "unvisited",
        "dropped",
        "worst_dropped",
        "rank_imbalance",
        "balance_loss",
        "z_loss",
    )
)
"""Columns of models with experts."""


class StepColumns:
    """All steps that were read."""

    def __init__(self) -> None:
        self._values: dict[str, list[Any]] = {
            name: [] for name in (*COLUMNS, "peak_bytes", AXES, *OF_EXPERTS)
        }
        self._visits: dict[str, Any] | None = None
        """Of every expert, in the newest step that tells."""
        self._experts = False

    @property
    def steps(self) -> list[int]:
        """Numbers of the steps, from 1."""
        return self._values["step"]

    def take(self, line: Mapping[str, Any]) -> None:
        """A line; one without a step is left out."""
        if not isinstance(line.get("step"), int):
            return
        for name in (*COLUMNS, *OF_EXPERTS):
            self._values[name].append(value_of(line, name))
        self._values["peak_bytes"].append(max(numbers_in(line, "peak_bytes"), default=None))
        axes = line.get(AXES)
        self._values[AXES].append(
            {axis: s for axis, s in axes.items() if isinstance(s, int | float)}
            if isinstance(axes, Mapping)
            else None
        )
        experts = line.get("experts")
        if isinstance(experts, Mapping):
            self._experts = True
            if experts.get("visits"):
                names = ("layers", "visits")
                self._visits = {"step": line["step"], **{name: experts.get(name) for name in names}}

    def after(self, step: int) -> dict[str, Any]:
        """Columns of all steps after one; visits of experts only where they are newer."""
        begin = bisect_left(self.steps, step + 1)
        names = (name for name in self._values if self._experts or name not in OF_EXPERTS)
        found: dict[str, Any] = {"columns": {name: self._values[name][begin:] for name in names}}
        if self._visits is not None and self._visits["step"] > step:
            found["visits"] = self._visits
        return found
