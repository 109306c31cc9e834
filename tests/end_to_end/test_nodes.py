"""Runs on the nodes of a Ray cluster: their order, who may join, a node that is lost, one that leaves."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from braid.actors.config import load_config
from braid.actors.controller.ranks.group import NoRoomError, WorkerError, WorkerGroup
from braid.actors.controller.records.json_lines import read_lines
from braid.actors.controller.records.run_records import Started
from braid.actors.stage.rank.interface import Rank
from tests.end_to_end.clusters import headed_cluster
from tests.end_to_end.command import braid, environment, write_config, write_corpus
from tests.end_to_end.runs import small_config
from tests.end_to_end.test_topology import check_spans, run

pytestmark = [pytest.mark.slow, pytest.mark.own_process, pytest.mark.timeout(1200)]

NODES = 3
SCRAMBLED = (2, 0, 1, 0, 2, 1)
"""The node of every bundle."""
HEALTH = {"period_ms": 500, "timeout_ms": 1000, "failure_threshold": 3, "initial_delay_ms": 1000}
QUICK = {f"RAY_health_check_{name}": str(value) for name, value in HEALTH.items()}
"""Ray notices a lost node in seconds."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A Ray cluster of nodes with two CPUs each, which this process has joined; tests take nodes away."""
    with headed_cluster(QUICK) as cluster:
        import ray

        for number in range(NODES):
            cluster.add_node(num_cpus=2, resources={f"place{number}": 1.0}, wait=False)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False)
        try:
            yield cluster
        finally:
            ray.shutdown()


def alive() -> list[dict[str, Any]]:
    """Ray's nodes, without the head."""
    import ray

    return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]


def test_ranks_are_numbered_by_node_not_as_bundles_come(tmp_path: Path, data: Path, nodes: Any) -> None:
    """Tensor groups lie inside nodes."""
    from braid.actors.controller.ranks.placement import RayLauncher

    class Scrambled(RayLauncher):
        """Hands out bundles in an order of the test's."""

        group: WorkerGroup

        def _bundles(self, ranks: int, avoid: Sequence[str], stopped: Any) -> list[dict[str, float]]:
            bundles = super()._bundles(ranks, avoid, stopped)
            return [{**bundle, f"place{node}": 0.01} for bundle, node in zip(bundles, SCRAMBLED, strict=True)]

        def start(self, ranks: int, avoid: Sequence[str] = (), stopped: Any = None) -> WorkerGroup:
            self.group = super().start(ranks, avoid)
            return self.group

    config = small_config(
        tmp_path / "runs",
        parallel={"tp": 2, "dp": 3},
        train={"steps": 2, "global_batch": 6},
        cluster={"launcher": "ray", "cpus_per_rank": 1.0, "placement_timeout_s": 60.0},
    )
    launcher = Scrambled(config)
    events, traces = run(config, data, launcher)
    hosts = launcher.group.hosts
    assert len(set(hosts)) == NODES
    assert [hosts[rank] for rank in range(0, 6, 2)] == [hosts[rank] for rank in range(1, 6, 2)]
    assert not [note for event in events if isinstance(event, Started) for note in event.notes]
    check_spans(traces, config.layout().mesh, hosts)
    forecast = launcher.hosts(6)
    assert [forecast.index(host) for host in forecast] == [hosts.index(host) for host in hosts]


