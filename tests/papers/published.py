"""What two papers published beside what the models here say.

Every row is computed when it is asked for. What does not fit is shown with the reason, as far as it is known.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from tests.papers.block_profile import read_block_profile
from tests.papers.dhelix import dhelix_rows
from tests.papers.dhelix_parts import part_rows
from tests.papers.oases import oases_rows
from tests.papers.rows import Figure, Row

WITHOUT_PROFILE: Final = (
    "Oases: its rows need a profile of measured block costs, the authors' CSV (--profile)"
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
    if profile is not None:
        progress("Oases: degrees")
        rows += oases_rows(profile)
    return PapersReport(rows=tuple(rows), left_out=() if profile is not None else (WITHOUT_PROFILE,))


# -- printing ------------------------------------------------------------------------------------------------


def show(report: PapersReport) -> Iterator[str]:
    """A line per row, with the reason of what does not fit, and how many rows fit."""
    for paper, rows in groupby(report.rows, key=lambda row: row.paper):
        yield f"\n{paper}"
        for row in rows:
            mark = {True: "fits", False: "DOES NOT FIT", None: "for information"}[row.fits]
            printed = "" if row.published is None else f"published {figure_text(row.published, row.unit)}, "
            found = f"{printed}simulated {figure_text(row.simulated, row.unit)}{_off(row)}"
            yield f"  {mark}: {row.figure}: {row.what}: {found}"
            if row.note and row.fits is not True:
                yield f"    {row.note}"
    yield from (f"left out: {text}" for text in report.left_out)
    yield report.summary


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
    if row.published is None or row.distance == 0:
        return ""
    return f", off {row.distance:.1f} points" if row.unit == "%" else f", off {row.distance:+.1%}"


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", type=Path, help="the public RTX 3090 profile (CSV), for Oases' rows")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    chosen = parser.parse_args()
    result = run(chosen.profile, lambda text: print(text, file=sys.stderr))
    print(json.dumps(result.as_json()) if chosen.json else "\n".join(show(result)))


if __name__ == "__main__":
    main()
