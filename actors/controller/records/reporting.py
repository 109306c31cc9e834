"""Turns the ranks' results into fields of a run's records, and the records into its report."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from braid.actors.config import Config
from braid.actors.controller.records.step_record import StepRecord
from braid.actors.stage.rank.messages import SerialStep, StepResult
from braid.scheduling.trace.spans import OverlapNumbers

_PARTS = ("communication", "exposed", "slowdown", "launch_gap", "bubble", "waiting")
"""Parts of a step's time: with suffix ``_ns`` in `OverlapNumbers`, with ``_seconds`` in records."""
_OVERLAP = tuple(f"{part}_seconds" for part in _PARTS)
_OF_A_STEP = ("step", "loss", "grad_norm", "lr", "seconds", "wall_seconds", "tokens")


def build_report(
    records: Iterable[StepRecord],
    config: Config,
    *,
    complete: bool,
    serial: SerialStep | None = None,
    predicted_seconds: float | None = None,
) -> dict[str, Any]:
    """Build the contents of ``report.json``. ``records``: of all steps, consumed once, in order.
    ``predicted_seconds``: of a step, as simulated when the run was planned."""
    layout = config.layout()
    steps: list[dict[str, Any]] = []
    peaks = [0] * layout.ranks
    overlaps, experts = [_Sums(), _Sums()], _Sums()  # of the first step, which warms up, and of others
    validation: dict[str, Any] = {"loss": None, "bits_per_byte": None}
    last_experts: dict[str, float | None] = {}
    for record in records:
        overlaps[bool(steps)].add({name: getattr(record, name) for name in _OVERLAP})
        steps.append({name: getattr(record, name) for name in _OF_A_STEP})
        if len(record.peak_bytes) == layout.ranks:
            peaks = list(map(max, peaks, record.peak_bytes))
        if "validation" in record.between_seconds:
            validation = {"loss": record.validation_loss, "bits_per_byte": record.validation_bits_per_byte}
            if record.validation_losses:
                validation["sets"] = {**record.validation_losses}
        if record.experts is not None:
            numbers = vars(record.experts).items()
            last_experts = {name: value for name, value in numbers if name not in ("layers", "visits")}
            experts.add(last_experts)
    timed = steps[1:] or steps
    step_seconds = [step["seconds"] for step in timed]
    seconds = sum(step["wall_seconds"] or step["seconds"] for step in timed)
    sections: dict[str, Any] = {"overlap": None}
    if steps:  # means; values that need a profile are None without one
        means = {name: overlaps[len(steps) > 1].mean(name) for name in _OVERLAP}
        communication = means["communication_seconds"] or 0.0
        hidden = communication - (means.pop("exposed_seconds") or 0.0)
        sections["overlap"] = {
            **means,
            "hidden_seconds": hidden,
            "hidden_fraction": hidden / communication if communication else None,
            "alpha": serial.alpha if serial else None,
            "limit_speedup": serial.limit_speedup if serial else None,
            "recovered": serial.recovered(median(step_seconds)) if serial else None,
        }
    if last_experts:  # of the last step, as training changes the spread of tokens, and means
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
            "placement": layout.placement.value,  # callbacks get plain values
            "ranks": layout.ranks,
            "described": layout.describe(),
            "schedule": config.overlap.schedule,
        },
        "memory": {"peak_bytes": peaks},
        "communication": {
            "seconds": sum(sums.totals["communication_seconds"] for sums in overlaps),
            "exposed_seconds": sum(sums.totals["exposed_seconds"] for sums in overlaps),
        },
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


def rank_fields(results: Sequence[StepResult]) -> dict[str, Any]:
    """Return the fields of a line of ``ranks.jsonl``, with one entry per rank.

    ``waits_for``: peer, operator and seconds of the longest waits for a peer.
    """

    def seconds(part: str) -> list[float | None]:
        values = [getattr(result.overlap, f"{part}_ns") for result in results]
        return [None if ns is None else ns / 1e9 for ns in values]

    names = ("seconds", "peak_bytes", "lifetime_peak_bytes", "dropped_spans", "sampled_every")
    return {
        **{f"{part}_seconds": seconds(part) for part in (*_PARTS, "hidden", "compute")},
        "waits_for": [
            [[wait.peer, wait.operator, wait.ns / 1e9] for wait in result.overlap.peer_waits]
            for result in results
        ],
        **{name: [getattr(result, name) for result in results] for name in names},
    }


def overlap_fields(ranks: Sequence[OverlapNumbers]) -> dict[str, Any]:
    """Return a step record's fields that come from spans: means over the ranks, in seconds; None for a number
    that some rank does not know."""

    def mean(values: Sequence[int | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) / 1e9 if len(known) == len(ranks) else None

    means = {f"{part}_seconds": mean([getattr(rank, f"{part}_ns") for rank in ranks]) for part in _PARTS}
    axes = sorted({axis for rank in ranks for axis in rank.exposed_by_axis_ns})
    by_axis = {axis: mean([rank.exposed_by_axis_ns.get(axis, 0) for rank in ranks]) for axis in axes}
    exposed, communication = means["exposed_seconds"] or 0.0, means["communication_seconds"]
    hidden = 1.0 - exposed / communication if communication else None
    return {**means, "hidden_fraction": hidden, "exposed_by_axis": by_axis}
