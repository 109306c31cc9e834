"""What the three papers published beside what the models here say.

Every row is computed when it is asked for. What does not fit is shown with the reason, as far as it is known.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from braid.scheduling.planner.tensor_degrees import describe_degrees
from braid.scheduling.presets.library import cluster_preset
from tests.papers import centauri
from tests.papers.block_profile import read_block_profile
from tests.papers.dhelix import dhelix_rows
from tests.papers.dhelix_parts import part_rows
from tests.papers.oases import METHODS, Comparison, compare
from tests.papers.rows import RATE_TOLERANCE, Figure, Row, claim, number

WITHOUT_PROFILE: Final = (
    "Oases: its rows need a profile of measured block costs (the authors publish one of an RTX 3090 as CSV); "
    "give it with --profile"
)


@dataclass(frozen=True, kw_only=True)
class PapersReport:
    """All rows, and what was left out."""

    rows: tuple[Row, ...]
    left_out: tuple[str, ...] = ()

    @property
    def judged(self) -> tuple[Row, ...]:
        """Rows that fit or do not; the others are for information."""
        return tuple(row for row in self.rows if row.fits is not None)

    @property
    def summary(self) -> str:
        """How many rows fit: of all, of each paper, and of those with a published figure."""
        parts = [_count(self.judged)]
        for paper in dict.fromkeys(row.paper for row in self.judged):
            parts.append(f"{paper} {_count([row for row in self.judged if row.paper == paper])}")
        printed = [row for row in self.judged if row.published is not None]
        return f"{parts[0]} rows fit ({', '.join(parts[1:])}); with a published figure {_count(printed)}"

    def as_json(self) -> dict[str, Any]:
        """Plain containers, for ``--json``."""
        return {**asdict(self), "fitting": sum(row.fits is True for row in self.rows), "of": len(self.judged)}


def _count(rows: Sequence[Row]) -> str:
    return f"{sum(row.fits is True for row in rows)} of {len(rows)}"


def run(profile_path: Path | None, progress: Callable[[str], None] = lambda text: None) -> PapersReport:
    """Compute every row; those of Oases need a profile of measured block costs.

    `ValueError` if the profile cannot be read.
    """
    profile = None if profile_path is None else read_block_profile(profile_path)
    rows = [*dhelix_rows(progress), *part_rows(progress)]
    progress("Centauri: partitions and tiers")
    rows += centauri_rows()
    if profile is not None:
        progress("Oases: degrees and sub-batches")
        rows += oases_rows(compare(profile))
    return PapersReport(rows=tuple(rows), left_out=() if profile is not None else (WITHOUT_PROFILE,))


def centauri_rows() -> Iterator[Row]:
    """Centauri's rows as `tests.papers.centauri` computes and judges them."""
    for row in centauri.rows({name: cluster_preset(name) for name in ("centauri_a", "centauri_b")}):
        low, high = row.published if isinstance(row.published, tuple) else (row.published, row.published)
        nearest = min(max(row.simulated, low), high)
        section, _, what = row.figure.partition(": ")
        yield Row(
            paper="Centauri",
            figure=section,
            what=what,
            unit="",
            published=row.published,
            simulated=row.simulated,
            distance=row.simulated / nearest - 1 if nearest else row.simulated,
            fits=row.fits,
            note=row.note,
        )


def oases_rows(comparison: Comparison) -> Iterator[Row]:
    """Oases' ablation (table V), its published strategies under our costs, and the gain of its schedules."""
    for cell in comparison.ablation:
        yield number(
            "Oases",
            "table V",
            f"{cell.model}: {cell.method}",
            unit="ktokens/s",
            published=cell.published,
            simulated=cell.simulated,
            tolerance=RATE_TOLERANCE,
            note=_OASES_NOTES.get(cell.model, "") if abs(cell.relative_error) > RATE_TOLERANCE else "",
        )
    for model in dict.fromkeys(cell.model for cell in comparison.ablation):
        rates = {c.method: c.simulated for c in comparison.ablation if c.model == model}
        rising = [rates[method] for method in METHODS]
        yield claim(
            "Oases",
            "table V",
            f"{model}: every part of the ablation adds to the one before",
            unit="ktokens/s",
            simulated=(rising[0], rising[-1]),
            fits=all(a <= b for a, b in pairwise(rising)),
            note=", ".join(f"{method} {rates[method]:.1f}" for method in METHODS),
        )
    yield from _strategy_rows(comparison)


