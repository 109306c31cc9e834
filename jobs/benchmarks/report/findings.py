"""What a part of the report finds out: verdicts on claims, tables, and everything else as data.

A part writes line by line, so that one that is ended in the middle leaves what it has found.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

Number = float | int | str | bool | None

ON_CPU: Final = "times on a CPU mean nothing"
TOO_SMALL: Final = "with --quick everything is too small to be timed"


class Verdict(StrEnum):
    """On a claim."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A verdict on one claim, of one of the things that it is about."""

    claim: str
    """The sentence, one of `braid.jobs.benchmarks.report.claims`."""
    verdict: Verdict
    subject: str = ""
    """What it was looked into for: a schedule, a kernel; empty where there is one thing only."""
    why: str = ""
    numbers: Mapping[str, Number] = field(default_factory=dict)
    """What the verdict rests on, with units in the names."""


NOTHING: Final[Mapping[str, Number]] = {}


def found(
    claim: str, holds: bool, subject: str = "", why: str = "", *, numbers: Mapping[str, Number] = NOTHING
) -> Finding:
    """A claim that was looked into."""
    verdict = Verdict.PASSED if holds else Verdict.FAILED
    return Finding(claim=claim, verdict=verdict, subject=subject, why=why, numbers=numbers)


def not_measured(
    claim: str, why: str, subject: str = "", *, numbers: Mapping[str, Number] = NOTHING
) -> Finding:
    """A claim that could not be looked into."""
    return Finding(claim=claim, verdict=Verdict.NOT_MEASURED, subject=subject, why=why, numbers=numbers)


def timed(
    claim: str, holds: bool, no_clock: str, subject: str = "", *, numbers: Mapping[str, Number] = NOTHING
) -> Finding:
    """A claim about times; no verdict where there is a reason why times mean nothing (`Task.no_clock`)."""
    if no_clock:
        return not_measured(claim, no_clock, subject, numbers=numbers)
    return found(claim, holds, subject, numbers=numbers)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a part is told."""

    device: str
    quick: bool
    seed: int
    ends_at: float
    """When the part has to be over, by `time.time`; it is ended soon after."""

    @property
    def left_s(self) -> float:
        """Seconds until then."""
        return self.ends_at - time.time()

    @property
    def on_gpu(self) -> bool:
        """Whether it is measured on a GPU."""
        return self.device.startswith("cuda")

    @property
    def no_clock(self) -> str:
        """Why times mean nothing; empty where they do."""
        if not self.on_gpu:
            return ON_CPU
        return TOO_SMALL if self.quick else ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Lines for people, as the benchmarks print them."""

    title: str
    lines: Sequence[str]


class Sheet:
    """What a part has found so far, in a file: a JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def find(self, *findings: Finding) -> None:
        """Verdicts."""
        for one in findings:
            self._add("finding", asdict(one))

    def table(self, title: str, lines: Sequence[str]) -> None:
        """For people."""
        self._add("table", {"title": title, "lines": [*lines]})

    def data(self, name: str, value: Any) -> None:
        """Whatever JSON can hold."""
        self._add("data", {name: value})

    def end(self) -> None:
        """The part has done all that it could."""
        self._add("end", True)

    def _add(self, kind: str, value: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({kind: value}) + "\n")


@dataclass(kw_only=True)
class Written:
    """What stands on a sheet."""

    findings: list[Finding] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    ended: bool = False
    """Whether the part came to its end."""


def read_sheet(path: Path) -> Written:
    """All that a part wrote; of a line that was cut off when it was ended, nothing."""
    written = Written()
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            ((kind, value),) = json.loads(line).items()
        except ValueError:
            continue
        match kind:
            case "finding":
                written.findings.append(Finding(**{**value, "verdict": Verdict(value["verdict"])}))
            case "table":
                written.tables.append(Table(**value))
            case "data":
                written.data |= value
            case "end":
                written.ended = True
    return written
