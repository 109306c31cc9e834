"""What a run's numbers come to: fields of its records, made from the ranks' results, and its report."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from braid.actors.config import Config
from braid.actors.controller.routing import ExpertNumbers
from braid.actors.controller.step_record import StepRecord
from braid.actors.stage.messages import SerialStep, StepResult
from braid.scheduling.trace import OverlapNumbers

_OF_A_STEP = ("step", "loss", "grad_norm", "lr", "seconds", "wall_seconds", "tokens")


def build_report(
    records: Iterable[StepRecord],
    config: Config,
    *,
    complete: bool,
    serial: SerialStep | None = None,
    predicted_seconds: float | None = None,
) -> dict[str, Any]:
    """The contents of ``report.json``. ``records``: of all steps, looked at once, one after the other.
    ``predicted_seconds``: of a step, as simulated when the run was planned."""
    layout = config.layout()
    steps: list[dict[str, Any]] = []
    peaks = [0] * layout.ranks
    overlap, experts = _Overlap(), _Experts()
    validation: dict[str, float | None] = {"loss": None, "bits_per_byte": None}
    for record in records:
        steps.append({name: getattr(record, name) for name in _OF_A_STEP})
        if len(record.peak_bytes) == layout.ranks:
            peaks = list(map(max, peaks, record.peak_bytes))
        if "validation" in record.between_seconds:
            validation = {"loss": record.validation_loss, "bits_per_byte": record.validation_bits_per_byte}
        overlap.add(record)
        if record.experts is not None:
            experts.add(record.experts)
    timed = steps[1:] or steps
    seconds = sum(step["wall_seconds"] or step["seconds"] for step in timed)
    return {
        "complete": complete,
        "steps": steps,
        "tokens_per_s": sum(step["tokens"] for step in timed) / seconds if seconds else 0.0,
        "validation": validation,
        "layout": {
            **asdict(layout),
            "ranks": layout.ranks,
            "described": layout.describe(),
            "schedule": config.overlap.schedule,
        },
        "memory": {"peak_bytes": peaks},
        "communication": {
            "seconds": overlap.of_all("communication_seconds"),
            "exposed_seconds": overlap.of_all("exposed_seconds"),
        },
        "overlap": overlap.report([step["seconds"] for step in timed], serial),
        **experts.report(),
        **_prediction([step["seconds"] for step in timed], predicted_seconds),
    }


def _prediction(seconds: Sequence[float], predicted: float | None) -> dict[str, Any]:
    """The section ``prediction``: a step as simulated and as measured (the median); none without both."""
    if predicted is None or not seconds:
        return {}
    return {"prediction": {"step_seconds": predicted, "measured_seconds": median(seconds)}}


class _Overlap:
    """What overlap came to, summed up; the first step, which warms up, does not count in means."""

    _NAMES = (
        "communication_seconds",
        "exposed_seconds",
        "slowdown_seconds",
        "launch_gap_seconds",
        "bubble_seconds",
        "waiting_seconds",
    )

    def __init__(self) -> None:
        self._first: dict[str, float | None] = {}
        self._sums = dict.fromkeys(self._NAMES, 0.0)
        self._counts = dict.fromkeys(self._NAMES, 0)

    def add(self, record: StepRecord) -> None:
        values = {name: getattr(record, name) for name in self._NAMES}
        if not self._first:
            self._first = values
            return
        for name, value in values.items():
            if value is not None:
                self._sums[name] += value
                self._counts[name] += 1

    def of_all(self, name: str) -> float:
        return self._sums[name] + (self._first.get(name) or 0.0)

    def _mean(self, name: str) -> float | None:
        if not any(self._counts.values()):
            return self._first[name]
        return self._sums[name] / self._counts[name] if self._counts[name] else None

    def report(self, seconds: Sequence[float], serial: SerialStep | None) -> dict[str, float | None] | None:
        """Means per step; what needs a profile is None without one."""
        if not self._first:
            return None
        communication = self._mean("communication_seconds") or 0.0
        hidden = communication - (self._mean("exposed_seconds") or 0.0)
        return {
            "communication_seconds": communication,
            "hidden_seconds": hidden,
            "hidden_fraction": hidden / communication if communication else 1.0,
            "slowdown_seconds": self._mean("slowdown_seconds"),
            "launch_gap_seconds": self._mean("launch_gap_seconds"),
            "bubble_seconds": self._mean("bubble_seconds"),
            "waiting_seconds": self._mean("waiting_seconds"),
            "alpha": serial.alpha if serial else None,
            "limit_speedup": serial.limit_speedup if serial else None,
            "recovered": serial.recovered(median(seconds)) if serial else None,
        }


class _Experts:
    """How tokens were spread over experts: in the last step, as training changes it, and on average."""

    def __init__(self) -> None:
        self._last: dict[str, float | None] = {}
        self._sums: dict[str, float] = {}
        self._steps = 0

    def add(self, numbers: ExpertNumbers) -> None:
        self._last = {
            name: value for name, value in vars(numbers).items() if name not in ("layers", "visits")
        }
        self._steps += 1
        for name, value in self._last.items():
            if value is not None:
                self._sums[name] = self._sums.get(name, 0.0) + value

    def report(self) -> dict[str, Any]:
        if not self._steps:
            return {}
        mean = {name: self._sums[name] / self._steps if name in self._sums else None for name in self._last}
        return {"experts": {"last": self._last, "mean": mean}}


def rank_fields(results: Sequence[StepResult]) -> dict[str, Any]:
    """What a line of ``ranks.jsonl`` says of every rank.

    ``waits_for``: peer, operator and seconds of the longest waits for a peer.
    """

    def seconds(name: str) -> list[float | None]:
        values = [getattr(result.overlap, f"{name}_ns") for result in results]
        return [None if ns is None else ns / 1e9 for ns in values]

    parts = ("communication", "hidden", "exposed", "slowdown", "launch_gap", "bubble", "waiting", "compute")
    return {
        "seconds": [result.seconds for result in results],
        **{f"{name}_seconds": seconds(name) for name in parts},
        "waits_for": [
            [[wait.peer, wait.operator, wait.ns / 1e9] for wait in result.overlap.peer_waits]
            for result in results
        ],
        "peak_bytes": [result.peak_bytes for result in results],
        "lifetime_peak_bytes": [result.lifetime_peak_bytes for result in results],
        "dropped_spans": [result.dropped_spans for result in results],
        "sampled_every": [result.sampled_every for result in results],
    }


def overlap_fields(ranks: Sequence[OverlapNumbers]) -> dict[str, Any]:
    """The fields of a step's record that come from spans: means over the ranks, in seconds."""

    def mean(name: str) -> float:
        return sum(getattr(rank, name) for rank in ranks) / len(ranks) / 1e9

    communication, exposed = mean("communication_ns"), mean("exposed_ns")
    known = all(rank.slowdown_ns is not None for rank in ranks)
    return {
        "communication_seconds": communication,
        "exposed_seconds": exposed,
        "hidden_fraction": 1.0 - exposed / communication if communication else 1.0,
        "slowdown_seconds": mean("slowdown_ns") if known else None,
        "launch_gap_seconds": mean("launch_gap_ns"),
        "bubble_seconds": mean("bubble_ns"),
        "waiting_seconds": mean("waiting_ns"),
        "exposed_by_axis": {
            axis: sum(rank.exposed_by_axis_ns.get(axis, 0) for rank in ranks) / len(ranks) / 1e9
            for axis in sorted({axis for rank in ranks for axis in rank.exposed_by_axis_ns})
        },
    }
