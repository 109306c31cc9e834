"""Simulator against reality: step times of `braid bench overlap --json` beside simulated ones.

A result is a case: one model over one link, with a step for each schedule and each further order of one
(``NAME, modelled costs``). What a planner needs is that these are ranked right. Over all cases together a
rank correlation is near 1 whatever the simulator knows of schedules, as models differ tenfold.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr

from braid.actors.config import ConfigError

FEWEST = 3
"""Steps of a case that a rank correlation needs at least."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model over one link."""

    model: str
    link_mbit: float
    alpha: float
    steps: int
    """Measured and simulated ones: schedules, and further orders of them."""
    spearman: float | None
    """Rank correlation of simulated and measured steps; None for fewer than three."""
    pairs: int
    """Of its steps."""
    in_order: int
    """Pairs that are simulated in the measured order."""
    median_error: float
    """Of |simulated - measured| / measured."""
    worst_error: float
    picked: str
    """The schedule that is simulated to be fastest."""
    fastest: str
    """The one that was measured to be."""
    loss: float
    """How much slower than the fastest the picked one was measured."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Of all cases."""

    cases: tuple[Case, ...]
    steps: int
    pooled_spearman: float
    """Over the steps of all cases at once."""
    median_error: float
    worst_error: float

    def as_json(self) -> dict[str, Any]:
        """Plain containers, for ``--json``."""
        return asdict(self)


def agreement(files: Sequence[Path]) -> Agreement:
    """Compare; `ConfigError` for a file that is not such a result."""
    cases, steps = [], []
    for path in files:
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            rows = [row for row in result["rows"] if row["predicted_seconds"] is not None]
            cases.append(_case(result, rows))
            steps += [_times(row) for row in rows]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no result of `braid bench overlap --json`: {error}") from None
    if len(steps) < FEWEST:
        raise ConfigError(f"{len(steps)} measured steps are too few to compare; give more results")
    return Agreement(
        cases=tuple(cases),
        steps=len(steps),
        pooled_spearman=_spearman(steps),
        median_error=median(map(_error, steps)),
        worst_error=max(map(_error, steps)),
    )


def _case(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Case:
    steps = [_times(row) for row in rows]
    pairs = list(combinations(steps, 2))
    schedules = [row for row in rows if "," not in row["schedule"]]
    picked = min(schedules, key=lambda row: _times(row)[0])
    fastest = min(schedules, key=lambda row: _times(row)[1])
    return Case(
        model=result["model"],
        link_mbit=result["link_mbit"],
        alpha=rows[0]["alpha"],
        steps=len(steps),
        spearman=_spearman(steps) if len(steps) >= FEWEST else None,
        pairs=len(pairs),
        in_order=sum((a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in pairs),
        median_error=median(map(_error, steps)),
        worst_error=max(map(_error, steps)),
        picked=picked["schedule"],
        fastest=fastest["schedule"],
        loss=_times(picked)[1] / _times(fastest)[1] - 1,
    )


def _times(row: Mapping[str, Any]) -> tuple[float, float]:
    """A step simulated and measured, seconds."""
    return float(row["predicted_seconds"]), float(row["seconds_per_step"])


def _error(step: tuple[float, float]) -> float:
    return abs(step[0] - step[1]) / step[1]


def _spearman(steps: Sequence[tuple[float, float]]) -> float:
    simulated, measured = zip(*steps, strict=True)
    return float(spearmanr(simulated, measured).statistic)


def show(console: Console, result: Agreement) -> None:
    """Print the numbers, of each case and of all."""
    table = Table()
    for name in (
        "model", "link Mbit/s", "alpha", "steps", "Spearman", "pairs in order", "median error",
        "picked by simulation", "fastest measured", "slower by",
    ):  # fmt: skip
        table.add_column(name)
    for case in result.cases:
        table.add_row(
            case.model,
            f"{case.link_mbit:g}",
            f"{case.alpha:.2f}",
            str(case.steps),
            "-" if case.spearman is None else f"{case.spearman:.2f}",
            f"{case.in_order} of {case.pairs}",
            f"{case.median_error:.1%}",
            case.picked,
            case.fastest,
            f"{case.loss:.1%}",
        )
    console.print(table)
    known = [case.spearman for case in result.cases if case.spearman is not None]
    cases = "1 case" if len(result.cases) == 1 else f"{len(result.cases)} cases"
    lines = [f"{result.steps} measured steps in {cases} (one model over one link each)"]
    if known:
        lines.append(
            f"within a case: Spearman {median(known):.2f} at the median, {min(known):.2f} at the least; "
            f"{sum(case.in_order for case in result.cases)} of {sum(case.pairs for case in result.cases)} "
            f"pairs are simulated in the measured order"
        )
    lines.append(f"error {result.median_error:.1%} at the median, {result.worst_error:.1%} at most")
    if len(result.cases) > 1:
        lines.append(
            f"over all cases at once, which differ by more than schedules do: Spearman "
            f"{result.pooled_spearman:.3f}"
        )
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
