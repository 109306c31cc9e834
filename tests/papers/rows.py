"""A published figure beside the simulated one, and when the two fit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

Figure = float | tuple[float, float]
"""A number, or the least and the most of several."""

FORMULA_TOLERANCE: Final = 0.05
"""Share by which a number that follows from volumes and bandwidths may miss the printed one."""

RATE_TOLERANCE: Final = 0.10
"""Share by which an absolute throughput or size, modelled from data sheets, may miss a measured one."""

POINTS: Final = 4.0
"""Percentage points by which a simulated percentage may lie outside the published range."""


@dataclass(frozen=True, kw_only=True)
class Row:
    paper: str
    figure: str
    """Figure, table or section of the paper."""
    what: str
    unit: str = ""
    published: Figure | None = None
    """None where the paper has no figure: the row is a claim of ours, or an order that the text states."""
    simulated: Figure
    distance: float = 0.0
    """How far outside: a share of a published number; percentage points from a published range."""
    fits: bool | None
    """None: for information, as the paper does not say enough to judge."""
    note: str = ""


def ends(figure: Figure) -> tuple[float, float]:
    """The least and the most."""
    return figure if isinstance(figure, tuple) else (figure, figure)


def number(
    paper: str,
    figure: str,
    what: str,
    unit: str,
    published: Figure,
    simulated: float,
    tolerance: float = 0.0,
    note: str = "",
) -> Row:
    """A number that fits within ``tolerance``, a share, of the published one or of a range's nearer end."""
    low, high = ends(published)
    nearest = min(max(simulated, low), high)
    distance = simulated / nearest - 1 if nearest else simulated
    row = claim(paper, figure, what, unit, simulated, abs(distance) <= tolerance, note)
    return replace(row, published=published, distance=distance)


def percentages(
    paper: str, figure: str, what: str, published: Figure, simulated: Sequence[float], note: str = ""
) -> Row:
    """Percentages that fit where all of them lie in the published range or within `POINTS` of it."""
    low, high = ends(published)
    distance = max(0.0, low - min(simulated), max(simulated) - high)
    found = simulated[0] if len(simulated) == 1 else (min(simulated), max(simulated))
    row = claim(paper, figure, what, "%", found, distance <= POINTS, note)
    return replace(row, published=published, distance=distance)


def claim(
    paper: str, figure: str, what: str, unit: str, simulated: Figure, fits: bool | None, note: str = ""
) -> Row:
    """What no paper has a figure for."""
    return Row(paper=paper, figure=figure, what=what, unit=unit, simulated=simulated, fits=fits, note=note)
