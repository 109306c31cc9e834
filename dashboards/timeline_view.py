"""A step of a trace as columns that a page can draw: spans, blocks, exposed communication, waits, numbers.

The bytes: length of the header (little-endian, 4 bytes), the header (JSON, padded to a multiple of 8), and
the arrays that the header names, each padded to a multiple of 8. Times are nanoseconds from ``begin_ns``.
"""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from braid.dashboards.trace_folder import RankTrace
from braid.scheduling.operators import Stream
from braid.scheduling.record_numbers import Labels, numbers_of_records, times_of
from braid.scheduling.span_batches import RECORD, Records, apart
from braid.scheduling.trace import STRANDS, Label, OverlapNumbers, Span
from braid.scheduling.trace_arrays import IntArray, outside, without

LANES: Final = (Stream.COMPUTE, Stream.INTRA, Stream.INTER)
Durations = Mapping[tuple[str, int], float]
"""Predicted nanoseconds of an operator in a layer; a backward pass has operators of other names."""


def predicted_durations(spans: Iterable[Span]) -> dict[tuple[str, int], float]:
    """The median duration of every operator and layer of a predicted trace."""
    found: dict[tuple[str, int], list[int]] = {}
    for span in spans:
        found.setdefault((span.operator, span.layer), []).append(span.end_ns - span.start_ns)
    return {key: median(values) for key, values in found.items()}


def packed_step(
    traces: Mapping[int, RankTrace], step: int, begin_ns: int, predicted: Durations | None = None
) -> bytes:
    """Some ranks' spans of a step (counted from 0) as one answer."""
    table = _Labels(predicted or {})
    ranks: list[dict[str, Any]] = []
    operators: list[Records] = []
    labels: list[NDArray[np.uint32]] = []
    blocks: list[Records] = []
    exposed: list[IntArray] = []
    waits: list[IntArray] = []
    peers: list[NDArray[np.int32]] = []
    peer_labels: list[NDArray[np.uint32]] = []
    for rank, trace in sorted(traces.items()):
        records = trace.records(step)
        own, own_blocks, own_waits = apart(records)
        numbers, transfers_awaited = _numbers(records, trace.labels)
        whose, idle = outside(times_of(own_waits), times_of(own))
        ranks.append(
            {
                "rank": rank,
                "spans": [sum(map(len, operators)), len(own)],
                "blocks": [sum(map(len, blocks)), len(own_blocks)],
                "exposed": [sum(map(len, exposed)), len(transfers_awaited)],
                "waits": [sum(map(len, waits)), len(idle)],
                "dropped": trace.dropped,
                "damage": trace.damage,
                "numbers": {**asdict(numbers), "exposed_ns": numbers.exposed_ns},
            }
        )
        operators.append(own)
        labels.append(table.numbers(own["label"], trace.labels))
        blocks.append(own_blocks)
        exposed.append(transfers_awaited)
        waits.append(idle)
        peers.append(own_waits["peer"][whose])
        peer_labels.append(table.numbers(own_waits["label"][whose], trace.labels))
    spans, all_blocks = _joined(operators), _joined(blocks)
    transfers, idle = (np.concatenate([np.zeros((0, 2), np.int64), *parts]) for parts in (exposed, waits))
    lanes = np.array([LANES.index(label.stream) for label in table.labels], np.uint8)
    numbers_of = np.concatenate([np.zeros(0, np.uint32), *labels])
    columns = {
        "start": (spans["start_ns"] - begin_ns).astype("<f8"),
        "end": (spans["end_ns"] - begin_ns).astype("<f8"),
        "label": numbers_of.astype("<u4"),
        "lane": lanes[numbers_of] if len(numbers_of) else np.zeros(0, np.uint8),
        "micro_batch": spans["micro_batch"].astype("<i2"),
        "chunk": spans["chunk"].astype("<i2"),
        "strand": spans["strand"],
        "direction": spans["direction"],
        "block_start": (all_blocks["start_ns"] - begin_ns).astype("<f8"),
        "block_end": (all_blocks["end_ns"] - begin_ns).astype("<f8"),
        "block_kind": all_blocks["kind"],
        "exposed_start": (transfers[:, 0] - begin_ns).astype("<f8"),
        "exposed_end": (transfers[:, 1] - begin_ns).astype("<f8"),
        "wait_start": (idle[:, 0] - begin_ns).astype("<f8"),
        "wait_end": (idle[:, 1] - begin_ns).astype("<f8"),
        "wait_label": np.concatenate([np.zeros(0, np.uint32), *peer_labels]).astype("<u4"),
        "wait_peer": np.concatenate([np.zeros(0, np.int32), *peers]).astype("<i4"),
    }
    header = {
        "step": step + 1,
        "begin_ns": str(begin_ns),
        "strands": STRANDS,
        "labels": table.rows,
        "ranks": ranks,
    }
    return _packed(header, columns)


