"""What a run's numbers come to: fields of its records, made from the ranks' results, and its report."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from braid.actors.config import Config
from braid.actors.controller.records.step_record import StepRecord
from braid.actors.stage.rank.messages import SerialStep, StepResult
from braid.scheduling.trace.spans import OverlapNumbers

_OVERLAP = (
    "communication_seconds",
    "exposed_seconds",
    "slowdown_seconds",
    "launch_gap_seconds",
    "bubble_seconds",
    "waiting_seconds",
)
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
    overlaps, experts = [_Sums(), _Sums()], _Sums()  # overlap of the first step, which warms up, and others
    validation: dict[str, float | None] = {"loss": None, "bits_per_byte": None}
    last_experts: dict[str, float | None] = {}
    for record in records:
        overlaps[bool(steps)].add({name: getattr(record, name) for name in _OVERLAP})
        steps.append({name: getattr(record, name) for name in _OF_A_STEP})
        if len(record.peak_bytes) == layout.ranks:
            peaks = list(map(max, peaks, record.peak_bytes))
        if "validation" in record.between_seconds:
            validation = {"loss": record.validation_loss, "bits_per_byte": record.validation_bits_per_byte}
        if record.experts is not None:
            numbers = vars(record.experts).items()
            last_experts = {name: value for name, value in numbers if name not in ("layers", "visits")}
            experts.add(last_experts)
    timed = steps[1:] or steps
    step_seconds = [step["seconds"] for step in timed]
    seconds = sum(step["wall_seconds"] or step["seconds"] for step in timed)
    sections: dict[str, Any] = {}
    if last_experts:  # in the last step, as training changes the spread of tokens, and on average
        mean = {name: experts.mean(name) for name in last_experts}
        sections["experts"] = {"last": last_experts, "mean": mean}
    if predicted_seconds is not None and step_seconds:  # a step as simulated and as measured
        measured = median(step_seconds)
        sections["prediction"] = {"step_seconds": predicted_seconds, "measured_seconds": measured}
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
            "seconds": sum(sums.totals["communication_seconds"] for sums in overlaps),
            "exposed_seconds": sum(sums.totals["exposed_seconds"] for sums in overlaps),
        },
        "overlap": _overlap(overlaps[len(steps) > 1], step_seconds, serial) if steps else None,
        **sections,
    }


class _Sums:
    """Sums of numbers by name, and how many of them were known (not None)."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)

    def add(self, numbers: Mapping[str, float | None]) -> None:
        for name, value in numbers.items():
            if value is not None:
                self.totals[name] += value
                self._counts[name] += 1

    def mean(self, name: str) -> float | None:
        return self.totals[name] / self._counts[name] if self._counts[name] else None


def _overlap(sums: _Sums, step_seconds: Sequence[float], serial: SerialStep | None) -> dict[str, Any]:
    """Means per step; what needs a profile is None without a profile."""
    communication = sums.mean("communication_seconds") or 0.0
    hidden = communication - (sums.mean("exposed_seconds") or 0.0)
    return {
        "communication_seconds": communication,
        "hidden_seconds": hidden,
        "hidden_fraction": hidden / communication if communication else 1.0,
        **{name: sums.mean(name) for name in _OVERLAP[2:]},
        "alpha": serial.alpha if serial else None,
        "limit_speedup": serial.limit_speedup if serial else None,
        "recovered": serial.recovered(median(step_seconds)) if serial else None,
    }


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
