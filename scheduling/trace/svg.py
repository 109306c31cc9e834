"""Writes all pictures: SVG elements, and bars in rows over a time axis."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from braid.scheduling.trace.arrays import FloatArray, IntArray, shares

MOVES, EXPOSED = "#8a94a0", "#c2003b"
"""Colours of strips below rows: some transfer is under way; and it is exposed, as nothing is computed
meanwhile."""
_LEFT, _TOP, _WIDTH, _HEADING, _STRIP = 90, 32, 1400, 24, 10
_SPAN = _WIDTH - _LEFT - 20
_COLUMNS = 645
"""Number of columns of a strip; the height of a column is the share of its time that is filled."""
_UNITS = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1, "ns"))


@dataclass(frozen=True)
class Bar:
    """A task on a row of a picture; its label is shown where there is room."""

    begin: float
    end: float
    label: str
    fill: str
    ink: str = "white"
    """Colour of the label and the frame."""
    half: str = ""
    """Half of the row that the bar takes: ``^`` the upper, ``_`` the lower one; empty: the whole row."""


@dataclass(frozen=True)
class Row:
    """A row of a picture: bars, and a strip below them; intervals (n, 2) are disjoint."""

    name: str
    bars: Sequence[Bar] = ()
    seams: Sequence[tuple[str, IntArray]] = ()
    """Colours with the intervals of many bars without labels."""
    strips: Sequence[tuple[str, IntArray]] = ()
    """Colours with the intervals that fill the strip's columns; a later colour covers an earlier one."""
    heading: str = ""
    """Text above the row, if another part of the picture begins there."""


def element(name: str, *inside: str, **attributes: object) -> str:
    """Return an SVG element; underscores in attribute names become hyphens, numbers get two decimal
    places."""
    told = "".join(f' {key.replace("_", "-")}="{_told(value)}"' for key, value in attributes.items())
    return f"<{name}{told}>{''.join(inside)}</{name}>" if inside else f"<{name}{told}/>"


def _told(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else escape(str(value))


def text(x: float, y: float, content: str, **attributes: object) -> str:
    return element("text", escape(content), x=x, y=y, **attributes)


def document(width: int, height: int, elements: Iterable[str], font_size: int = 11) -> str:
    """Return an SVG document with these elements on a white background."""
    size = {"width": width, "height": height}
    background = element("rect", **size, fill="white")
    box = {"viewBox": f"0 0 {width} {height}", "font_family": "sans-serif", "font_size": font_size}
    content = "\n".join(["", background, *elements, ""])
    return element("svg", content, xmlns="http://www.w3.org/2000/svg", **size, **box) + "\n"


def rows_picture(
    rows: Sequence[Row],
    length: float,
    title: str,
    note: str,
    *,
    high: int = 28,
    legend: Sequence[tuple[str, str]] = (),
) -> str:
    """Draw rows over an axis of ``length`` nanoseconds; ``high``: height of bars in pixels; ``legend``: names
    and colours."""
    elements, y = [text(_LEFT, 20, title, font_size=15, font_weight="bold")], _TOP
    for row in rows:
        if row.heading:
            y += _HEADING
            elements.append(text(_LEFT, y - 6, row.heading, font_weight="bold", font_size=13))
        elements.append(text(8, y + high / 2 + 5, row.name, fill="#333"))
        elements.append(element("rect", x=_LEFT, y=y, width=_SPAN, height=high, fill="#eef0f3"))
        elements += [_bar(bar, y, high, length) for bar in row.bars]
        elements += [_seam(colour, times, y, high, length) for colour, times in row.seams]
        y += high + 6
        if row.strips:
            edges = np.linspace(0.0, length, _COLUMNS + 1)
            elements += [_strip(shares(times, edges), y + _STRIP - 4, c) for c, times in row.strips]
            y += _STRIP + 2
    elements += [*_axis(length, y), text(_LEFT, y + 38, note, fill="#666")]
    for number, (name, colour) in enumerate(legend):
        x = _LEFT + number * _SPAN / len(legend)
        elements.append(element("rect", x=x, y=y + 48, width=12, height=12, fill=colour))
        elements.append(text(x + 17, y + 58, name, fill="#333"))
    return document(_WIDTH, y + (70 if legend else 48), elements)


def _bar(bar: Bar, top: float, high: float, length: float) -> str:
    x, wide = _LEFT + bar.begin / length * _SPAN, max(0.4, (bar.end - bar.begin) / length * _SPAN)
    if bar.half:
        high /= 2
    y = top + high if bar.half == "_" else top
    box = element("rect", x=x, y=y, width=wide, height=high, fill=bar.fill, stroke=bar.ink, stroke_width=0.6)
    room, label = int(wide / 6.2), bar.label
    shown = ""
    if room >= 2 or (room >= 1 and len(label) == 1):
        short = label if len(label) <= room else label[: max(1, room - 1)] + "…"
        shown = text(x + 2, y + high / 2 + 4, short, fill=bar.ink)
    return element("g", element("title", escape(label)), box, shown)


def _seam(colour: str, times: IntArray, y: float, high: float, length: float) -> str:
    """Draw all bars as one path, as a picture may have a hundred thousand."""
    path, reached = "", -1.0
    for begin, end in (times / length * _SPAN + _LEFT).tolist():
        if end - reached > 0.3:
            path += f"M{max(begin, reached):.1f} {y:g}V{y + high:g}H{max(end, begin + 0.4):.1f}V{y:g}Z"
            reached = end
    return element("path", d=path, fill=colour, stroke="white", stroke_width=0.2)


def _strip(filled: FloatArray, bottom: float, colour: str) -> str:
    """Draw an area below a step curve, whose height shows how full the columns are."""
    wide, now = _SPAN / len(filled), 0.0
    path = f"M{_LEFT} {bottom:g}"
    for column, share in enumerate(filled.tolist()):
        if (height := round(share * _STRIP, 1)) != now:
            path += f"H{_LEFT + column * wide:.1f}V{bottom - height:g}"
            now = height
    return element("path", d=f"{path}H{_LEFT + _SPAN}V{bottom:g}Z", fill=colour)


def _axis(length: float, y: int) -> Iterator[str]:
    """Draw about ten marks at round times."""
    size, unit = next((size, unit) for size, unit in _UNITS if length >= 2 * size or size == 1)
    power = 10.0 ** math.floor(math.log10(length / size / 10))
    step = next(n * power for n in (1, 2, 5, 10) if length / size <= 10 * n * power * 1.0001)
    for number in range(int(length / size / step) + 1):
        x = _LEFT + number * step * size / length * _SPAN
        yield element("path", d=f"M{x:.1f} {_TOP}V{y + 3}", stroke="#000", stroke_opacity=0.15)
        label = f"{number * step:.10g}" + (f" {unit}" if number == 0 else "")
        yield text(x, y + 15, label, fill="#333", text_anchor="middle")
