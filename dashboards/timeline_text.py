"""Steps of runs as lines of a terminal: how full compute and links are, and what of it is exposed."""

from collections.abc import Mapping

import numpy as np
from rich.text import Text

from braid.dashboards.timeline_picture import exposed_spans, records_on, times_of
from braid.dashboards.trace_folder import TraceFolder
from braid.scheduling.operators import Stream
from braid.scheduling.trace_arrays import FloatArray, IntArray, union

_LEVELS = " ▁▂▃▄▅▆▇█"
_BUSY, _HIDDEN, _EXPOSED = "blue", "green", "red"


def timeline_text(steps: Mapping[str, tuple[TraceFolder, int]], *, rank: int = 0, width: int = 64) -> Text:
    """A rank's step (from 0) of each run, below each other on one axis, by what they are called.

    A column is as full as compute, or the links together, are busy in it; transfers are red where for most of
    the column nothing computes beside them, else green.
    """
    shown = []
    for name, (traces, step) in steps.items():
        trace = traces.ranks[rank]
        records = trace.records(step)
        busy = union(times_of(records[records_on(trace, records, Stream.COMPUTE)]))
        exposed, moving = exposed_spans(trace, records)
        shown.append(
            (name, int(records["start_ns"].min()), int(records["end_ns"].max()), busy, moving, exposed)
        )
    column = max(end - begin for _, begin, end, *_ in shown) / width
    text = Text()
    for name, begin, end, busy, moving, exposed in shown:
        edges: FloatArray = begin + column * np.arange(width + 1, dtype=np.float64)
        text.append(f"{name}: {(end - begin) / 1e6:.0f} ms\n", style="bold")
        text.append("  compute ")
        for share in _shares(busy, edges):
            text.append(_level(share), style=_BUSY)
        text.append("\n  links   ")
        for share, bare in zip(_shares(moving, edges), _shares(exposed, edges), strict=True):
            text.append(_level(share), style=_EXPOSED if bare > share / 2 else _HIDDEN)
        text.append("\n")
    text.append("  links: ")
    text.append("█ hidden behind compute", style=_HIDDEN)
    text.append("  ")
    text.append("█ exposed: compute waits", style=_EXPOSED)
    return text


def _shares(spans: IntArray, edges: FloatArray) -> FloatArray:
    """How much of each column disjoint spans fill."""
    covered = np.zeros(len(edges) - 1)
    for begin, end in spans:
        covered += np.clip(np.minimum(edges[1:], end) - np.maximum(edges[:-1], begin), 0, None)
    return covered / (edges[1] - edges[0])


def _level(share: float) -> str:
    return _LEVELS[min(len(_LEVELS) - 1, round(share * (len(_LEVELS) - 1)))]
