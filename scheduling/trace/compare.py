"""Compares two traces of one schedule, operator by operator: for example a predicted and a measured one."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from braid.scheduling.trace.batches import Batch, apart
from braid.scheduling.trace.numbers import numbers_of_records


@dataclass(frozen=True, kw_only=True)
class OperatorDifference:
    """Times of an operator in both traces: medians over ranks, micro-batches and layers; counts are per rank
    that runs the operator."""

    operator: str
    first_count: int
    second_count: int
    first_ns: float
    second_ns: float
    difference_ns: float
    """Difference summed over all executions and ranks: what the operator contributes to the steps'
    difference."""


@dataclass(frozen=True, kw_only=True)
class TraceTotals:
    """Totals of a trace of one step: means over its ranks."""

    ranks: int
    step_ns: float
    compute_ns: float
    communication_ns: float
    hidden_fraction: float | None
    """None without communication."""


@dataclass(frozen=True, kw_only=True)
class TraceComparison:
    """Comparison of two traces; operators in the order of their contribution to the difference."""

    first: TraceTotals
    second: TraceTotals
    operators: tuple[OperatorDifference, ...]


def compare_traces(first: Sequence[Batch], second: Sequence[Batch]) -> TraceComparison:
    """Compare two traces of one step, each with a batch per rank."""
    ran = _by_name(first), _by_name(second)
    rows = []
    for operator in {**ran[0], **ran[1]}:
        a_ranks, b_ranks = (times.get(operator, []) for times in ran)
        a, b = (np.concatenate([np.zeros(0), *ranks]) for ranks in (a_ranks, b_ranks))
        rows.append(
            OperatorDifference(
                operator=operator,
                first_count=len(a) // max(1, len(a_ranks)),
                second_count=len(b) // max(1, len(b_ranks)),
                first_ns=float(np.median(a)) if len(a) else 0.0,
                second_ns=float(np.median(b)) if len(b) else 0.0,
                difference_ns=float(b.sum() / len(second) - a.sum() / len(first)),
            )
        )
    rows.sort(key=lambda row: (-abs(row.difference_ns), row.operator))
    return TraceComparison(first=_totals(first), second=_totals(second), operators=tuple(rows))


def _by_name(batches: Sequence[Batch]) -> dict[str, list[NDArray[np.int64]]]:
    """Return, by operator, the nanoseconds of its executions on every rank that runs it.

    Executions on all streams count: some groups of an axis may lie inside nodes and others between them.
    """
    times: dict[str, list[NDArray[np.int64]]] = {}
    for batch in batches:
        operators, _, _ = apart(batch.records)
        names = np.array([label.operator for label in batch.labels.all], object)[operators["label"]]
        took = operators["end_ns"] - operators["start_ns"]
        for name in sorted({*names}):
            times.setdefault(name, []).append(took[names == name])
    return times


def _totals(batches: Sequence[Batch]) -> TraceTotals:
    operators = [apart(batch.records)[0] for batch in batches]
    numbers = [numbers_of_records(batch.records, batch.labels) for batch in batches]
    communication = sum(rank.communication_ns for rank in numbers)
    ranks = len(batches)
    return TraceTotals(
        ranks=ranks,
        step_ns=float(sum(rank["end_ns"].max() - rank["start_ns"].min() for rank in operators) / ranks),
        compute_ns=sum(rank.compute_ns for rank in numbers) / ranks,
        communication_ns=communication / ranks,
        hidden_fraction=sum(rank.hidden_ns for rank in numbers) / communication if communication else None,
    )
