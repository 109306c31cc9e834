"""Draws a step of several runs: as a picture for a README or a paper, and as lines in a terminal.

The picture has a lane for compute and for each link of every rank; the lines show how busy compute and links
of one rank are, and what it waits for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from rich.text import Text

from braid.dashboards.trace_folder import TraceFolder
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.trace.arrays import IntArray, length, shares, without
from braid.scheduling.trace.batches import Batch, apart, begin_of
from braid.scheduling.trace.numbers import Phases, phases, times_of
from braid.scheduling.trace.spans import DIRECTIONS, STRANDS
from braid.scheduling.trace.svg import EXPOSED, Row, rows_picture

Steps = Mapping[str, tuple[TraceFolder, int]]
"""Runs to draw, by displayed name: the trace, and the step (from 0)."""
_LANES: Final = {
    Stream.COMPUTE: "rank {} compute",
    Stream.INTRA: "in the node",
    Stream.INTER: "between nodes",
}
_FILLS: Final = {
    ("alpha", "forward"): "#56b4e9",
    ("alpha", "backward"): "#0072b2",
    ("beta", "forward"): "#f0c05a",
    ("beta", "backward"): "#b8860b",
}
"""Blues and ambers of the palette by Okabe and Ito, which colour-blind people can distinguish."""
_OTHER, PEERS = "#9a9a9a", "#303a44"
_MOST_RANKS: Final = 16
_LEVELS: Final = " ▁▂▃▄▅▆▇█"
_STYLES: Final = {"compute": "blue", "hidden": "green", "exposed": "red", "peers": "magenta"}


def timeline_svg(steps: Steps, ranks: Sequence[int] | None = None) -> str:
    """Draw steps below each other on one time axis. ``ranks``: by default the first ones. Raise `ValueError`
    if there are no spans."""
    rows: list[Row] = []
    longest = 0
    for name, (traces, step) in steps.items():
        batches = [batch for batch in traces.step(step) if ranks is None or batch.rank in ranks][:_MOST_RANKS]
        if not batches:
            raise ValueError(f"there are no spans of step {step + 1}")
        begin = begin_of(batches)
        took = max(int(batch.records["end_ns"].max()) for batch in batches) - begin
        longest = max(longest, took)
        activities = [phases(batch) for batch in batches]
        total, hidden = sum(length(f.moving) for f in activities), sum(length(f.hidden) for f in activities)
        share = f"{hidden / total:.0%} of communication is hidden behind compute" if total else ""
        used = {s for batch in batches for s in batch.labels.streams[apart(batch.records)[0]["label"]]}
        both = list(zip(batches, activities, strict=True))
        first, *others = (
            _row(batch, when, lane, begin) for batch, when in both for lane in _LANES if lane in used
        )
        heading = f"{name}: {took / 1e6:.0f} ms; {share or 'no communication'}"
        rows += [replace(first, heading=heading), *others]
    note = "below the lanes, red: exposed, nothing computes; dark: waits for a peer, nothing runs"
    legend = [*((f"strand {s}, {d}", colour) for (s, d), colour in _FILLS.items()), ("update", _OTHER)]
    return rows_picture(rows, longest, "Timeline", note, high=14, legend=legend)


def _row(batch: Batch, when: Phases, lane: Stream, begin: int) -> Row:
    operators, _, _ = apart(batch.records)
    shown = operators[batch.labels.streams[operators["label"]] == lane]
    seams = []
    for s, strand in enumerate(STRANDS):
        for d, direction in enumerate(DIRECTIONS):
            alike = shown[(shown["strand"] == s) & (shown["direction"] == d)]
            if len(alike):
                seams.append((_FILLS.get((strand, direction), _OTHER), times_of(alike) - begin))
    strip: tuple[str, IntArray] = EXPOSED, without(times_of(shown), when.computing) - begin
    if lane is Stream.COMPUTE:
        strip = PEERS, when.waiting - begin
    return Row(_LANES[lane].format(batch.rank), seams=seams, strips=[strip])


def timeline_text(steps: Steps, *, rank: int = 0, width: int = 64) -> Text:
    """Draw a rank's steps below each other on one time axis.

    The height of a column is the share of time in which the rank computes; in which a transfer is under way,
    hidden behind compute or exposed; and, if this ever happens, in which the rank waits for a peer.
    """
    batches = {name: traces.ranks[rank][step] for name, (traces, step) in steps.items()}
    activities = {name: phases(batch) for name, batch in batches.items()}
    begins = {name: int(batch.records["start_ns"].min()) for name, batch in batches.items()}
    took = {name: int(batch.records["end_ns"].max()) - begins[name] for name, batch in batches.items()}
    waits = any(len(when.waiting) for when in activities.values())
    text = Text()
    for name, when in activities.items():
        edges = begins[name] + max(took.values()) / width * np.arange(width + 1, dtype=np.float64)
        text.append(f"{name}: {took[name] / 1e6:.0f} ms\n", style="bold")
        lines = {"compute": when.computing, "hidden": when.hidden, "exposed": when.exposed}
        for title, times in {**lines, **({"peers": when.waiting} if waits else {})}.items():
            levels = np.rint(shares(times, edges) * (len(_LEVELS) - 1)).astype(int)
            text.append(f"  {title:<8}")
            text.append("".join(_LEVELS[min(level, len(_LEVELS) - 1)] for level in levels), _STYLES[title])
            text.append("\n")
    said = "transfers are hidden behind compute or exposed: compute waits for them"
    text.append(f"  {said}; peers: waits for other ranks" if waits else f"  {said}")
    return text
