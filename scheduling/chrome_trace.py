"""Spans as a Chrome trace: what Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from collections.abc import Iterable

from braid.scheduling.json_text import json_text
from braid.scheduling.operators import Stream
from braid.scheduling.trace import Span

ROWS = {Stream.COMPUTE: 0, Stream.INTRA: 1, Stream.INTER: 2}
"""The thread that a stream is shown as."""


def chrome_trace(spans: Iterable[Span]) -> str:
    """The trace as JSON text: a process per rank, a thread per stream; times in microseconds."""
    events: list[dict[str, object]] = []
    ranks: set[int] = set()
    for span in spans:
        if span.rank not in ranks:
            ranks.add(span.rank)
            events += _names(span.rank)
        events.append(
            {
                "name": span.operator,
                "cat": span.strand,
                "ph": "X",
                "pid": span.rank,
                "tid": ROWS[span.stream],
                "ts": span.start_ns / 1000,
                "dur": (span.end_ns - span.start_ns) / 1000,
                "args": {
                    "strand": span.strand,
                    "micro_batch": span.micro_batch,
                    "chunk": span.chunk,
                    "layer": span.layer,
                    "bytes": span.bytes,
                    "flops": span.flops,
                },
            }
        )
    return json_text({"traceEvents": events, "displayTimeUnit": "ms"})


def _names(rank: int) -> list[dict[str, object]]:
    names: list[dict[str, object]] = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
    ]
    names += [
        {"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": stream.value}}
        for stream, row in ROWS.items()
    ]
    return names
