"""Options and fixtures for all tests."""

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

# Drawn once for all processes that share the work, which must collect the same tests.
SEED = os.environ.setdefault("BRAID_TEST_SEED", str(random.SystemRandom().randrange(2**31)))

if not Path("/dev/nvidiactl").exists():
    # Triton decides when it is imported whether it interprets its kernels; without a GPU their tests need it.
    os.environ.setdefault("TRITON_INTERPRET", "1")


collect_ignore = ["gpu"]
"""Run with a plugin and settings of their own (`make gpu`)."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files anew")
    parser.addoption(
        "--turns",
        type=int,
        default=1,
        help="of tests of many cases (_BY_TURNS), run one in so many, drawn anew",
    )


def pytest_report_header() -> str:
    return f"BRAID_TEST_SEED={SEED}"


_OF_BENCHMARKS = (
    "tests/papers/",
    *(f"tests/jobs/test_{name}" for name in ("bench_overlap", "bench_training", "peers", "expert_peers")),
)


_BY_TURNS = (
    *(
        f"tests/end_to_end/test_{name}.py"
        for name in (
            "context",
            "documents",
            "exchange",
            "experts",
            "layouts",
            "many_ranks",
            "mixed_degrees",
            "mixed_layers",
            "partitioned_runs",
            "reduce_dtype",
            "strands",
            "sub_batches",
        )
    ),
    *(f"tests/cuda/test_{name}.py" for name in ("graphs", "machine", "schedules", "standstills")),
    *(f"tests/scheduling/test_{name}.py" for name in ("memory", "pipelines", "sharing")),
    *(f"tests/actors/test_{name}.py" for name in ("bytes_of_shares", "partitions_executed")),
)
"""Files whose cases are layouts, schedules, models and policies, each with each."""


def _drawn(items: list[pytest.Item], config: pytest.Config) -> None:
    """Leave out what is not this run's turn; of every test at least one case stays."""
    turns, of = config.getoption("--turns"), dict[str, list[pytest.Item]]()
    for item in items:
        if hasattr(item, "callspec") and str(item.path.relative_to(config.rootpath)) in _BY_TURNS:
            of.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left = {
        item
        for cases in of.values()
        for item in random.Random(f"{SEED} {cases[0].nodeid}").sample(
            cases, len(cases) - -(-len(cases) // turns)
        )
    }
    config.hook.pytest_deselected(items=[*left])
    items[:] = [item for item in items if item not in left]


def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Deal tests out by file, as they share fixtures, or one by one where a file says so; long ones first.

    With a long one, or a file of many, at the end, one process would wait for the other.
    """
    _drawn(items, config)
    for item in items:
        alone = item.get_closest_marker("alone") is not None
        item.add_marker(pytest.mark.xdist_group(item.nodeid if alone else str(item.path)))
    for item in items:
        if str(item.path.relative_to(item.config.rootpath)).startswith(_OF_BENCHMARKS):
            item.add_marker(pytest.mark.benchmarks)
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    count = Counter(item.path for item in items)

    def place(item: pytest.Item) -> tuple[bool, bool, int, str]:
        alone = item.get_closest_marker("alone") is not None
        return not alone, item.path not in slow, -count[item.path], str(item.path)

    items.sort(key=place)


_OWN_PROCESS = "BRAID_TEST_IN_OWN_PROCESS"


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let tests that are marked so run in a process of their own, with their fixtures.

    Ray leaves threads and memory behind when it has been shut down in a process, and other tests of that
    process have crashed.
    """
    if item.get_closest_marker("own_process") is not None and _OWN_PROCESS not in os.environ:
        item.setup = lambda: None  # type: ignore[method-assign]
        item.runtest = lambda: _run_in_own_process(item)  # type: ignore[method-assign]


def _run_in_own_process(item: pytest.Item) -> None:
    test = item.nodeid.partition("@")[0]  # pytest-xdist appends the group
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_XDIST")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test],
        cwd=item.config.rootpath,
        env={**kept, _OWN_PROCESS: "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
    )
    told = done.stdout + done.stderr
    if skipped := re.search(r"^SKIPPED \[1\] \S+: (.*)$", told, flags=re.MULTILINE):
        pytest.skip(skipped[1])
    if done.returncode != 0:
        pytest.fail(told, pytrace=False)


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be written instead of compared."""
    return bool(request.config.getoption("--update-golden"))
