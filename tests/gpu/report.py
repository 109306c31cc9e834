"""The report: what tests wrote down, as one page for people and as JSON."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

STAND_IN: Final = (
    "This is a stand-in on a CPU: it shows that the report can be made. Its times mean nothing; streams, "
    "CUDA graphs, NCCL, sanitizers and compiled kernels were not measured."
)
PASSED, FAILED, NOT_MEASURED = "passed", "failed", "not measured"


@dataclass(kw_only=True)
class Claim:
    """A verdict."""

    claim: str
    of: str
    """What it was looked into for: a schedule, a kernel; empty where there is one thing only."""
    verdict: str
    why: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)
    """What the verdict rests on."""
    tables: list[list[list[Any]]] = field(default_factory=list)
    """Rows, the first of them the head."""


def write_down(sheet: Path, claim: Claim) -> None:
    """Add a line to a file, so that a process that is ended leaves what it has found."""
    with sheet.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(claim)) + "\n")


def read(sheet: Path) -> Iterator[Claim]:
    """What was written down; a line that was cut off says nothing."""
    for line in sheet.read_text(encoding="utf-8").splitlines() if sheet.exists() else []:
        try:
            yield Claim(**json.loads(line))
        except ValueError:
            continue


def write_report(folder: Path, date: str, stand_in: str, claims: Sequence[Claim]) -> tuple[bool, str]:
    """Write ``report.md`` and ``report.json``; returns whether a claim failed, and a summary.

    ``stand_in``: what the report must not be taken for; empty for a real one.
    """
    failed = [one for one in claims if one.verdict == FAILED]
    counts = Counter(one.verdict for one in claims)
    counted = ", ".join(f"{counts[verdict]} {verdict}" for verdict in (PASSED, FAILED, NOT_MEASURED))
    verdict = FAILED if failed else PASSED
    content = {"date": date, "stand_in": stand_in, "verdict": verdict, "claims": [*map(asdict, claims)]}
    (folder / "report.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    page = [*[f"**{stand_in}**", ""] * bool(stand_in), "# Braid on this machine's GPUs", "", date, counted]
    rows, before = [["claim", "of", "verdict", "what it rests on"]], ""
    for one in claims:
        rests = [one.why, *(f"{name} {_cell(value)}" for name, value in one.numbers.items())]
        shown = one.verdict.upper() if one.verdict == FAILED else one.verdict
        rows.append(["" if one.claim == before else one.claim, one.of, shown, ", ".join(filter(None, rests))])
        before = one.claim
    for table in (rows, *(table for one in claims for table in one.tables)):
        lines = [f"| {' | '.join(map(_cell, row))} |" for row in table]
        page += ["", lines[0], f"|{' --- |' * len(table[0])}", *lines[1:]]
    (folder / "report.md").write_text("\n".join(page) + "\n", encoding="utf-8")
    told = [f"FAILED: {one.claim} {one.of} {one.why}" for one in failed]
    return bool(failed), "\n".join([*filter(None, [stand_in]), *told, counted])


def _cell(value: Any) -> str:
    shown = "-" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)
    return " ".join(shown.replace("|", "/").split())
