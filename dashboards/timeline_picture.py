"""One step of a run as a picture, for a README or a paper: lanes for compute and both links of every rank.

Needs matplotlib (``pip install 'braid[report]'``), which nothing else here does.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from braid.dashboards.trace_folder import RankTrace, TraceFolder
from braid.scheduling.operators import Stream
from braid.scheduling.record_numbers import times_of
from braid.scheduling.span_batches import Records
from braid.scheduling.trace import DIRECTIONS, KINDS, STRANDS
from braid.scheduling.trace_arrays import IntArray, joined, length, union, without

LANES: Final = (Stream.COMPUTE, Stream.INTRA, Stream.INTER)
_LANE_NAMES: Final = {
    Stream.COMPUTE: "compute",
    Stream.INTRA: "in the node",
    Stream.INTER: "between nodes",
}
COLOURS: Final = {
    ("alpha", "forward"): "#56b4e9",
    ("alpha", "backward"): "#0072b2",
    ("beta", "forward"): "#f0c05a",
    ("beta", "backward"): "#b8860b",
}
"""Blues and ambers of the palette by Okabe and Ito, which colour-blind people can tell apart."""
OTHER, EXPOSED, PEERS = "#9a9a9a", "#d62f4b", "#303a44"
MOST_RANKS: Final = 16


def timeline_png(traces: TraceFolder, step: int, ranks: Sequence[int] | None = None) -> bytes:
    """A step (from 0) as PNG; by default of the first ranks. `ValueError` without matplotlib or spans."""
    return _png([_Panel.of("", traces, step, ranks)])


def comparison_png(steps: Mapping[str, tuple[TraceFolder, int]], ranks: Sequence[int] | None = None) -> bytes:
    """Steps of several runs below each other on one axis, by what they are called; as `timeline_png`."""
    return _png([_Panel.of(name, traces, step, ranks) for name, (traces, step) in steps.items()])


@dataclass(frozen=True)
class _Panel:
    """A step that is drawn: its ranks, and the lanes that some of them use."""

    name: str
    traces: TraceFolder
    step: int
    ranks: tuple[int, ...]
    lanes: tuple[Stream, ...]
    begin: int

    @classmethod
    def of(cls, name: str, traces: TraceFolder, step: int, ranks: Sequence[int] | None) -> "_Panel":
        known = [r for r in (ranks or sorted(traces.ranks)) if len(traces.ranks[r].records(step))]
        chosen = tuple(known[:MOST_RANKS])
        if not chosen:
            raise ValueError(f"there are no spans of step {step + 1}")
        lanes = tuple(ln for ln in LANES if any(_uses(traces.ranks[rank], step, ln) for rank in chosen))
        begin = min(int(traces.ranks[rank].records(step)["start_ns"].min()) for rank in chosen)
        return cls(name, traces, step, chosen, lanes, begin)

    @property
    def rows(self) -> int:
        """Lanes, with a free one after those of every rank."""
        return len(self.ranks) * (len(self.lanes) + 1)

    def draw(self, axes: Any) -> None:
        """Draw the lanes, with the share that is hidden as title."""
        ticks, names = [], []
        hidden = total = 0
        for place, rank in enumerate(self.ranks):
            trace = self.traces.ranks[rank]
            records = trace.records(self.step)
            found = awaited(trace, records)
            total += (lasts := length(found.moving))
            hidden += lasts - length(found.exposed)
            for number, lane in enumerate(self.lanes):
                y = place * (len(self.lanes) + 1) + number
                ticks.append(y)
                names.append(f"rank {rank}  {_LANE_NAMES[lane]}" if number == 0 else _LANE_NAMES[lane])
                own = records[records_on(trace, records, lane)]
                _draw(axes, own, y, self.begin)
                bare = found.peers if lane is Stream.COMPUTE else without(times_of(own), found.busy)
                colour = PEERS if lane is Stream.COMPUTE else EXPOSED
                axes.broken_barh(_bars(bare, self.begin), (y + 0.28, 0.12), color=colour)
        axes.set_yticks(ticks, names)
        axes.set_ylim(self.rows - 0.6, -0.6)
        share = (
            f"{hidden / total:.0%} of communication is hidden behind compute" if total else "no communication"
        )
        ends = max(int(self.traces.ranks[rank].records(self.step)["end_ns"].max()) for rank in self.ranks)
        name = f"{self.name}: {(ends - self.begin) / 1e6:.0f} ms" if self.name else f"step {self.step + 1}"
        axes.set_title(f"{name}: {share}", loc="left")
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.tick_params(axis="y", length=0)


def _png(panels: Sequence[_Panel]) -> bytes:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("a picture needs matplotlib: pip install matplotlib") from None
    rows = [panel.rows for panel in panels]
    figure = Figure(figsize=(12, 0.6 + 0.5 * len(panels) + 0.24 * sum(rows)), layout="constrained")
    all_axes = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    for panel, axes in zip(panels, all_axes, strict=True):
        panel.draw(axes)
    all_axes[-1].set_xlabel("milliseconds")
    _legend(all_axes[-1], figure)
    output = io.BytesIO()
    figure.savefig(output, format="png", dpi=110)
    return output.getvalue()


def _uses(trace: RankTrace, step: int, lane: Stream) -> bool:
    records = trace.records(step)
    return bool(records_on(trace, records, lane).any())


def records_on(trace: RankTrace, records: Records, lane: Stream) -> Any:
    """Which records are operators of a stream."""
    mine = [number for number, label in trace.labels.items() if label.stream is lane]
    return np.isin(records["label"], mine) & (records["kind"] == KINDS.index("operator"))


@dataclass(frozen=True)
class Awaited:
    """When a rank has something under way or waits; each disjoint intervals (n, 2) in order."""

    busy: IntArray
    moving: IntArray
    """With some transfer under way."""
    exposed: IntArray
    """Of these, with nothing computed."""
    peers: IntArray
    """With nothing running, as another rank had not issued a collective yet."""


def awaited(trace: RankTrace, records: Records) -> Awaited:
    """What a rank waits for in a step."""
    busy = union(times_of(records[records_on(trace, records, Stream.COMPUTE)]))
    links = records_on(trace, records, Stream.INTRA) | records_on(trace, records, Stream.INTER)
    moving = union(times_of(records[links]))
    waits = times_of(records[records["kind"] == KINDS.index("waiting")])
    exposed = without(moving, busy)
    return Awaited(busy, moving, exposed, without(waits, joined([busy, moving])))


def _bars(spans: IntArray, begin: int) -> list[tuple[float, float]]:
    return [((a - begin) / 1e6, (b - a) / 1e6) for a, b in spans.tolist()]


def _draw(axes: Any, records: Records, y: int, begin: int) -> None:
    for strand in range(len(STRANDS)):
        for direction in range(len(DIRECTIONS)):
            own = records[(records["strand"] == strand) & (records["direction"] == direction)]
            if len(own):
                colour = COLOURS.get((STRANDS[strand], DIRECTIONS[direction]), OTHER)
                # A bar of its own for every operator, with a seam: a strip says nothing of their number.
                axes.broken_barh(
                    _bars(times_of(own), begin),
                    (y - 0.36, 0.6),
                    color=colour,
                    edgecolor="white",
                    linewidth=0.2,
                )


def _legend(axes: Any, figure: Any) -> None:
    from matplotlib.patches import Patch

    entries = [Patch(color=c, label=f"strand {s}, {d}") for (s, d), c in COLOURS.items()]
    others = (OTHER, "update"), (EXPOSED, "exposed: nothing computes"), (PEERS, "waits for a peer")
    entries += [Patch(color=colour, label=name) for colour, name in others]
    figure.legend(handles=entries, loc="outside lower center", ncols=len(entries), frameon=False, fontsize=8)
