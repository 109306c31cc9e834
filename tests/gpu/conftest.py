"""The plugin of these tests: a test is a claim, its docstring the sentence, its outcome the verdict.

A test writes down the numbers that its verdict rests on, and tables, with the fixture `finding`; all of it
goes to the file ``--sheet``, of which `tests.gpu.__main__` makes the report.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.report import FAILED, NOT_MEASURED, PASSED, Claim, write_down

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
