"""One step of runs as a picture, for a README or a paper: lanes for compute and both links of every rank."""

from collections.abc import Mapping, Sequence
from typing import Final

from braid.dashboards.trace_folder import TraceFolder
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.trace.arrays import IntArray, length, without
from braid.scheduling.trace.batches import Batch, apart, begin_of
from braid.scheduling.trace.numbers import Phases, phases, times_of
from braid.scheduling.trace.spans import DIRECTIONS, STRANDS
from braid.scheduling.trace.svg import EXPOSED, Row, rows_picture

_LANES: Final = {Stream.COMPUTE: "compute", Stream.INTRA: "in the node", Stream.INTER: "between nodes"}
_FILLS: Final = {
    ("alpha", "forward"): "#56b4e9",
    ("alpha", "backward"): "#0072b2",
    ("beta", "forward"): "#f0c05a",
    ("beta", "backward"): "#b8860b",
}
"""Blues and ambers of the palette by Okabe and Ito, which colour-blind people can tell apart."""
_OTHER, PEERS = "#9a9a9a", "#303a44"
_MOST_RANKS: Final = 16


def timeline_svg(steps: Mapping[str, tuple[TraceFolder, int]], ranks: Sequence[int] | None = None) -> str:
    """Steps (from 0) of several runs below each other on one axis, by what they are called.

    ranks: by default the first ones. `ValueError` where there are no spans.
    """
    rows: list[Row] = []
    longest = 0
    for name, (traces, step) in steps.items():
        batches = [batch for batch in traces.step(step) if ranks is None or batch.rank in ranks][:_MOST_RANKS]
        if not batches:
            raise ValueError(f"there are no spans of step {step + 1}")
        begin = begin_of(batches)
        took = max(int(batch.records["end_ns"].max()) for batch in batches) - begin
        longest = max(longest, took)
        found = [phases(batch) for batch in batches]
        total, hidden = sum(length(f.moving) for f in found), sum(length(f.hidden) for f in found)
        share = f"{hidden / total:.0%} of communication is hidden behind compute" if total else ""
        heading = f"{name}: {took / 1e6:.0f} ms; {share or 'no communication'}"
        used = {
            stream for batch in batches for stream in batch.labels.streams[apart(batch.records)[0]["label"]]
        }
        lanes = [lane for lane in _LANES if lane in used]
        for batch, when in zip(batches, found, strict=True):
            for lane in lanes:
                rows.append(_row(batch, when, lane, begin, heading, first=lane is lanes[0]))
                heading = ""
    note = "below the lanes, red: exposed, nothing computes; dark: waits for a peer, nothing runs"
    legend = [*((f"strand {s}, {d}", colour) for (s, d), colour in _FILLS.items()), ("update", _OTHER)]
    return rows_picture(rows, longest, "Timeline", note, high=14, legend=legend)


def _row(batch: Batch, when: Phases, lane: Stream, begin: int, heading: str, *, first: bool) -> Row:
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
    name = f"rank {batch.rank} {_LANES[lane]}" if first else _LANES[lane]
    return Row(name, seams=seams, strips=[strip], heading=heading)
