"""Pictures of a simulated step: the pipeline over time, and a paired block's strands on three streams."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from braid.scheduling.code import Compute, Node, Start, name_of
from braid.scheduling.operators import Stream
from braid.scheduling.pattern import is_layer
from braid.scheduling.schedule import Pass, PassKind
from braid.scheduling.simulate import Simulation
from braid.scheduling.simulator.engine import BlockRun, Executed
from braid.scheduling.trace_arrays import FloatArray, IntArray, intervals, union, without

COLOURS = {
    "F": "#4c8bf5",
    "B": "#3aa76d",
    "I": "#3aa76d",
    "W": "#a3c585",
    "L": "#c5e6d3",
    "pair": "#d9a520",
    "idle": "#eef0f3",
}
"""Of passes, and of the end that a backward pass has left (L); a paired block is drawn as its forward over
its backward pass."""
_DARK = {"L": "#14532d"}
"""The text, and the frame, where white would not show."""


@dataclass(frozen=True)
class Bar:
    """A task on a row of a picture: begin and end as shares of the width."""

    row: int
    begin: float
    end: float
    label: str
    kind: str
    """The letter of its pass, L for the end that a backward pass has left; behind it ``^`` or ``_`` for the
    upper or the lower half of its row."""


def pipeline_bars(simulation: Simulation) -> list[Bar]:
    """Every block of every stage; of a paired block both halves."""
    total = simulation.step_ns
    bars = []
    for rank in simulation.ranks:
        for run in rank.blocks:
            begin, end = run.start / total, (run.start + run.course.duration) / total
            passes = moving(run)
            for n, one in enumerate(passes):
                half = "" if len(passes) == 1 else "^_"[n > 0]
                bars.append(Bar(rank.number, begin, end, str(one.micro_batch), one.kind.value + half))
    return bars


def moving(run: BlockRun) -> tuple[Pass, ...]:
    """The passes of a block, without the ends that earlier ones left."""
    return tuple(one for one in run.stretch.block_passes if one.kind is not PassKind.END)


def paired_run(simulation: Simulation) -> BlockRun | None:
    """A block of a forward and a backward pass from the middle of the step, on the first stage with one."""
    both = {PassKind.FORWARD, PassKind.BACKWARD}
    for rank in simulation.ranks:
        pairs = [run for run in rank.blocks if {one.kind for one in moving(run)} == both]
        if pairs:
            return pairs[len(pairs) // 2]
    return None


def pair_bars(simulation: Simulation, run: BlockRun) -> tuple[list[Bar], float]:
    """What a paired block executes from the begin of one pair of layers to the next, and nanoseconds between.

    Rows are streams. It is the first pair that takes up what the one before has left, else the second where
    there is one. Layers of a unit count as one.
    """
    passes = run.stretch.passes
    nodes = [
        (e, e.operation.what, passes[e.operation.turn])
        for e in run.course.executed
        if isinstance(e.operation, Compute | Start) and isinstance(e.operation.what, Node)
    ]
    tasks = [(e, node, one) for e, node, one in nodes if is_layer(node.operator.part)]
    starts: dict[int, float] = {}
    rounds: dict[int, int] = {}
    for forward in (True, False):
        own = [(e, node) for e, node, one in tasks if one.forward is forward and one.kind is not PassKind.END]
        places = sorted({node.place for _, node in own}, reverse=not forward)
        for n, place in enumerate(places):
            first = min(e.start for e, node in own if node.place == place)
            starts[n] = min(first, starts.get(n, first))
            if not forward:
                rounds[place] = n

    def bars(chosen: int) -> tuple[list[Bar], float]:
        begin = starts[chosen]
        end = starts.get(chosen + 1, max(e.end for e, _, _ in tasks))

        def kind(e: Executed, node: Node, one: Pass) -> str:
            if one.forward:
                return "F"
            left = e.start >= begin and rounds.get(node.place, chosen) < chosen
            return "L" if one.kind is PassKind.END or left else "B"

        found = [
            _pair_bar(e, node, kind(e, node, one), begin, end)
            for e, node, one in tasks
            if e.start < end and e.end > begin
        ]
        return found, end - begin

    pairs = [bars(n) for n in range(1, len(starts))] or [bars(0)]
    return next((found for found in pairs if any(bar.kind == "L" for bar in found[0])), pairs[0])


def _pair_bar(executed: Executed, node: Node, kind: str, begin: float, end: float) -> Bar:
    name = name_of(node)
    return Bar(
        list(Stream).index(executed.price.stream),
        (max(executed.start, begin) - begin) / (end - begin),
        (min(executed.end, end) - begin) / (end - begin),
        f"L:{name}" if kind == "L" else name,
        kind,
    )


def pair_text(
    simulation: Simulation, run: BlockRun, width: int = 100
) -> list[tuple[str, list[tuple[str, str]]]]:
    """Rows for the terminal: a stream's name and its pieces (text, kind: F, B, L or blank).

    Every piece begins with the letter of its kind, so that it can be told without colours.
    """
    bars, _ = pair_bars(simulation, run)
    rows = []
    for number, stream in enumerate(Stream):
        pieces: list[tuple[str, str]] = []
        column = 0
        for bar in sorted((b for b in bars if b.row == number), key=lambda b: b.begin):
            first, last = round(bar.begin * width), round(bar.end * width)
            if last <= max(first, column):
                continue
            pieces.append((" " * (first - column), ""))
            room = last - max(first, column)
            label = bar.label if bar.kind == "L" else f"{bar.kind}:{bar.label}"
            pieces.append((label[: room - 1].ljust(room - 1) + "▏" if room > 1 else bar.kind, bar.kind))
            column = last
        rows.append((stream.value, pieces))
    return rows


_ROW, _LEFT, _TOP, _WIDTH = 34, 90, 32, 1400
_STRIP = 10
COLUMNS = 645
MOVES, EXPOSED = "#8a94a0", "#c2003b"
"""Of the strip below a stage: some transfer is under way; and nothing is computed meanwhile."""


def pair_svg(simulation: Simulation, run: BlockRun, title: str) -> str:
    """The paired block as SVG: blue is the forward strand, green the backward one, pale what it left."""
    bars, ns = pair_bars(simulation, run)
    note = "blue: forward strand, green: backward strand"
    if any(bar.kind == "L" for bar in bars):
        note += ", pale with L: what the layer or the block before has left"
    return _svg(bars, [stream.value for stream in Stream], title, note, ns)


def pipeline_svg(simulation: Simulation, title: str) -> str:
    """The pipeline as SVG: stages downwards, time to the right; numbers are micro-batches."""
    rows = [f"stage {rank.number}" for rank in simulation.ranks]
    note = (
        "blue: forward, green: backward (light: weight gradients), halves: paired blocks; below them, "
        "grey: communication, red: exposed, as high as it fills the time; simulated"
    )
    return _svg(pipeline_bars(simulation), rows, title, note, simulation.step_ns, link_shares(simulation))


@dataclass(frozen=True)
class Links:
    """How full a stage's links are, by column of the picture: shares (`COLUMNS`,) of a column's time."""

    moves: FloatArray
    """With some transfer under way."""
    exposed: FloatArray
    """Of these, with nothing computed."""


def link_shares(simulation: Simulation) -> list[Links]:
    """Of every stage that is drawn, in order."""
    edges = np.linspace(0.0, simulation.step_ns, COLUMNS + 1)
    times: dict[tuple[int, bool], list[tuple[int, int]]] = {}
    for span in simulation.spans():
        times.setdefault((span.rank, span.stream is Stream.COMPUTE), []).append((span.start_ns, span.end_ns))
    found = []
    for rank in sorted({rank for rank, _ in times}):
        moving = union(intervals(times.get((rank, False), [])))
        exposed = without(moving, intervals(times.get((rank, True), [])))
        found.append(Links(_shares(moving, edges), _shares(exposed, edges)))
    return found


def _shares(disjoint: IntArray, edges: FloatArray) -> FloatArray:
    """How much of each column disjoint intervals (n, 2) fill."""
    if not len(disjoint):
        return np.zeros(len(edges) - 1)
    lengths = disjoint[:, 1] - disjoint[:, 0]
    reached = np.cumsum(lengths)
    covered = np.interp(edges, disjoint.ravel(), np.stack([reached - lengths, reached], axis=1).ravel())
    shares: FloatArray = np.diff(covered) / np.diff(edges)
    return shares


def _strip(shares: FloatArray, bottom: float, span: int, colour: str) -> str:
    """An area under steps, as high as the columns are full."""
    wide, now = span / len(shares), 0.0
    path = f"M{_LEFT} {bottom:g}"
    for column, share in enumerate(shares):
        if (height := round(float(share) * _STRIP, 1)) != now:
            path += f"H{_LEFT + column * wide:.1f}V{bottom - height:g}"
            now = height
    return f'<path d="{path}H{_LEFT + span}V{bottom:g}Z" fill="{colour}"/>'


def _svg(
    bars: list[Bar], rows: list[str], title: str, note: str, ns: float, links: Sequence[Links] = ()
) -> str:
    """Bars in rows, with strips below them by choice, over an axis of ``ns`` nanoseconds."""
    span, pitch = _WIDTH - _LEFT - 20, _ROW + (_STRIP + 2 if links else 0)
    foot = _TOP + pitch * len(rows)
    height = foot + 48
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="15" font-weight="bold">{escape(title)}</text>',
        f'<text x="{_LEFT}" y="{height - 10}" fill="#666">{escape(note)}</text>',
    ]
    for number, name in enumerate(rows):
        y = _TOP + number * pitch
        lines.append(f'<text x="8" y="{y + 19}" fill="#333">{escape(name)}</text>')
        lines.append(
            f'<rect x="{_LEFT}" y="{y}" width="{span}" height="{_ROW - 6}" fill="{COLOURS["idle"]}"/>'
        )
    for bar in bars:
        lines.append(_rect(bar, span, pitch))
    for number, link in enumerate(links):
        bottom = _TOP + number * pitch + _ROW - 4 + _STRIP
        lines += [
            _strip(link.moves, bottom, span, MOVES),
            _strip(link.exposed, bottom, span, EXPOSED),
        ]
    return "\n".join([*lines, *_axis(ns, span, foot), "</svg>"]) + "\n"


def _axis(ns: float, span: int, y: int) -> Iterator[str]:
    """Marks at round times, some ten of them."""
    size, unit = next((size, unit) for size, unit in _UNITS if ns >= 2 * size or size == 1)
    power = 10.0 ** math.floor(math.log10(ns / size / 10))
    step = next(n * power for n in (1, 2, 5, 10) if ns / size <= 10 * n * power * 1.0001)
    for number in range(int(ns / size / step) + 1):
        x = _LEFT + number * step * size / ns * span
        yield f'<path d="M{x:.1f} {_TOP}V{y + 3}" stroke="#000" stroke-opacity="0.15"/>'
        label = f"{number * step:.10g}" + (f" {unit}" if number == 0 else "")
        yield f'<text x="{x:.1f}" y="{y + 15}" fill="#333" text-anchor="middle">{label}</text>'


_UNITS = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1, "ns"))


def _rect(bar: Bar, span: int, pitch: int) -> str:
    x, wide = _LEFT + bar.begin * span, max(0.4, (bar.end - bar.begin) * span)
    half = bar.kind[1:]
    high = (_ROW - 6) / (2 if half else 1)
    y = _TOP + bar.row * pitch + (high if half == "_" else 0)
    fill, dark = COLOURS[bar.kind[0]], _DARK.get(bar.kind[0])
    text = ""
    room = int(wide / 6.2)
    if room >= 2 or (room >= 1 and len(bar.label) == 1):
        shown = bar.label if len(bar.label) <= room else bar.label[: max(1, room - 1)] + "…"
        place = f'x="{x + 2:.1f}" y="{y + high / 2 + 4:.1f}"'
        text = f'<text {place} fill="{dark or "white"}">{escape(shown)}</text>'
    return (
        f'<g><title>{escape(bar.label)}</title><rect x="{x:.2f}" y="{y:.1f}" width="{wide:.2f}" '
        f'height="{high:.1f}" fill="{fill}" stroke="{dark or "white"}" stroke-width="0.6"/>{text}</g>'
    )
