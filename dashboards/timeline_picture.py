"""One step of a run as a picture, for a README or a paper: lanes for compute and both links of every rank.

Needs matplotlib (``pip install 'braid[report]'``), which nothing else here does.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from braid.dashboards.trace_folder import TraceFolder
from braid.scheduling.operators import Stream
from braid.scheduling.record_numbers import phases, times_of
from braid.scheduling.span_batches import Batch, Records, apart, begin_of
from braid.scheduling.trace import DIRECTIONS, STRANDS
from braid.scheduling.trace_arrays import IntArray, length, without

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
    """A step that is drawn: what its ranks did, and the lanes that some of them use."""

    title: str
    batches: tuple[Batch, ...]
    lanes: tuple[Stream, ...]

    @classmethod
    def of(cls, name: str, traces: TraceFolder, step: int, ranks: Sequence[int] | None) -> "_Panel":
        batches = [one for one in traces.step(step) if ranks is None or one.rank in ranks][:MOST_RANKS]
        if not batches:
            raise ValueError(f"there are no spans of step {step + 1}")
        lanes = [lane for lane in LANES if any(len(_on_lane(one, lane)) for one in batches)]
        found = [phases(one.records, one.labels) for one in batches]
        total = sum(length(one.moving) for one in found)
        hidden = sum(length(one.hidden) for one in found)
        share = f"{hidden / total:.0%} of communication is hidden behind compute"
        ends = max(int(one.records["end_ns"].max()) for one in batches)
        title = f"{name}: {(ends - begin_of(batches)) / 1e6:.0f} ms" if name else f"step {step + 1}"
        return cls(f"{title}: {share if total else 'no communication'}", tuple(batches), tuple(lanes))

    @property
    def rows(self) -> int:
        """Lanes, with a free one after those of every rank."""
        return len(self.batches) * (len(self.lanes) + 1)

    def draw(self, axes: Any) -> None:
        """Draw the lanes, with the share that is hidden as title."""
        begin, ticks = begin_of(self.batches), {}
        for place, batch in enumerate(self.batches):
            found = phases(batch.records, batch.labels)
            for number, lane in enumerate(self.lanes):
                y = place * (len(self.lanes) + 1) + number
                ticks[y] = f"rank {batch.rank}  {_LANE_NAMES[lane]}" if number == 0 else _LANE_NAMES[lane]
                own = _on_lane(batch, lane)
                _draw(axes, own, y, begin)
                bare, colour = without(times_of(own), found.computing), EXPOSED
                if lane is Stream.COMPUTE:
                    bare, colour = found.waiting, PEERS
                axes.broken_barh(_bars(bare, begin), (y + 0.28, 0.12), color=colour)
        axes.set_yticks([*ticks], [*ticks.values()])
        axes.set_ylim(self.rows - 0.6, -0.6)
        axes.set_title(self.title, loc="left")
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


def _on_lane(batch: Batch, lane: Stream) -> Records:
    """The operators of a stream."""
    operators, _, _ = apart(batch.records)
    return operators[batch.labels.streams[operators["label"]] == lane]


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
