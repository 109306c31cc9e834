"""Steps of runs as lines of a terminal: how full compute and links are, and what is waited for."""

from collections.abc import Mapping

import numpy as np
from rich.text import Text

from braid.dashboards.trace_folder import TraceFolder
from braid.scheduling.trace.arrays import FloatArray, shares
from braid.scheduling.trace.numbers import phases

_LEVELS = " ▁▂▃▄▅▆▇█"
_ROWS = (
    ("compute", "blue"),
    ("hidden", "green"),
    ("exposed", "red"),
    ("peers", "magenta"),
)


def timeline_text(steps: Mapping[str, tuple[TraceFolder, int]], *, rank: int = 0, width: int = 64) -> Text:
    """A rank's step (from 0) of each run, below each other on one axis, by what they are called.

    A column is as full as something goes on in it: the rank computes; a transfer is under way, hidden behind
    compute or exposed; the rank waits for a peer, where it ever does.
    """
    shown = []
    for name, (traces, step) in steps.items():
        batch = traces.ranks[rank].steps[step]
        records, found = batch.records, phases(batch)
        rows = found.computing, found.hidden, found.exposed, found.waiting
        shown.append((name, int(records["start_ns"].min()), int(records["end_ns"].max()), rows))
    column = max(end - begin for _, begin, end, _ in shown) / width
    waits = any(len(rows[-1]) for *_, rows in shown)
    text = Text()
    for name, begin, end, rows in shown:
        edges: FloatArray = begin + column * np.arange(width + 1, dtype=np.float64)
        text.append(f"{name}: {(end - begin) / 1e6:.0f} ms\n", style="bold")
        for (title, style), spans in zip(_ROWS if waits else _ROWS[:-1], rows, strict=False):
            text.append(f"  {title:<8}")
            text.append("".join(map(_level, shares(spans, edges))), style=style)
            text.append("\n")
    said = "transfers are hidden behind compute or exposed: compute waits for them"
    text.append(f"  {said}; peers: waits for other ranks" if waits else f"  {said}")
    return text


def _level(share: float) -> str:
    return _LEVELS[min(len(_LEVELS) - 1, round(share * (len(_LEVELS) - 1)))]
