"""Converts a step of a trace to columns that a page can draw: spans, blocks, exposed communication, waits,
numbers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.trace.arrays import IntArray, outside
from braid.scheduling.trace.batches import Batch, apart
from braid.scheduling.trace.numbers import numbers_of_records, phases, times_of
from braid.scheduling.trace.spans import STRANDS, Label

_LANES: Final = (Stream.COMPUTE, Stream.INTRA, Stream.INTER)
_OF_SPANS: Final = ("micro_batch", "chunk", "strand", "direction")
Durations = Mapping[tuple[str, int], float]
"""Predicted nanoseconds by operator and layer; operators of a backward pass have other names."""


def predicted_durations(batches: Iterable[Batch]) -> dict[tuple[str, int], float]:
    """Return the median duration of every operator and layer of a predicted trace."""
    times: dict[tuple[str, int], list[NDArray[np.int64]]] = {}
    for batch in batches:
        took = batch.records["end_ns"] - batch.records["start_ns"]
        for number, label in enumerate(batch.labels.all):
            times.setdefault((label.operator, label.layer), []).append(took[batch.records["label"] == number])
    return {key: float(np.median(np.concatenate(values))) for key, values in times.items()}


def step_columns(
    batches: Sequence[Batch], begin_ns: int, predicted: Durations, damage: Mapping[int, str]
) -> dict[str, Any]:
    """Return some ranks' spans of a step as JSON data; times are nanoseconds from ``begin_ns``.

    Each rank has columns of its spans, blocks, exposed transfers and waits; one table holds the labels of all
    ranks. ``damage``: by rank, why a file could not be read.
    """
    table: dict[Label, int] = {}

    def columns(times: IntArray, **more: NDArray[Any]) -> dict[str, list[Any]]:
        start, end = (times - begin_ns).T
        return {name: values.tolist() for name, values in {"start": start, "end": end, **more}.items()}

    ranks = []
    for batch in batches:
        spans, blocks, waits = apart(batch.records)
        numbers = numbers_of_records(batch.records, batch.labels)
        labels = np.array([table.setdefault(label, len(table)) for label in batch.labels.all], np.int64)
        whose, idle = outside(times_of(waits), times_of(spans))
        waits = waits[whose]
        facts = {name: spans[name] for name in _OF_SPANS}
        ranks.append(
            {
                "rank": batch.rank,
                "spans": columns(times_of(spans), label=labels[spans["label"]], **facts),
                "blocks": columns(times_of(blocks), kind=blocks["kind"]),
                "exposed": columns(phases(batch).exposed),
                "waits": columns(idle, label=labels[waits["label"]], peer=waits["peer"]),
                "dropped": batch.dropped,
                "damage": damage.get(batch.rank, ""),
                "numbers": {**asdict(numbers), "exposed_ns": numbers.exposed_ns},
            }
        )
    rows = [
        {
            **vars(label),
            "lane": _LANES.index(label.stream),
            "predicted_ns": predicted.get((label.operator, label.layer)),
        }
        for label in table
    ]
    step, begin = batches[0].step + 1, str(begin_ns)  # more than a number of JavaScript holds
    return {"step": step, "begin_ns": begin, "strands": STRANDS, "labels": rows, "ranks": ranks}
