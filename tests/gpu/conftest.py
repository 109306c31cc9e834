"""The plugin of these tests: a test is a claim, its docstring the sentence, its outcome the verdict.

A test writes down the numbers that its verdict rests on, and tables, with the fixture `finding`; all of it
goes to the file ``--sheet``, of which `tests.gpu.__main__` makes the report: a page for people, and JSON.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
import torch

STAND_IN: Final = (
    "This is a stand-in on a CPU: it shows that the report can be made. Its times mean nothing; streams, "
    "CUDA graphs, NCCL, sanitizers and compiled kernels were not measured."
)
PASSED, FAILED, NOT_MEASURED = "passed", "failed", "not measured"
_FINDING = pytest.StashKey["Finding"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    parser.addoption("--sheet", type=Path, help="file that takes what is found")


@dataclass(frozen=True)
class Lab:
    """Where it is measured, and at which sizes."""

    device: torch.device
    tiny: bool

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.on_gpu else torch.float32


@dataclass
class Finding:
    """What a test found out beside its verdict."""

    no_clock: str = ""
    """Why times mean nothing; empty where they do."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """What the verdict rests on, with units in the names."""
    tables: list[list[list[Any]]] = field(default_factory=list)
    """Rows for people, the first of them the head."""

    def timed(self, holds: bool, **numbers: Any) -> None:
        """A claim about times; it is not measured where times mean nothing."""
        self.numbers |= numbers
        if self.no_clock:
            pytest.skip(self.no_clock)
        assert holds, numbers


@pytest.fixture(scope="session")
def lab(request: pytest.FixtureRequest) -> Lab:
    device = torch.device(request.config.getoption("--device"))
    return Lab(device, tiny=device.type == "cpu")


@pytest.fixture
def finding(request: pytest.FixtureRequest, lab: Lab) -> Finding:
    no_clock = "" if lab.on_gpu else "times on a CPU mean nothing"
    return request.node.stash.setdefault(_FINDING, Finding(no_clock))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Function, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Write a test's verdict down: that of its call, or why it did not come to that."""
    outcome = yield
    report, sheet = outcome.get_result(), item.config.getoption("--sheet")
    if sheet is None or not (report.when == "call" or (report.when == "setup" and not report.passed)):
        return
    found = item.stash.get(_FINDING, Finding())
    error = call.excinfo.value if call.excinfo is not None else None
    claim = Claim(
        claim=" ".join((item.function.__doc__ or item.name).partition("\n\n")[0].split()),
        of=item.callspec.id if hasattr(item, "callspec") else "",
        verdict=PASSED if report.passed else NOT_MEASURED if report.skipped else FAILED,
        why="" if error is None else " ".join(str(error).split())[:300] or type(error).__name__,
        numbers=found.numbers,
        tables=found.tables,
    )
    write_down(sheet, claim)


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
        with suppress(ValueError):
            yield Claim(**json.loads(line))


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