_OASES_NOTES: Final[Mapping[str, str]] = {
    "BERT-1.3B": "the public profile times every group's collective on all 32 ranks, but groups of 4 stay in "
    "a node; small degrees, which have no or little collective in equation 5, win too much",
    "LLaMA-65B": "hidden 8192 is extrapolated from 4096, and computation costs no more beside a collective",
}


def _strategy_rows(comparison: Comparison) -> Iterator[Row]:
    """Table II: the planner's strategy is not slower than one degree for all, by equation 5."""
    for model in dict.fromkeys(row.model for row in comparison.strategies):
        known = {row.origin: row for row in comparison.strategies if row.model == model}
        published, single = known.get("published (table II)"), known["without planner (table III)"]
        if published is None:
            continue
        ours = known["planned, degrees of table II"]
        yield claim(
            "Oases",
            "table II",
            f"{model}: our plan over the published one, same degrees (not slower)",
            unit="%",
            simulated=100 * (published.cost_ns / ours.cost_ns - 1),
            fits=ours.cost_ns <= published.cost_ns,
            note=f"ours {describe_degrees(ours.degrees)}, published {describe_degrees(published.degrees)}; "
            f"over {describe_degrees(single.degrees)}: {single.cost_ns / ours.cost_ns - 1:+.0%} and "
            f"{single.cost_ns / published.cost_ns - 1:+.0%}",
        )


# -- printing ------------------------------------------------------------------------------------------------


def show(console: Console, report: PapersReport) -> None:
    """Print a table per paper, then how many rows fit."""
    for paper, group in groupby(report.rows, key=lambda row: row.paper):
        rows = list(group)
        judged = [row for row in rows if row.fits is not None]
        table = Table(title=f"{paper}: {_count(judged)} fit", title_justify="left", box=box.SIMPLE_HEAD)
        table.add_column("where", max_width=14)
        table.add_column("what", ratio=1)
        for name in ("published", "simulated", "off"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("fits", justify="center")
        for row in rows:
            _add(table, row)
        console.print(table)
    for text in report.left_out:
        console.print(f"[yellow]left out[/] {escape(text)}")
    console.print(f"[bold]{report.summary}[/]")


def _add(table: Table, row: Row) -> None:
    """A row; what does not fit in red, with its reason."""
    mark = {True: "yes", False: "[red]no[/]", None: "-"}[row.fits]
    style = "red" if row.fits is False else None
    what = escape(row.what)
    if row.note and row.fits is not True:
        what += f"\n[dim]{escape(row.note)}[/]"
    published = "" if row.published is None else figure_text(row.published, row.unit)
    table.add_row(
        row.figure, what, published, figure_text(row.simulated, row.unit), _off(row), mark, style=style
    )


def figure_text(figure: Figure, unit: str) -> str:
    """A number or a range with three significant digits and its unit."""
    values = figure if isinstance(figure, tuple) else (figure,)
    return f"{' to '.join(map(_short, values))} {unit}".rstrip()


def _short(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 3)}f}"


def _off(row: Row) -> str:
    """How far outside: percentage points, or a share of the published figure."""
    if row.published is None:
        return ""
    if row.distance == 0:
        return "0"
    return f"{row.distance:.1f} points" if row.unit == "%" else f"{row.distance:+.1%}"


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", type=Path, help="the public RTX 3090 profile (CSV), for Oases' rows")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    chosen = parser.parse_args()
    says = Console(stderr=True)
    result = run(chosen.profile, says.print)
    if chosen.json:
        print(json.dumps(result.as_json()))
    else:
        show(Console(), result)


if __name__ == "__main__":
    main()
