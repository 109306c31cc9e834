"""`braid bench overlap`: small cases for real, on two emulated hosts, and messages where it cannot run."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from braid.jobs.bench.overlap_case import LAYOUTS
from braid.jobs.drill.hosts import two_hosts
from tests.end_to_end.clusters import require_hosts, run_on
from tests.end_to_end.command import braid, start
from tests.in_process import Capture, called, refused
from tests.waiting import within

SMALL = ("--hidden", "64", "--layers", "1", "--tokens", "32", "--micro-batches", "4", "--rounds", "2")


pytestmark = [pytest.mark.alone, pytest.mark.slow]


def namespaces(maker: int) -> set[str]:
    """The network namespaces that a process has made."""
    return {path.name for path in Path("/run/netns").glob(f"braid-{maker:x}-*")}


def left_over() -> set[str]:
    """Network namespaces whose maker is gone."""
    names = {path.name for path in Path("/run/netns").glob("braid-*-[01]")}
    return {name for name in names if not Path(f"/proc/{int(name.split('-')[1], 16)}").exists()}


def benched(folder: Path, words: str) -> dict[str, Any]:
    outcome = braid(folder, "bench", "overlap", *SMALL, *words.split(), "--json", timeout=240)
    assert outcome.code == 0, outcome.errors
    return dict(json.loads(outcome.output))


def test_all_schedules_train_alike_and_leave_nothing(tmp_path: Path) -> None:
    """Also braid without one of Centauri's tiers."""
    require_hosts()
    result = benched(tmp_path, "--link-mbit 500 --without reorders")
    assert (result["link_mbit"], result["rounds"]) == (500, 2)
    rows = {row["schedule"]: row for row in result["rows"]}
    peer = rows.pop("torch_tp")
    assert [*rows] == [*LAYOUTS["tp2"].schedules, "braid, without reorders"]
    assert len({row["loss"] for row in rows.values()}) == 1, "all schedules train alike"
    for row in rows.values():
        assert 0 < row["alpha"] < 1
        assert 0 <= row["hidden_fraction"] <= 1
        assert min(row[name] for name in ("seconds_per_step", "activation_bytes", "predicted_seconds")) > 0
    assert rows["megatron"]["hidden_fraction"] < 0.05
    assert peer["seconds_per_step"] > 0
    assert peer["alpha"] is None
    assert not left_over()


def test_replicas_train_as_the_peers_do(tmp_path: Path) -> None:
    require_hosts()
    result = benched(tmp_path, "--layout dp2 --link-mbit 500 --schedules megatron")
    assert "4 micro-batches a replica, dp2" in result["model"]
    rows = {row["schedule"]: row for row in result["rows"]}
    assert set(rows) == {"megatron", "torch_ddp", "torch_fsdp2", "torch_fsdp2_kept"}
    serial = rows["megatron"]
    assert 0 < serial["alpha"] < 1
    assert serial["hidden_fraction"] < 0.05
    assert serial["predicted_seconds"] > 0
    tokens = 2 * 4 * 32  # of a step: replicas, micro-batches, tokens
    for row in rows.values():
        assert row["tokens_per_second"] * row["seconds_per_step"] == pytest.approx(tokens)
    losses = [row["loss"] for row in rows.values() if row is not serial]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4), "all peers train alike"
    assert losses[0] == pytest.approx(serial["loss"], rel=0.1), "with weights of their own"
    assert not left_over()


def test_a_bench_that_is_ended_removes_its_hosts(tmp_path: Path) -> None:
    require_hosts()
    process = start(tmp_path, "bench", "overlap", *SMALL, "--link-mbit", "500")
    try:
        assert within(60, lambda: namespaces(process.pid) or process.poll() is not None)
        assert namespaces(process.pid)
        time.sleep(2.0)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert not namespaces(process.pid)


def test_hosts_of_a_dead_maker_are_removed() -> None:
    require_hosts()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    orphan = f"braid-{dead.pid:x}-0"
    subprocess.run(["ip", "netns", "add", orphan], check=True)
    with two_hosts():
        assert orphan not in namespaces(dead.pid)


def test_without_root_there_is_one_clear_message(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 65534)
    refused(called(capsys, "bench", "overlap", *SMALL), "run as root", "cluster.emulated_link_mbit")


@pytest.mark.parametrize("inside_mbit", [None, 100])
def test_a_link_that_slows_down_does_so_both_ways(inside_mbit: float | None) -> None:
    """What a run makes of that: `tests.end_to_end.test_drill`."""
    require_hosts()
    with two_hosts() as link:
        link.shape(100)
        link.shape(10, inside_mbit=inside_mbit)
        for host in link.hosts:
            rates = run_on(host, "tc", "qdisc", "show").stdout
            assert "rate 10Mbit" in rates
            assert ("rate 200Mbit" in rates) == (inside_mbit is not None)
