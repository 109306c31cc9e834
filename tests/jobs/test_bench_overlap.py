"""`braid bench overlap`: small cases for real, on two emulated hosts, and messages where it cannot run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from braid.jobs.benchmarks.hosts import HostsError, check_hosts, two_hosts
from tests.end_to_end.command import braid, environment

SMALL = ("--hidden", "64", "--layers", "1", "--tokens", "32", "--micro-batches", "4", "--rounds", "2")


def require_hosts() -> None:
    """Skip, and say why, where hosts cannot be made."""
    try:
        check_hosts()
    except HostsError as error:
        pytest.skip(str(error))


def namespaces() -> set[str]:
    """The network namespaces that are there."""
    return {path.name for path in Path("/run/netns").glob("braid-*")}


@pytest.mark.slow
@pytest.mark.parametrize("ray", [False, True], ids=["processes", "ray"])
def test_all_schedules_train_alike_and_leave_nothing(tmp_path: Path, ray: bool) -> None:
    require_hosts()
    before = namespaces()
    extra = ("--ray", "--schedules", "megatron,braid") if ray else ()
    outcome = braid(tmp_path, "bench", "overlap", *SMALL, "--link-mbit", "500", "--json", *extra, timeout=240)
    assert outcome.code == 0, outcome.errors
    result: dict[str, Any] = json.loads(outcome.output)
    assert result["link_mbit"] == 500
    assert result["rounds"] == 2
    rows = {row["schedule"]: row for row in result["rows"]}
    ours = {"megatron", "braid"} if ray else {"megatron", "intra_batch", "wavelet", "dhelix", "braid"}
    assert set(rows) == ours | (set() if ray else {"torch_tp"})
    assert len({rows[name]["loss"] for name in ours}) == 1, "all schedules train alike"
    for name in ours:
        row = rows[name]
        assert 0 < row["alpha"] < 1
        assert 0 <= row["hidden_fraction"] <= 1
        assert row["seconds_per_step"] > 0
        assert row["activation_bytes"] > 0
        assert row["predicted_seconds"] > 0
    assert rows["megatron"]["hidden_fraction"] < 0.05
    assert namespaces() == before


@pytest.mark.slow
def test_a_bench_that_is_ended_removes_its_hosts(tmp_path: Path) -> None:
    require_hosts()
    before = namespaces()
    process = subprocess.Popen(
        [sys.executable, "-m", "braid.jobs.cli", "bench", "overlap", *SMALL, "--link-mbit", "500"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while namespaces() == before and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.2)
        assert namespaces() != before
        time.sleep(2.0)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert namespaces() == before


def test_hosts_of_a_dead_maker_are_removed() -> None:
    require_hosts()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    orphan = f"braid-{dead.pid:x}-0"
    subprocess.run(["ip", "netns", "add", orphan], check=True)
    with two_hosts(100):
        assert orphan not in namespaces()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_without_root_there_is_one_clear_message(tmp_path: Path) -> None:
    outcome = subprocess.run(
        [sys.executable, "-m", "braid.jobs.cli", "bench", "overlap", *SMALL],
        cwd="/",
        env={**environment(), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        user=65534,
    )
    if "ModuleNotFoundError" in outcome.stderr or "Permission denied" in outcome.stderr:
        pytest.skip("others cannot read this environment")
    assert outcome.returncode == 2, outcome.stderr
    assert "need root" in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_wrong_options_name_what_would_be_right(tmp_path: Path) -> None:
    for words, message in (
        (("--layout", "tp3"), "--layout 'tp3' must be one of tp2, pp2, tp2pp2"),
        (("--alpha", "0.3", "--link-mbit", "100"), "--link-mbit and --alpha exclude each other"),
        (("--schedules", "megatron,bread"), "--schedules: 'bread' must be one of"),
    ):
        outcome = braid(tmp_path, "bench", "overlap", *words)
        assert outcome.code == 2, outcome.output
        assert message in outcome.errors
