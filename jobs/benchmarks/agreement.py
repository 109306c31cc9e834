"""Simulator against reality: step times of `braid bench overlap --json` beside simulated ones."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr

from braid.actors.config import ConfigError


@dataclass(frozen=True, kw_only=True)
class Pick:
    """What the simulator would have taken in one case, and what was fastest."""

    model: str
    link_mbit: float
    alpha: float
    picked: str
    fastest: str
    loss: float
    """How much slower than the fastest the picked one was measured."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Over all cases and schedules."""

    runs: int
    spearman: float
    median_error: float
    """Of |simulated - measured| / measured."""
    worst_error: float
    picks: tuple[Pick, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain containers, for ``--json``."""
        return asdict(self)


def agreement(files: Sequence[Path]) -> Agreement:
    """Compare; `ConfigError` for a file that is not such a result."""
    simulated: list[float] = []
    measured: list[float] = []
    picks = []
    for path in files:
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            rows = [row for row in result["rows"] if row["predicted_seconds"] is not None]
            rows = [row for row in rows if "," not in row["schedule"]]  # variants of a schedule
            simulated += [row["predicted_seconds"] for row in rows]
            measured += [row["seconds_per_step"] for row in rows]
            picked = min(rows, key=lambda row: float(row["predicted_seconds"]))
            fastest = min(rows, key=lambda row: float(row["seconds_per_step"]))
            picks.append(
                Pick(
                    model=result["model"],
                    link_mbit=result["link_mbit"],
                    alpha=rows[0]["alpha"],
                    picked=picked["schedule"],
                    fastest=fastest["schedule"],
                    loss=picked["seconds_per_step"] / fastest["seconds_per_step"] - 1,
                )
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no result of `braid bench overlap --json`: {error}") from None
    if len(measured) < 3:
        raise ConfigError(f"{len(measured)} runs are too few to compare; give more results")
    errors = [abs(s - m) / m for s, m in zip(simulated, measured, strict=True)]
    return Agreement(
        runs=len(measured),
        spearman=float(spearmanr(simulated, measured).statistic),
        median_error=median(errors),
        worst_error=max(errors),
        picks=tuple(picks),
    )


def show(console: Console, result: Agreement) -> None:
    """Print the numbers and what was picked in each case."""
    console.print(
        f"{result.runs} runs: Spearman {result.spearman:.3f}, error {result.median_error:.1%} at the median, "
        f"{result.worst_error:.1%} at most",
        highlight=False,
    )
    table = Table()
    for name in ("model", "link Mbit/s", "alpha", "picked by simulation", "fastest measured", "slower by"):
        table.add_column(name)
    for pick in result.picks:
        table.add_row(
            pick.model,
            f"{pick.link_mbit:g}",
            f"{pick.alpha:.2f}",
            pick.picked,
            pick.fastest,
            f"{pick.loss:.1%}",
        )
    console.print(table)
