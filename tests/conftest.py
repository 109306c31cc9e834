"""Options, tiers and fixtures for all tests."""

import gc
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Tests never time, and the machine may be busy.
settings.register_profile("braid", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("braid")

# Tests make many objects; at each full collection Python would look at torch's hundreds of thousands, too.
gc.set_threshold(20_000, 10, 50)

# Drawn once for all processes that share the work, which must collect the same tests.
SEED = os.environ.setdefault("BRAID_TEST_SEED", str(random.SystemRandom().randrange(2**31)))

if not Path("/dev/nvidiactl").exists():
    # Triton decides when it is imported whether it interprets its kernels; without a GPU their tests need it.
    os.environ.setdefault("TRITON_INTERPRET", "1")


collect_ignore = ["gpu"]
"""Run with a plugin and settings of their own (`make gpu`)."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew")


def pytest_report_header() -> str:
    return f"BRAID_TEST_SEED={SEED}"


_THOROUGH = (
    "tests/papers/",
    *(f"tests/jobs/test_{name}" for name in ("bench_overlap", "bench_training", "peers")),
)
"""Beginnings of the names of tests that `make test` leaves out."""

_MATRICES = (
    "tests/actors/test_bytes_of_shares.py::",
    *(f"tests/end_to_end/test_{name}.py::" for name in ("exchange", "own_layer")),
    *(f"tests/scheduling/test_{name}.py::" for name in ("pipelines", "sharing")),
)
"""Tests whose cases are layouts, schedules, models and policies, each with each: of them `make test` runs the
first cases that have a word in their names which no case before has."""


def _mark_thorough(items: list[pytest.Item]) -> None:
    seen: set[tuple[str, str]] = set()
    for item in items:
        test, _, case = item.nodeid.partition("[")
        words = {(test, word) for word in re.findall(r"\w+", case)}
        repeats = bool(case) and words <= seen and item.nodeid.startswith(_MATRICES)
        if repeats or item.nodeid.startswith(_THOROUGH):
            item.add_marker(pytest.mark.thorough)
        seen |= words


@pytest.hookimpl(tryfirst=True)  # pytest-xdist's own reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deal tests out by file, as they share fixtures, or one by one where a file says so; long ones first.

    With a long one, or a file of many, at the end, one process would wait for the other.
    """
    _mark_thorough(items)
    for item in items:
        alone = item.get_closest_marker("alone") is not None
        item.add_marker(pytest.mark.xdist_group(item.nodeid if alone else item.nodeid.partition("::")[0]))
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    count = Counter(item.path for item in items)

    def place(item: pytest.Item) -> tuple[bool, bool, int, str]:
        alone = item.get_closest_marker("alone") is not None
        return not alone, item.path not in slow, -count[item.path], str(item.path)

    items.sort(key=place)


_OWN_PROCESS = "BRAID_TEST_IN_OWN_PROCESS"


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let the tests of a file that are marked so run in one process of their own, with their fixtures.

    Ray leaves threads and memory behind when it has been shut down in a process, and other tests of that
    process have crashed.
    """
    if item.get_closest_marker("own_process") is not None and _OWN_PROCESS not in os.environ:
        item.setup = lambda: None  # type: ignore[method-assign]
        item.runtest = lambda: _run_in_own_process(item)  # type: ignore[method-assign]


_told: dict[str, tuple[str, str]] = {}
"""What became of tests that ran in a process of their own: the outcome, and all that the process said."""


def _run_in_own_process(item: pytest.Item) -> None:
    test = _name(item)
    if test not in _told:
        names = [
            _name(one)
            for one in item.session.items
            if one.path == item.path and one.get_closest_marker("own_process") is not None
        ]
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_XDIST")}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *names],
            cwd=item.config.rootpath,
            env={**kept, _OWN_PROCESS: "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=900,
        )
        told = done.stdout + done.stderr
        outcomes = dict(re.findall(r"^(tests/\S+) (PASSED|SKIPPED|FAILED|ERROR)", told, flags=re.MULTILINE))
        # An error after the last test passed belongs to that test as well.
        torn = done.returncode != 0 and not {"FAILED", "ERROR"} & set(outcomes.values())
        _told.update((one, ("FAILED" if torn else outcomes.get(one, "FAILED"), told)) for one in names)
    outcome, told = _told[test]
    if outcome == "SKIPPED":
        pytest.skip("; ".join(re.findall(r"^SKIPPED \[\d+\] \S+: (.*)$", told, flags=re.MULTILINE)))
    if outcome != "PASSED":
        pytest.fail(told, pytrace=False)


def _name(item: pytest.Item) -> str:
    return item.nodeid.partition("@")[0]  # pytest-xdist appends the group


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some text as tokens, which no test changes."""
    from tests.end_to_end.runs import prepare_text

    return prepare_text(tmp_path_factory.mktemp("text"), 7, files=4)


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be written instead of compared."""
    return bool(request.config.getoption("--update-golden"))
