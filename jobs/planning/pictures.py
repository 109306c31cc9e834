"""Draws schedules and profiles: a grid or a simulated step in the terminal; a heat map of how well operators
overlap, in the terminal and as SVG."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from braid.jobs.output import say
from braid.scheduling.cost.effectiveness import Effectiveness, Measured
from braid.scheduling.cost.engine import BlockRun
from braid.scheduling.cost.picture import moving, pair_text, paired_run
from braid.scheduling.cost.simulate import Simulation
from braid.scheduling.schedule.draw import grid, summary
from braid.scheduling.schedule.operations import PassKind
from braid.scheduling.schedule.schedule import Schedule
from braid.scheduling.trace.svg import document, element, text

_STYLES = {
    "": "",
    "F": "white on dodger_blue2",
    "B": "black on green3",
    "L": "black on dark_sea_green2",
    "FF": "grey93 on blue3",
    "BB": "black on dark_sea_green4",
}
_FOLDED = {"F": "grey93 on blue", "B": "black on chartreuse3"}
"""Styles of passes on a stage's second chunk."""
_TOGETHER = "black on gold3"
_WORST, _NONE, _BEST = (178, 24, 43), (247, 247, 247), (33, 102, 172)
"""Colours of an overlap effectiveness (OEF) of -1, 0 and 1: red slows down, white gains nothing, blue hides
all."""
_CELL, _LABEL, _HIGH = 110, 200, 22


def _show_row(console: Console, name: str, cells: Iterable[tuple[str, str]]) -> None:
    """Print a name and then texts with their styles in one line."""
    console.print(Text.assemble(f"{name:<8} ", *cells), soft_wrap=True)


def show_schedule(console: Console, schedule: Schedule) -> None:
    """Print the grid: stages downwards, time to the right; forward blue, backward green, shaded by parity of
    the chunk."""
    say(console, summary(schedule))
    for number, row in enumerate(grid(schedule)):
        cells = []
        for label, block in row:
            if block is None:
                cells.append((label, "dim"))
                continue
            passes = [one for one in block.passes if one.kind is not PassKind.END]
            kinds = "".join(one.direction.value for one in passes)
            style = _STYLES.get(kinds, _TOGETHER)
            second = passes[0].chunk >= len(schedule.stages)
            cells.append((label, _FOLDED.get(kinds, style) if second else style))
        _show_row(console, f"stage {number}", cells)


def show_simulation(console: Console, simulation: Simulation, stages: int = 16) -> None:
    """Draw the first blocks over time, in as many columns as the terminal has; and a paired block."""
    width = max(60, min(console.width, 200) - 10)
    longest = max(run.course.duration for rank in simulation.ranks for run in rank.blocks)
    # A block needs room for its label, such as F12B34; later blocks that do not fit are left out.
    window = min(simulation.step_ns, longest * width / 8)
    console.print(
        f"the first {window / 1e9:.3f} s of {simulation.step_ns / 1e9:.3f} s: F forward (blue), B backward "
        f"(green), F and B paired (yellow; * where there is no room), with the numbers of micro-batches"
    )
    for rank in simulation.ranks[:stages]:
        cells, column = list[tuple[str, str]](), 0
        for run in rank.blocks:
            first, last = (round(t * width / window) for t in (run.start, run.start + run.course.duration))
            if first >= width:
                break
            first, last = max(first, column), min(last, width)
            if last > first:
                cells += [("·" * (first - column), "dim"), _block_cell(run, last - first)]
                column = last
        _show_row(console, f"stage {rank.number}", [*cells, ("·" * (width - column), "dim")])
    if len(simulation.ranks) > stages:
        console.print(f"... and {len(simulation.ranks) - stages} more stages")
    if (paired := paired_run(simulation)) is None:
        return
    rows = pair_text(simulation, paired, max(40, min(console.width, 160) - 10))
    legend = "a paired block: F forward strand (blue), B backward strand (green)"
    if any(kind == "L" for _, pieces in rows for _, kind in pieces):
        legend += ", L (pale): what the layer or the block before has left"
    console.print(legend)
    for name, pieces in rows:
        _show_row(console, name, [(label, _STYLES[kind]) for label, kind in pieces])


