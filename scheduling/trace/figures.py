"""Formats overlap figures for people. Noise may push a measured difference beyond what is possible: a
computation beside a transfer seems faster than alone, a step faster than the limit. Then words replace the
figure. The live page follows the same rules (``dashboards/page/dom.js``, ``lost``).
"""

from collections.abc import Callable


def share(value: float | None, places: int = 0) -> str:
    """Format a share (1: all) in percent, "-" if it is not known; never "-0%"."""
    if value is None:
        return "-"
    text = f"{value:.{places}%}"
    return text.removeprefix("-") if float(text.rstrip("%")) == 0 else text


def lost(value: float | None, write: Callable[[float], str]) -> str:
    """Format lost time or a lost share with ``write``; "none" if it is zero or negative, "-" if it is not
    known."""
    if value is None:
        return "-"
    return "none" if value <= 0 or write(value) == write(0.0) else write(value)


def recovered(value: float | None, places: int = 0) -> str:
    """Format the share of the possible gain that was reached: "all" from the limit on, "none" if steps got
    longer."""
    if value is None:
        return "-"
    text = share(value, places)
    percent = float(text.rstrip("%"))
    return "all" if percent >= 100 else "none" if percent <= 0 else text
