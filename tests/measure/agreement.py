"""Simulator against reality: step times of `braid bench overlap --json` beside simulated ones.

A result is a case: one model over one link, with a step for each schedule and each further order of one
(``NAME, modelled costs``). What a planner needs is that these are ranked right. Over all cases together a
rank correlation is near 1 whatever the simulator knows of schedules, as models differ tenfold.

Steps are simulated twice: with the profile that was there before anything ran, which is what a planner has,
and with one that was measured after the rounds. What the former is worse by is drift of the machine.
Schedules whose measured steps differ by less than their spread (the mean of their quartiles' distances) count
as equal: neither order of them is wrong.

    PYTHONPATH=$PWD python -m tests.measure.agreement RESULT.json ...
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from braid.jobs.benchmarks.overlap_rows import FEWEST, Step, rank_correlation


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model over one link."""

    model: str
    link_mbit: float
    alpha: float
    steps: int
    """Measured and simulated ones: schedules, and further orders of them."""
    spearman: float | None
    """Rank correlation of simulated and measured steps, ties as equals; None for fewer than three steps, and
    where all of them tie."""
    pairs: int
    """Of its steps."""
    in_order: int
    """Pairs that are simulated in the measured order."""
    median_error: float
    """Of |simulated - measured| / measured, by the profile after the rounds."""
    worst_error: float
    error_before: float
    """The median by the profile before them."""
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
    pooled_spearman: float | None
    """Over the steps of all cases at once."""
    median_error: float
    worst_error: float
    error_before: float


def agreement(files: Sequence[Path]) -> Agreement:
    """Compare; `ValueError` for a file that is not such a result."""
    cases: list[Case] = []
    steps: list[Judged] = []
    for path in files:
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            rows = [row for row in result["rows"] if row["predicted_seconds"] is not None]
            cases.append(_case(result, rows))
            steps += map(_step, rows)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no result of `braid bench overlap --json`: {error}") from None
    if len(steps) < FEWEST:
        raise ValueError(f"{len(steps)} measured steps are too few to compare; give more results")
    return Agreement(
        cases=tuple(cases),
        steps=len(steps),
        pooled_spearman=rank_correlation(steps),
        median_error=median(step.error for step in steps),
        worst_error=max(step.error for step in steps),
        error_before=median(step.error_before for step in steps),
    )


@dataclass(frozen=True, kw_only=True)
class Judged(Step):
    """A step that was simulated before its rounds too."""

    before: float
    """Simulated by the profile before the rounds."""

    @property
    def error_before(self) -> float:
        """That of the profile before the rounds."""
        return abs(self.before - self.measured) / self.measured


def _step(row: Mapping[str, Any]) -> Judged:
    before = float(row["predicted_seconds"])
    beside = row.get("beside_seconds")
    return Judged(
        before=before,
        simulated=before if beside is None else float(beside),
        measured=float(row["seconds_per_step"]),
        spread=float(row.get("spread_seconds", 0.0)),
    )


def _case(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Case:
    steps = {row["schedule"]: _step(row) for row in rows}
    pairs = list(combinations(steps.values(), 2))
    schedules = [name for name in steps if "," not in name]
    picked = min(schedules, key=lambda name: steps[name].before)
    fastest = min(schedules, key=lambda name: steps[name].measured)
    errors = [step.error for step in steps.values()]
    return Case(
        model=result["model"],
        link_mbit=result["link_mbit"],
        alpha=rows[0]["alpha"],
        steps=len(steps),
        spearman=rank_correlation(list(steps.values())) if len(steps) >= FEWEST else None,
        pairs=len(pairs),
        in_order=sum(a.ties(b) or (a.simulated < b.simulated) is (a.measured < b.measured) for a, b in pairs),
        median_error=median(errors),
        worst_error=max(errors),
        error_before=median(step.error_before for step in steps.values()),
        picked=picked,
        fastest=fastest,
        loss=steps[picked].measured / steps[fastest].measured - 1,
    )


def show(console: Console, result: Agreement) -> None:
    """Print the numbers, of each case and of all."""
    table = Table()
    for name in (
        "model", "link Mbit/s", "alpha", "steps", "Spearman", "pairs in order", "median error", "before",
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
            f"{case.error_before:.1%}",
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
    lines.append(
        f"error {result.median_error:.1%} at the median, {result.worst_error:.1%} at most; by profiles from "
        f"before the rounds {result.error_before:.1%} at the median"
    )
    if len(result.cases) > 1 and result.pooled_spearman is not None:
        lines.append(
            f"over all cases at once, which differ by more than schedules do: Spearman "
            f"{result.pooled_spearman:.3f}"
        )
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def main() -> None:
    """Compare the files that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    show(Console(width=max(Console().width, 120)), agreement(parser.parse_args().files))


if __name__ == "__main__":
    main()
