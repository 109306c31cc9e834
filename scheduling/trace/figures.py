"""Figures of overlap as people read them. A measured difference may lie beyond what is possible, by noise: a
computation beside a transfer seems faster than alone, a step faster than the limit. Then words stand instead.

The live page follows the same rules (``dashboards/page/dom.js``, ``lost``).
"""

from collections.abc import Callable


def share(value: float | None, places: int = 0) -> str:
    """A share (1: all) in percent, "-" where it is not known; never "-0%"."""
    if value is None:
        return "-"
    text = f"{value:.{places}%}"
    return text.removeprefix("-") if float(text.rstrip("%")) == 0 else text


def lost(value: float | None, write: Callable[[float], str]) -> str:
    """Time or share that was lost, written by ``write``; "none" where it is nothing that can be told."""
    if value is None:
        return "-"
    return "none" if value <= 0 or write(value) == write(0.0) else write(value)


def recovered(value: float | None, places: int = 0) -> str:
    """Share of the possible gain that was won: "all" up from the limit, "none" where steps got longer."""
    if value is None:
        return "-"
    text = share(value, places)
    percent = float(text.rstrip("%"))
    return "all" if percent >= 100 else "none" if percent <= 0 else text
