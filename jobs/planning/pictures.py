"""Draws a schedule as a grid in the terminal; a heat map of how well operators overlap there and as SVG."""

import io
import re

from rich.console import Console
from rich.table import Table
from rich.text import Text

from braid.jobs.output import say
from braid.scheduling.cost.effectiveness import Effectiveness
from braid.scheduling.schedule.draw import grid, summary
from braid.scheduling.schedule.operations import PassKind
from braid.scheduling.schedule.schedule import Schedule

_STYLES = {
    "F": "white on dodger_blue2",
    "B": "black on green3",
    "FF": "grey93 on blue3",
    "BB": "black on dark_sea_green4",
}
_FOLDED = {"F": "grey93 on blue", "B": "black on chartreuse3"}
"""Styles of passes on a stage's second chunk."""
_TOGETHER = "black on gold3"
_WORST, _NONE, _BEST = (178, 24, 43), (247, 247, 247), (33, 102, 172)
"""Colours of an overlap effectiveness (OEF) of -1, 0 and 1: red slows down, white gains nothing, blue hides
all."""
_LABEL, _CELL = 50, 16
"""Characters of a row's name and time, and of a cell, in a picture."""


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
        console.print(Text.assemble(f"{f'stage {number}':<8} ", *cells), soft_wrap=True)


def _colour(value: float) -> str:
    """Interpolate a colour from red (-1) over white (0) to blue (1)."""
    end, share = _BEST if value >= 0 else _WORST, min(1.0, abs(value))
    return f"rgb({','.join(str(round(a + (b - a) * share)) for a, b in zip(_NONE, end, strict=True))})"


def terminal_map(found: Effectiveness) -> Table:
    """Draw the map for a terminal: colour and number of a cell are the OEF."""
    title = f"overlap effectiveness: compute (rows) beside communication (columns); {found.source}"
    table = Table(title=title, title_justify="left", show_lines=False, padding=(0, 0))
    table.add_column("operator")
    table.add_column("ms", justify="right")
    for column in found.columns:
        alike = f" and {len(column.alike)} alike" if column.alike else ""
        heading = f"{column.name}{alike}\n{column.ns / 1e6:.2f} ms"
        table.add_column(heading, justify="center", overflow="fold")
    for row, values in zip(found.rows, found.values, strict=True):
        cells = []
        for value in values:
            ink = "#ffffff" if abs(value) > 0.55 else "#1a1a1a"
            cells.append(Text(f" {value:+.2f} ", style=f"{ink} on {_colour(value)}"))
        table.add_row(row.name, f"{row.ns / 1e6:.2f}", *cells)
    return table


def svg_map(found: Effectiveness) -> str:
    """Draw the map as an SVG picture."""
    console = Console(record=True, file=io.StringIO(), width=_LABEL + _CELL * len(found.columns))
    console.print(terminal_map(found))
    return re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="braid profile"), flags=re.DOTALL)
