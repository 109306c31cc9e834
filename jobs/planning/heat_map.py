"""How well operators overlap, as a heat map: in the terminal and as SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rich.table import Table
from rich.text import Text

from braid.scheduling.profile import Profile

_WORST, _NONE, _BEST = (178, 24, 43), (247, 247, 247), (33, 102, 172)
"""Colours of an OEF of -1, 0 and 1: red slows down, white gains nothing, blue hides all."""

_CELL, _LABEL = 110, 200


@dataclass(frozen=True)
class HeatMap:
    """Overlap effectiveness of compute operators (rows) beside communication (columns).

    Collectives with equal effects, being of one kind and size, are one column.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    row_ns: tuple[int, ...]
    column_ns: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]
    source: str


def heat_map(profile: Profile) -> HeatMap:
    """The map of layers' operators; pairs that were not measured alone have the value of their classes."""
    names = profile.layer_operators
    keys = [key for key in profile.classes if key in names]
    links = [key for key in keys if profile.classes.get(key) in ("intra", "inter")]
    compute = [key for key in keys if key not in links and profile.solo_ns[key] > 0]
    alike: dict[tuple[float, ...], list[str]] = {}
    for link in links:
        effects = tuple(profile.effect(row, link) for row in compute)
        alike.setdefault(effects, []).append(link)
    return HeatMap(
        rows=tuple(names[key] for key in compute),
        columns=tuple(
            names[same[0]] + (f" and {len(same) - 1} alike" if len(same) > 1 else "")
            for same in alike.values()
        ),
        row_ns=tuple(profile.solo_ns[key] for key in compute),
        column_ns=tuple(profile.solo_ns[same[0]] for same in alike.values()),
        values=tuple(zip(*alike, strict=True)),
        source=profile.source,
    )


def colour(value: float) -> tuple[int, int, int]:
    """From red (-1) over white (0) to blue (1)."""
    end = _BEST if value >= 0 else _WORST
    share = min(1.0, abs(value))
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(_NONE, end, strict=True))
    return red, green, blue


def _ink(value: float) -> str:
    return "#ffffff" if abs(value) > 0.55 else "#1a1a1a"


def terminal_map(heat: HeatMap) -> Table:
    """The map for a terminal: a cell's colour and number are the OEF."""
    table = Table(
        title=f"overlap effectiveness: compute (rows) beside communication (columns); {heat.source}",
        title_justify="left",
        show_lines=False,
        padding=(0, 0),
    )
    table.add_column("operator")
    table.add_column("ms", justify="right")
    for name, ns in zip(heat.columns, heat.column_ns, strict=True):
        table.add_column(f"{name}\n{ns / 1e6:.2f} ms", justify="center", overflow="fold")
    for name, ns, values in zip(heat.rows, heat.row_ns, heat.values, strict=True):
        cells = []
        for value in values:
            red, green, blue = colour(value)
            cells.append(Text(f" {value:+.2f} ", style=f"{_ink(value)} on rgb({red},{green},{blue})"))
        table.add_row(name, f"{ns / 1e6:.2f}", *cells)
    return table


def svg_map(heat: HeatMap) -> str:
    """The map as an SVG picture."""
    # Headings lean to the right by 40 degrees: they need room above and beside the last column.
    longest = 6.5 * (max(map(len, heat.columns), default=0) + len(" 00.0 ms"))
    top = round(50 + max(60.0, longest * 0.64))
    width = max(640, round(_LABEL + _CELL * (len(heat.columns) - 0.5) + longest * 0.77 + 16))
    height = top + 22 * len(heat.rows) + 60
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        '<text x="10" y="20" font-size="14" font-weight="600">Overlap effectiveness</text>',
        f'<text x="10" y="38" fill="#555555">{escape(_fit(heat.source, width))}</text>',
    ]
    for place, (name, ns) in enumerate(zip(heat.columns, heat.column_ns, strict=True)):
        x = _LABEL + _CELL * place + _CELL / 2
        out.append(
            f'<text transform="translate({x + 4:g} {top - 8}) rotate(-40)" font-size="11">{escape(name)} '
            f'<tspan fill="#777777">{ns / 1e6:.1f} ms</tspan></text>'
        )
    for line, (name, ns, values) in enumerate(zip(heat.rows, heat.row_ns, heat.values, strict=True)):
        y = top + 22 * line
        out.append(
            f'<text x="{_LABEL - 8}" y="{y + 15}" text-anchor="end">{escape(name)} '
            f'<tspan fill="#777777">{ns / 1e6:.1f} ms</tspan></text>'
        )
        for place, value in enumerate(values):
            red, green, blue = colour(value)
            x = _LABEL + _CELL * place
            out.append(
                f'<rect x="{x}" y="{y}" width="{_CELL - 2}" height="20" fill="rgb({red},{green},{blue})"/>'
                f'<text x="{x + _CELL / 2 - 1:g}" y="{y + 14}" text-anchor="middle" font-size="11" '
                f'fill="{_ink(value)}">{value:.2f}</text>'
            )
    out.append(_legend(height - 30, width))
    out.append("</svg>")
    return "\n".join(out)


def _legend(y: float, width: int) -> str:
    steps: Sequence[float] = (-1.0, -0.5, 0.0, 0.5, 1.0)
    parts = []
    for place, value in enumerate(steps):
        red, green, blue = colour(value)
        parts.append(
            f'<rect x="{10 + 40 * place}" y="{y}" width="38" height="14" fill="rgb({red},{green},{blue})"/>'
            f'<text x="{29 + 40 * place}" y="{y + 11}" font-size="10" text-anchor="middle" '
            f'fill="{_ink(value)}">{value:+g}</text>'
        )
    parts.append(
        f'<text x="220" y="{y + 11}" font-size="11" fill="#555555">'
        f"{_fit('1: hidden at no cost   0: no gain   below 0: slower together', width - 220)}</text>"
    )
    return "".join(parts)


def _fit(text: str, width: int) -> str:
    """The beginning of a text that is about as wide as there is room."""
    most = max(8, width // 7)
    return text if len(text) <= most else f"{text[: most - 1]}…"