def _block_cell(run: BlockRun, room: int) -> tuple[str, str]:
    """Return text and style of a block that takes ``room`` columns, the last of which is a gap."""
    passes = moving(run)
    letters = "".join(one.kind.value for one in passes)
    style = _TOGETHER if len(passes) > 1 else _STYLES.get(letters, _STYLES["B"])
    mark = letters if len(passes) == 1 else "*"
    if room == 1:
        return mark, style
    texts = "".join(f"{one.kind.value}{one.micro_batch}" for one in passes), letters, mark
    shown = next(label for label in texts if len(label) < room)
    return shown.center(room - 1) + "▏", style


# -- overlap effectiveness -----------------------------------------------------------------------------------


def _colour(value: float) -> str:
    """Interpolate a colour from red (-1) over white (0) to blue (1)."""
    end, share = _BEST if value >= 0 else _WORST, min(1.0, abs(value))
    return f"rgb({','.join(str(round(a + (b - a) * share)) for a, b in zip(_NONE, end, strict=True))})"


def _ink(value: float) -> str:
    return "#ffffff" if abs(value) > 0.55 else "#1a1a1a"


def _heading(column: Measured) -> str:
    return column.name + (f" and {len(column.alike)} alike" if column.alike else "")


def terminal_map(found: Effectiveness) -> Table:
    """Draw the map for a terminal: colour and number of a cell are the OEF."""
    title = f"overlap effectiveness: compute (rows) beside communication (columns); {found.source}"
    table = Table(title=title, title_justify="left", show_lines=False, padding=(0, 0))
    table.add_column("operator")
    table.add_column("ms", justify="right")
    for column in found.columns:
        heading = f"{_heading(column)}\n{column.ns / 1e6:.2f} ms"
        table.add_column(heading, justify="center", overflow="fold")
    for row, values in zip(found.rows, found.values, strict=True):
        cells = [Text(f" {one:+.2f} ", style=f"{_ink(one)} on {_colour(one)}") for one in values]
        table.add_row(row.name, f"{row.ns / 1e6:.2f}", *cells)
    return table


def svg_map(found: Effectiveness) -> str:
    """Draw the map as an SVG picture."""
    # Headings are tilted by 40 degrees to the right: they need room above and beside the last column.
    headings = [f"{_heading(column)} {column.ns / 1e6:.1f} ms" for column in found.columns]
    longest = 6.5 * max(map(len, headings), default=0)
    top = round(50 + max(60.0, longest * 0.64))
    width = max(640, round(_LABEL + _CELL * (len(headings) - 0.5) + longest * 0.77 + 16))
    foot = top + _HIGH * len(found.rows) + 30
    elements = [
        text(10, 20, "Overlap effectiveness", font_size=14, font_weight=600),
        text(10, 38, _fit(found.source, width), fill="#555555"),
    ]
    for place, heading in enumerate(headings):
        turned = f"translate({_LABEL + _CELL * (place + 0.5) + 4:g} {top - 8}) rotate(-40)"
        elements.append(text(0, 0, heading, transform=turned, font_size=11))
    for line, (row, values) in enumerate(zip(found.rows, found.values, strict=True)):
        y = top + _HIGH * line
        elements.append(text(_LABEL - 8, y + 15, f"{row.name} {row.ns / 1e6:.1f} ms", text_anchor="end"))
        for place, value in enumerate(values):
            elements += _cell(_LABEL + _CELL * place, y, _CELL - 2, value, f"{value:.2f}")
    for place, value in enumerate((-1.0, -0.5, 0.0, 0.5, 1.0)):
        elements += _cell(10 + 40 * place, foot, 38, value, f"{value:+g}")
    said = _fit("1: hidden at no cost   0: no gain   below 0: slower together", width - 220)
    elements.append(text(220, foot + 14, said, fill="#555555", font_size=11))
    return document(width, foot + 30, elements, font_size=12)


def _cell(x: float, y: float, wide: float, value: float, told: str) -> list[str]:
    return [
        element("rect", x=x, y=y, width=wide, height=_HIGH - 2, fill=_colour(value)),
        text(x + wide / 2, y + 14, told, text_anchor="middle", font_size=11, fill=_ink(value)),
    ]


def _fit(told: str, width: int) -> str:
    """Return the beginning of a text that about fits into ``width`` pixels."""
    most = max(8, width // 7)
    return told if len(told) <= most else f"{told[: most - 1]}…"