def first_begin(traces: Iterable[RankTrace], step: int) -> int | None:
    """When the first operator of a step began, on the wall clock; None if there is none."""
    begins = [
        int(records["start_ns"][records["kind"] == 0].min())
        for trace in traces
        for records in trace.steps.get(step, [])
        if (records["kind"] == 0).any()
    ]
    return min(begins, default=None)


def trace_of_spans(spans: Sequence[Span], step: int) -> dict[int, RankTrace]:
    """Spans that were read from a Chrome trace, as the ranks' traces of one step; there are no blocks."""
    traces: dict[int, RankTrace] = {}
    known: dict[int, dict[Label, int]] = {}
    rows: dict[int, list[tuple[int, ...]]] = {}
    for span in spans:
        label = Label(
            operator=span.operator,
            stream=span.stream,
            layer=span.layer,
            bytes=span.bytes,
            flops=span.flops,
        )
        numbers = known.setdefault(span.rank, {})
        number = numbers.setdefault(label, len(numbers))
        strand = STRANDS.index(span.strand) if span.strand in STRANDS else 0
        rows.setdefault(span.rank, []).append(
            (span.start_ns, span.end_ns, number, step, -1, span.micro_batch, span.chunk, strand, 0, 0, 0)
        )
    for rank, found in rows.items():
        labels = {number: label for label, number in known[rank].items()}
        traces[rank] = RankTrace(labels=labels, steps={step: [np.array(found, RECORD)]})
    return traces


def _numbers(records: Records, labels: Mapping[int, Label]) -> tuple[OverlapNumbers, IntArray]:
    """A rank's numbers of a step, and when it waited for transfers: disjoint intervals (n, 2)."""
    found, places = np.unique(records["label"], return_inverse=True)
    table = Labels([_label(labels, int(number)) for number in found])
    by_place = records.copy()
    by_place["label"] = places
    operators, _, _ = apart(by_place)
    computes = table.streams[operators["label"]] == Stream.COMPUTE
    exposed = without(times_of(operators[~computes]), times_of(operators[computes]))
    return numbers_of_records(by_place, table), exposed


def _joined(arrays: Sequence[Records]) -> Records:
    return np.concatenate([np.zeros(0, RECORD), *arrays])


def _label(labels: Mapping[int, Label], number: int) -> Label:
    """A label by its number; a made-up one where it stood in a part of a file that is damaged."""
    return labels.get(number) or Label(operator=f"operator {number}", stream=Stream.COMPUTE)


class _Labels:
    """All ranks' labels as one table: most are the same on all of them."""

    def __init__(self, predicted: Durations) -> None:
        self._predicted = predicted
        self._known: dict[Label, int] = {}
        self.labels: list[Label] = []
        self.rows: list[dict[str, Any]] = []

    def numbers(self, own: NDArray[np.uint32], labels: Mapping[int, Label]) -> NDArray[np.uint32]:
        """Numbers in the table for numbers of a rank."""
        found, places = np.unique(own, return_inverse=True)
        table = np.array([self._number(_label(labels, int(n))) for n in found], np.uint32)
        return table[places] if len(found) else np.zeros(0, np.uint32)

    def _number(self, label: Label) -> int:
        number = self._known.get(label)
        if number is None:
            number = self._known[label] = len(self.labels)
            self.labels.append(label)
            self.rows.append(
                {
                    "operator": label.operator,
                    "stream": label.stream.value,
                    "layer": label.layer,
                    "shapes": label.shapes,
                    "bytes": label.bytes,
                    "flops": label.flops,
                    "solo_ns": label.solo_ns,
                    "predicted_ns": self._predicted.get((label.operator, label.layer)),
                }
            )
        return number


def _packed(header: dict[str, Any], columns: Mapping[str, NDArray[Any]]) -> bytes:
    place, arrays, parts = 0, [], []
    for name, column in columns.items():
        data = np.ascontiguousarray(column).tobytes()
        arrays.append(
            {"name": name, "type": column.dtype.str.lstrip("<|"), "count": len(column), "at": place}
        )
        parts.append(data + bytes(-len(data) % 8))
        place += len(parts[-1])
    text = json.dumps({**header, "arrays": arrays}, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-(len(text) + 4) % 8)
    return struct.pack("<I", len(text)) + text + b"".join(parts)
