"""Pictures of a simulated step: the pipeline over time, and a paired block's strands on three streams."""

from dataclasses import dataclass
from html import escape

from braid.scheduling.fusion import split_place
from braid.scheduling.operators import Stream
from braid.scheduling.schedule import Block, Gradients, is_late
from braid.scheduling.simulate import Simulation
from braid.scheduling.simulator.compile import Place
from braid.scheduling.simulator.engine import BlockRun, Executed

COLOURS = {
    "F": "#4c8bf5",
    "B": "#3aa76d",
    "I": "#3aa76d",
    "W": "#a3c585",
    "P": "#c5e6d3",
    "pair": "#d9a520",
    "idle": "#eef0f3",
}
"""Of passes, and of what a backward pass has put off (P); a paired block is drawn as its forward over its
backward pass."""
_DARK = {"P": "#14532d"}
"""The text, and the frame, where white would not show."""


@dataclass(frozen=True)
class Bar:
    """A task on a row of a picture: begin and end as shares of the width."""

    row: int
    begin: float
    end: float
    label: str
    kind: str
    """The letter of its pass, P for what a backward pass has put off; behind it ``^`` or ``_`` for the upper
    or the lower half of its row."""


def pass_letter(block: Block) -> str:
    """F, B, I or W."""
    return str(block)[0]


def pipeline_bars(simulation: Simulation) -> list[Bar]:
    """Every block of every stage; of a paired block both halves."""
    total = simulation.step_ns
    bars = []
    for rank in simulation.ranks:
        for run in rank.blocks:
            begin, end = run.start / total, (run.start + run.course.duration) / total
            for half, block in zip("^_" if len(run.blocks) == 2 else (" ",), run.blocks, strict=True):
                bars.append(
                    Bar(rank.number, begin, end, str(block.micro_batch), pass_letter(block) + half.strip())
                )
    return bars


def paired_run(simulation: Simulation) -> BlockRun | None:
    """A paired block from the middle of the step, on the first stage that has one."""
    for rank in simulation.ranks:
        pairs = [run for run in rank.blocks if run.forward and run.backward]
        whole = [run for run in pairs if run.backward and run.backward.gradients is Gradients.BOTH]
        if whole:
            return whole[len(whole) // 2]
    return None


def pair_bars(simulation: Simulation, run: BlockRun) -> list[Bar]:
    """What a paired block executes from the begin of one pair of layers to the next; rows are streams.

    It is the first pair that takes up what the one before has put off, else the second where there is one.
    Layers that are fused to a run count as one.
    """
    tasks = [(e, e.place) for e in run.course.executed if e.place is not None and _in_layer(e)]
    starts: dict[int, float] = {}
    backward: list[int] = []
    for forward in (True, False):
        own = [(e, place) for e, place in tasks if place.forward is forward and not place.before]
        backward = sorted({place.position for _, place in own})
        for n, position in enumerate(backward):
            first = min(e.start for e, place in own if place.position == position)
            starts[n] = min(first, starts.get(n, first))
    programs = simulation.job.schedule.pairs.values()
    late = {action.operator for program in programs for action in program if is_late(action)}

    def bars(chosen: int) -> list[Bar]:
        begin = starts[chosen]
        end = starts.get(chosen + 1, max(e.end for e, _ in tasks))

        def kind(e: Executed, place: Place) -> str:
            if place.forward:
                return "F"
            left = e.start >= begin and e.task.operator in late and place.position in backward[:chosen]
            return "P" if place.before or left else "B"

        return [
            _pair_bar(e, kind(e, place), begin, end) for e, place in tasks if e.start < end and e.end > begin
        ]

    pairs = [bars(n) for n in range(1, len(starts))] or [bars(0)]
    return next((found for found in pairs if any(bar.kind == "P" for bar in found)), pairs[0])


def _pair_bar(executed: Executed, kind: str, begin: float, end: float) -> Bar:
    placed = split_place(executed.task.operator)
    name = executed.task.operator if placed is None else placed[2]
    return Bar(
        list(Stream).index(executed.task.stream),
        (max(executed.start, begin) - begin) / (end - begin),
        (min(executed.end, end) - begin) / (end - begin),
        f"P:{name}" if kind == "P" else name,
        kind,
    )


def _in_layer(executed: Executed) -> bool:
    return executed.task.key.startswith("layer/")


def pair_text(
    simulation: Simulation, run: BlockRun, width: int = 100
) -> list[tuple[str, list[tuple[str, str]]]]:
    """Rows for the terminal: a stream's name and its pieces (text, kind: F, B, P or blank)."""
    bars = pair_bars(simulation, run)
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
            pieces.append(
                (bar.label[: max(0, room - 1)].ljust(room - 1, " ") + "▏" if room > 1 else "▏", bar.kind)
            )
            column = last
        rows.append((stream.value, pieces))
    return rows


_ROW, _LEFT = 34, 90


def pair_svg(simulation: Simulation, run: BlockRun, title: str) -> str:
    """The paired block as SVG: blue is the forward strand, green the backward one, pale what it put off."""
    bars = pair_bars(simulation, run)
    note = "blue: forward strand, green: backward strand"
    if any(bar.kind == "P" for bar in bars):
        note += ", pale with P: what the layer or the block before has put off"
    return _svg(bars, [stream.value for stream in Stream], title, note)


def pipeline_svg(simulation: Simulation, title: str) -> str:
    """The pipeline as SVG: stages downwards, time to the right; numbers are micro-batches."""
    rows = [f"stage {rank.number}" for rank in simulation.ranks]
    note = "blue: forward, green: backward (light: weight gradients), halves: paired blocks; simulated"
    return _svg(pipeline_bars(simulation), rows, title, note)


def _svg(bars: list[Bar], rows: list[str], title: str, note: str, width: int = 1400) -> str:
    span = width - _LEFT - 20
    height = 70 + _ROW * len(rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="15" font-weight="bold">{escape(title)}</text>',
        f'<text x="{_LEFT}" y="{height - 12}" fill="#666">{escape(note)}</text>',
    ]
    for number, name in enumerate(rows):
        y = 32 + number * _ROW
        lines.append(f'<text x="8" y="{y + 19}" fill="#333">{escape(name)}</text>')
        lines.append(
            f'<rect x="{_LEFT}" y="{y}" width="{span}" height="{_ROW - 6}" fill="{COLOURS["idle"]}"/>'
        )
    for bar in bars:
        lines.append(_rect(bar, span))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _rect(bar: Bar, span: int) -> str:
    x, wide = _LEFT + bar.begin * span, max(0.4, (bar.end - bar.begin) * span)
    half = bar.kind[1:]
    high = (_ROW - 6) / (2 if half else 1)
    y = 32 + bar.row * _ROW + (high if half == "_" else 0)
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
