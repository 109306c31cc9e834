"""A step of a trace as columns that a page can draw: spans, blocks, exposed communication, waits, numbers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.trace.arrays import outside
from braid.scheduling.trace.batches import Batch, Labels, apart
from braid.scheduling.trace.numbers import numbers_of_records, phases, times_of
from braid.scheduling.trace.spans import STRANDS, Label

LANES: Final = (Stream.COMPUTE, Stream.INTRA, Stream.INTER)
Durations = Mapping[tuple[str, int], float]
"""Predicted nanoseconds of an operator in a layer; a backward pass has operators of other names."""


def predicted_durations(batches: Iterable[Batch]) -> dict[tuple[str, int], float]:
    """The median duration of every operator and layer of a predicted trace."""
    found: dict[tuple[str, int], list[NDArray[np.int64]]] = {}
    for batch in batches:
        took = batch.records["end_ns"] - batch.records["start_ns"]
        for number, label in enumerate(batch.labels.all):
            found.setdefault((label.operator, label.layer), []).append(took[batch.records["label"] == number])
    return {key: float(np.median(np.concatenate(values))) for key, values in found.items()}


def step_columns(
    batches: Sequence[Batch], begin_ns: int, predicted: Durations, damage: Mapping[int, str]
) -> dict[str, Any]:
    """Some ranks' spans of a step, as JSON has them; times are nanoseconds from ``begin_ns``.

    Each rank has the place of its first entry in the columns of its spans, blocks, exposed transfers and
    waits, and how many there are. damage: what could not be read, by rank.
    """
    table = _LabelTable(predicted)
    ranks: list[dict[str, Any]] = []
    columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    for batch in batches:
        spans, blocks, waits = apart(batch.records)
        exposed = phases(batch).exposed
        whose, idle = outside(times_of(waits), times_of(spans))
        shared = table.numbers(batch.labels)
        places: dict[str, list[int]] = {}
        for name, prefix, times, records in (
            ("spans", "", times_of(spans), spans),
            ("blocks", "block_", times_of(blocks), blocks),
            ("exposed", "exposed_", exposed, spans[:0]),
            ("waits", "wait_", idle, waits[whose]),
        ):
            places[name] = [len(columns[f"{prefix}start"]), len(times)]
            columns[f"{prefix}start"] += (times[:, 0] - begin_ns).tolist()
            columns[f"{prefix}end"] += (times[:, 1] - begin_ns).tolist()
            for field in _FIELDS[prefix]:
                values = shared[records["label"]] if field == "label" else records[field]
                columns[prefix + field] += values.tolist()
        numbers = numbers_of_records(batch.records, batch.labels)
        ranks.append(
            {
                "rank": batch.rank,
                **places,
                "dropped": batch.dropped,
                "damage": damage.get(batch.rank, ""),
                "numbers": {**asdict(numbers), "exposed_ns": numbers.exposed_ns},
            }
        )
    return {
        "step": batches[0].step + 1,
        "begin_ns": str(begin_ns),
        "strands": STRANDS,
        "labels": table.rows,
        "ranks": ranks,
        "columns": columns,
    }


_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "": ("label", "micro_batch", "chunk", "strand", "direction"),
    "block_": ("kind",),
    "exposed_": (),
    "wait_": ("label", "peer"),
}
"""Of columns with a prefix, what is told beside start and end."""
_COLUMNS: Final = [p + name for p, more in _FIELDS.items() for name in ("start", "end", *more)]


class _LabelTable:
    """All ranks' labels as one table: most are the same on all of them."""

    def __init__(self, predicted: Durations) -> None:
        self._predicted = predicted
        self._known: dict[Label, int] = {}
        self.rows: list[dict[str, Any]] = []

    def numbers(self, labels: Labels) -> NDArray[np.int64]:
        """By a rank's numbers of labels, the numbers in the table."""
        for label in labels.all:
            if label not in self._known:
                self._known[label] = len(self.rows)
                predicted = self._predicted.get((label.operator, label.layer))
                lane = LANES.index(label.stream)
                self.rows.append({**vars(label), "lane": lane, "predicted_ns": predicted})
        return np.array([self._known[label] for label in labels.all], np.int64)