def test_a_place_that_is_lost_while_its_rank_starts(
    tmp_path: Path, nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank is started where Ray still sees a node that is gone: an error soon, no endless wait."""
    from ray.util.placement_group import PlacementGroup

    from braid.actors.controller.ranks.placement import RayLauncher

    cluster = {"launcher": "ray", "placement_timeout_s": 3.0, "cpus_per_rank": 2.0}
    launcher = RayLauncher(load_config(write_config(tmp_path, cluster=cluster), []))
    ranks = len(alive())
    group = launcher.start(ranks)
    (lost,) = (node for node in nodes.worker_nodes if node.node_id == group.node_ids[ranks - 1])
    nodes.remove_node(lost, allow_graceful=False)
    with pytest.raises(WorkerError, match="its actor died"):
        [group.call(ranks - 1, Rank.process_id) for _ in range(100_000)]  # a little longer than its node
    assert group.interrupt(1) == [ranks - 1]
    while len(alive()) == ranks:
        time.sleep(0.1)
    wait, answers = PlacementGroup.wait, iter([True])  # what Ray says before it knows
    monkeypatch.setattr(
        PlacementGroup, "wait", lambda self, seconds: next(answers, None) or wait(self, seconds)
    )
    with pytest.raises(NoRoomError, match=f"no room to start rank {ranks - 1}: its node is gone"):
        group.replace([ranks - 1])
    group.shutdown()
    while launcher.capacity(None) != (ranks - 1, False):
        time.sleep(0.1)


def test_a_run_follows_a_node_that_leaves(tmp_path: Path, nodes: Any) -> None:
    """With the curve of a run of two ranks, bit for bit. Nodes that join or are lost: `test_drill`.

    The cluster listens on this machine's own address, and has no token.
    """
    write_corpus(tmp_path)
    write_config(
        tmp_path,
        train={"steps": 100_000, "global_batch": 12, "micro_batch": 1, "deterministic_reduction": True},
        parallel={"dp": 3, "zero": 3},
        checkpoint={"every": 5},
        telemetry={"page": False, "progress": False},
        elastic={"max_ranks": 4, "settle_s": 4.0},
        cluster={"launcher": "ray", "placement_timeout_s": 5.0, "cpus_per_rank": 2},
    )
    there = ("--address", nodes.address)
    refused = braid(tmp_path, "train", "run.yaml", *there)
    assert refused.code == 2, refused.errors
    for text in (nodes.address, "without a token", "RAY_AUTH_MODE=token", "cluster.allow_unauthenticated"):
        assert text in refused.errors
    there = (*there, "--set", "cluster.allow_unauthenticated=true")
    assert not (tmp_path / "runs" / "run").exists()

    first, left = len(alive()), len(alive()) - 1
    there = (*there, "--set", f"parallel.dp={first}")
    output = (tmp_path / "output").open("w")
    process = subprocess.Popen(
        [sys.executable, "-m", "braid.jobs.cli", "train", "run.yaml", *there],
        cwd=tmp_path,
        env={**environment(), **QUICK},
        stdout=output,
        stderr=subprocess.STDOUT,
    )
    metrics = tmp_path / "runs" / "run" / "metrics.jsonl"

    def until(done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not done():
            assert process.poll() is None, (tmp_path / "output").read_text()
            assert time.monotonic() < deadline, (tmp_path / "output").read_text()
            time.sleep(0.1)

    def trained_on(ranks: int) -> bool:
        """Whether so many ranks have done ten steps, a checkpoint among them."""
        newest = read_lines(metrics)[-10:]
        return len(newest) == 10 and all(len(line["peak_bytes"]) == ranks for line in newest)

    try:
        until(lambda: trained_on(first))
        drain(nodes.address, alive()[0]["NodeID"])
        until(lambda: trained_on(left))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130, (tmp_path / "output").read_text()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
    shown = (tmp_path / "output").read_text()
    assert f"warning: the Ray cluster at {nodes.address} takes orders without a token" in shown
    (incident,) = read_lines(metrics.with_name("incidents.jsonl"))
    assert (incident["kind"], incident["ranks"], incident["steps_lost"]) == ("resized", [first, left], 0)
    assert incident["text"].startswith("a node is leaving")
    lines = read_lines(metrics)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))

    sections = ("name=fixed", "elastic={}", "parallel.dp=2", "cluster.cpus_per_rank=1")
    alone = ("--launcher", "processes", *(word for one in sections for word in ("--set", one)))
    fixed_run = braid(tmp_path, "train", "run.yaml", *alone, "--until", str(len(lines)), timeout=240)
    assert fixed_run.code == 0, fixed_run.errors
    theirs = read_lines(tmp_path / "runs" / "fixed" / "metrics.jsonl")
    assert [line["samples"] for line in lines] == [line["samples"] for line in theirs]
    assert [line["loss"] for line in lines] == [line["loss"] for line in theirs]


def drain(address: str, node: str) -> None:
    """Tell Ray that a node will be taken away."""
    why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
    what = ["drain-node", "--address", address, "--node-id", node, "--deadline-remaining-seconds", "60"]
    command = [sys.executable, "-m", "ray.scripts.scripts", *what, *why]
    environ = {**environment(), **QUICK}
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
