"""Numbers of a run's steps as columns, from the lines of ``metrics.jsonl``."""

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, Final

from braid.dashboards.run_files import numbers_in

_NO_NUMBERS: Final = ("peak_bytes", "exposed_by_axis", "experts")
"""Fields of a line that hold several numbers, or nothing."""


class StepColumns:
    """All steps that were read: a column for every number that some line holds, None where a line has none.

    Numbers of experts are columns by names as ``experts.entropy``. ``peak_bytes`` is that of the fullest
    rank, ``exposed_by_axis`` has a number for each axis of the mesh.
    """

    def __init__(self) -> None:
        self._values: dict[str, list[Any]] = {"step": []}
        self._visits: dict[str, Any] | None = None
        """Of every expert, in the newest step that tells."""

    @property
    def steps(self) -> list[int]:
        """Numbers of the steps, from 1."""
        return self._values["step"]

    def take(self, line: Mapping[str, Any]) -> None:
        """A line; one without a step is left out."""
        if not isinstance(line.get("step"), int):
            return
        axes, experts = line.get("exposed_by_axis"), line.get("experts")
        row: dict[str, Any] = {
            name: value
            for name, value in line.items()
            if name not in _NO_NUMBERS and (value is None or isinstance(value, int | float))
        }
        row["peak_bytes"] = max(numbers_in(line, "peak_bytes"), default=None)
        if isinstance(axes, Mapping):
            row["exposed_by_axis"] = {axis: s for axis, s in axes.items() if isinstance(s, int | float)}
        if isinstance(experts, Mapping):
            row |= {f"experts.{name}": v for name, v in experts.items() if isinstance(v, int | float)}
            if experts.get("visits"):
                names = ("layers", "visits")
                self._visits = {"step": line["step"], **{name: experts.get(name) for name in names}}
        for name in row.keys() - self._values.keys():
            self._values[name] = [None] * len(self.steps)
        for name, values in self._values.items():
            values.append(row.get(name))

    def after(self, step: int) -> dict[str, Any]:
        """Columns of all steps after one; visits of experts only where they are newer."""
        begin = bisect_left(self.steps, step + 1)
        found: dict[str, Any] = {"columns": {name: values[begin:] for name, values in self._values.items()}}
        if self._visits is not None and self._visits["step"] > step:
            found["visits"] = self._visits
        return found
