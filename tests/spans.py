"""Spans of traces one by one, and interval arithmetic to check the product's by: on lists, and plain."""

from collections.abc import Iterable, Sequence

import numpy as np

from braid.dashboards.trace_folder import TraceFolder
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.trace.arrays import IntArray
from braid.scheduling.trace.batches import Batch, apart, begin_of
from braid.scheduling.trace.spans import DIRECTIONS, STRANDS, Span

Interval = tuple[int, int]
"""Start and end in nanoseconds, end excluded."""

read_folder = TraceFolder.of_run


def spans_of(batches: Sequence[Batch]) -> list[Span]:
    """All operators (no blocks, no waiting), times from the first record's begin."""
    begin = begin_of(batches)
    return [
        Span(
            rank=batch.rank,
            step=batch.step,
            strand=STRANDS[record["strand"]],
            direction=DIRECTIONS[record["direction"]],
            micro_batch=int(record["micro_batch"]),
            chunk=int(record["chunk"]),
            start_ns=int(record["start_ns"]) - begin,
            end_ns=int(record["end_ns"]) - begin,
            **{name: getattr(label, name) for name in ("layer", "operator", "stream", "bytes", "flops")},
        )
        for batch in batches
        for record in apart(batch.records)[0]
        for label in [batch.labels[record["label"]]]
    ]


def intervals(pairs: Iterable[Interval]) -> IntArray:
    """Pairs of begin and end as an array (n, 2)."""
    return np.array(list(pairs), np.int64).reshape(-1, 2)


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals as disjoint ones in order, with gaps between them; empty ones vanish."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif start < end:
            merged.append((start, end))
    return merged


def length_ns(intervals: Iterable[Interval]) -> int:
    """Length of the union of intervals."""
    return sum(end - start for start, end in merge(intervals))


def communication(compute: Iterable[Interval], transfers: Iterable[Interval]) -> tuple[int, int]:
    """Nanoseconds of communication, and of them those in which nothing is computed."""
    busy, moving = merge(compute), merge(transfers)
    return length_ns(moving), length_ns([*busy, *moving]) - length_ns(busy)


def communication_of(spans: Iterable[Span]) -> tuple[int, int]:
    """The same of one rank's spans."""
    times = [(span.stream is Stream.COMPUTE, (span.start_ns, span.end_ns)) for span in spans]
    compute = [when for computes, when in times if computes]
    return communication(compute, [when for computes, when in times if not computes])
