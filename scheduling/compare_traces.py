"""Two traces of one schema, operator by operator: what was predicted against what was measured."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from braid.scheduling.record_numbers import numbers_of_records
from braid.scheduling.span_batches import Batch, apart


@dataclass(frozen=True, kw_only=True)
class OperatorDifference:
    """An operator in both traces; medians over ranks, micro-batches and layers. Counts are per rank that runs
    it."""

    operator: str
    first_count: int
    second_count: int
    first_ns: float
    second_ns: float
    difference_ns: float
    """Of all executions, by all ranks of the trace: what the operator adds to the difference of the steps."""


@dataclass(frozen=True, kw_only=True)
class TraceTotals:
    """A trace of one step: means over its ranks."""

    ranks: int
    step_ns: float
    compute_ns: float
    communication_ns: float
    hidden_fraction: float


@dataclass(frozen=True, kw_only=True)
class TraceComparison:
    """Two traces side by side; operators in the order of what they add to the difference."""

    first: TraceTotals
    second: TraceTotals
    operators: tuple[OperatorDifference, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain containers, for ``--json``."""
        return asdict(self)


def compare_traces(first: Sequence[Batch], second: Sequence[Batch]) -> TraceComparison:
    """Set two traces of one step, a batch per rank, against each other."""
    ran = _by_name(first), _by_name(second)
    ranks = len(first), len(second)
    rows = []
    for operator in {**ran[0], **ran[1]}:
        both = [own.get(operator, {}) for own in ran]
        times = [np.concatenate([*own.values()]) if own else np.zeros(0) for own in both]
        totals = [own.sum() / count for own, count in zip(times, ranks, strict=True)]
        medians = [float(np.median(own)) if len(own) else 0.0 for own in times]
        rows.append(
            OperatorDifference(
                operator=operator,
                first_count=len(times[0]) // max(1, len(both[0])),
                second_count=len(times[1]) // max(1, len(both[1])),
                first_ns=medians[0],
                second_ns=medians[1],
                difference_ns=float(totals[1] - totals[0]),
            )
        )
    rows.sort(key=lambda row: (-abs(row.difference_ns), row.operator))
    return TraceComparison(first=_totals(first), second=_totals(second), operators=tuple(rows))


def _by_name(batches: Sequence[Batch]) -> dict[str, dict[int, NDArray[np.int64]]]:
    """By operator and rank, what its executions took in nanoseconds.

    By operator alone: of one axis, some groups may lie inside nodes and others between them.
    """
    found: dict[str, dict[int, NDArray[np.int64]]] = {}
    for batch in batches:
        operators, _, _ = apart(batch.records)
        names = np.array([label.operator for label in batch.labels.all], object)[operators["label"]]
        took = operators["end_ns"] - operators["start_ns"]
        for name in sorted({*names}):
            found.setdefault(name, {})[batch.rank] = took[names == name]
    return found


def _totals(batches: Sequence[Batch]) -> TraceTotals:
    operators = [apart(batch.records)[0] for batch in batches]
    numbers = [numbers_of_records(batch.records, batch.labels) for batch in batches]
    communication = sum(own.communication_ns for own in numbers)
    ranks = len(batches)
    return TraceTotals(
        ranks=ranks,
        step_ns=float(sum(own["end_ns"].max() - own["start_ns"].min() for own in operators) / ranks),
        compute_ns=sum(own.compute_ns for own in numbers) / ranks,
        communication_ns=communication / ranks,
        hidden_fraction=sum(own.hidden_ns for own in numbers) / communication if communication else 1.0,
    )
