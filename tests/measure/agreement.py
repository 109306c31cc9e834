"""Simulator against reality: step times of `braid bench overlap --json` beside simulated ones.

A result is a case: one model over one link, with a step for each schedule and each further order of one
(``NAME, DESCRIPTION``), which have to be ranked right. Over all cases together a rank correlation is near 1
whatever the simulator knows of schedules, as models differ tenfold.

Steps are simulated with the profile that was there before anything ran, which is what a planner has, and with
one that was measured after the rounds: what the former is worse by is drift of the machine. Schedules whose
measured steps differ by less than their spread (the mean of their quartiles' distances) count as equal.

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

import numpy as np
from scipy.stats import pearsonr, rankdata

FEWEST = 3
"""Least number of steps for which a rank correlation is computed."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    before: float
    """Simulated by the profile before the rounds."""
    simulated: float
    """Simulated by the profile after the rounds."""
    measured: float
    spread: float
    """Interquartile range of the measured step."""

    @property
    def error(self) -> float:
        """Error of the simulated step, relative to the measured one."""
        return abs(self.simulated - self.measured) / self.measured

    def ties(self, other: "StepTimes") -> bool:
        """Return whether the measured steps differ by less than their spread."""
        return abs(self.measured - other.measured) <= (self.spread + other.spread) / 2


def rank_correlation(steps: Sequence[StepTimes]) -> float | None:
    """Compute Spearman's rank correlation of simulated and measured steps; None if all measured steps tie.

    Steps whose measured times tie get the mean of their ranks on both sides, since neither order is wrong.
    """
    simulated = rankdata([step.simulated for step in steps])
    measured = rankdata([step.measured for step in steps])
    left = sorted(range(len(steps)), key=lambda index: steps[index].measured)
    while left:
        alike = [index for index in left if steps[index].ties(steps[left[0]])]
        if len(alike) == len(steps):
            return None
        for ranks in (simulated, measured):
            ranks[alike] = ranks[alike].mean()
        left = left[len(alike) :]
    return 0.0 if np.ptp(simulated) == 0 else float(pearsonr(simulated, measured).statistic)


def agreement(files: Sequence[Path]) -> dict[str, Any]:
    """Of all cases and each; `ValueError` for a file that is not such a result.

    Errors are shares of the measured step, by the profile after the rounds and (``error_before``) by that
    before them. Rank correlations take ties as equals; None for fewer than three steps, and where all tie.
    """
    cases: list[dict[str, Any]] = []
    steps: list[StepTimes] = []
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
    known = [case["spearman"] for case in cases if case["spearman"] is not None]
    return {
        "cases": cases,
        "steps": len(steps),
        "spearman": {"median": median(known), "least": min(known)} if known else None,
        "spearman_over_all_cases": rank_correlation(steps),
        "pairs": sum(case["pairs"] for case in cases),
        "in_order": sum(case["in_order"] for case in cases),
        **_errors(steps),
    }


def _errors(steps: Sequence[StepTimes]) -> dict[str, float]:
    return {
        "median_error": median(step.error for step in steps),
        "worst_error": max(step.error for step in steps),
        "error_before": median(abs(step.before - step.measured) / step.measured for step in steps),
    }


def _step(row: Mapping[str, Any]) -> StepTimes:
    before = float(row["predicted_seconds"])
    beside = row.get("beside_seconds")
    return StepTimes(
        before=before,
        simulated=before if beside is None else float(beside),
        measured=float(row["seconds_per_step"]),
        spread=float(row.get("spread_seconds", 0.0)),
    )


def _case(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One model over one link: its schedules and further orders of them; of schedules, how much slower the
    simulated fastest was measured than the measured fastest (``loss``)."""
    steps = {row["schedule"]: _step(row) for row in rows}
    pairs = list(combinations(steps.values(), 2))
    schedules = [name for name in steps if "," not in name]
    picked = min(schedules, key=lambda name: steps[name].before)
    fastest = min(schedules, key=lambda name: steps[name].measured)
    return {
        "model": result["model"],
        "link_mbit": result["link_mbit"],
        "alpha": rows[0]["alpha"],
        "steps": len(steps),
        "spearman": rank_correlation(list(steps.values())) if len(steps) >= FEWEST else None,
        "pairs": len(pairs),
        "in_order": sum(
            a.ties(b) or (a.simulated < b.simulated) is (a.measured < b.measured) for a, b in pairs
        ),
        **_errors(list(steps.values())),
        "picked": picked,
        "fastest": fastest,
        "loss": steps[picked].measured / steps[fastest].measured - 1,
    }


def main() -> None:
    """Compare the files that are named; JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    print(json.dumps(agreement(parser.parse_args().files), indent=1))


if __name__ == "__main__":
    main()
