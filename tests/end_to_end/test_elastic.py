"""Nodes leave a Ray cluster while a run trains: the run follows, with the curve of a fixed one.

Nodes that join, and are lost without a word: `test_drill`.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from braid.actors.config import load_config
from braid.actors.controller.group import NoRoomError, WorkerError
from braid.actors.controller.json_lines import read_lines
from braid.actors.stage.rank import Rank
from tests.end_to_end.clusters import headed_cluster
from tests.end_to_end.command import braid, environment, write_config, write_corpus

STEPS = 100_000
"""So many that every change is worth its cost; the test ends the run when it has seen all of them."""
SECTIONS: dict[str, Any] = {
    "train": {"steps": STEPS, "global_batch": 12, "micro_batch": 1, "deterministic_reduction": True},
    "parallel": {"dp": 2, "zero": 3},
    "checkpoint": {"every": 5},
    "telemetry": {"page": False, "progress": False},
}
QUICK = {
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_initial_delay_ms": "1000",
}
"""Ray notices a lost node in seconds."""


pytestmark = pytest.mark.alone


@pytest.fixture
def nodes() -> Iterator[Any]:
    """A Ray cluster of nodes with one CPU each."""
    with headed_cluster(QUICK) as cluster:
        yield cluster


def drain(address: str, node: str) -> None:
    """Tell Ray that a node will be taken away."""
    why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
    command = ["drain-node", "--address", address, "--node-id", node, "--deadline-remaining-seconds", "60"]
    result = subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", *command, *why],
        env={**environment(), **QUICK},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.own_process
@pytest.mark.timeout(600)
def test_a_run_follows_its_nodes(tmp_path: Path, nodes: Any) -> None:
    write_corpus(tmp_path)
    elastic = {"max_ranks": 4, "settle_s": 4.0}
    # The test cluster listens on this machine's own address, and has no token.
    cluster = {"launcher": "ray", "placement_timeout_s": 5.0, "allow_unauthenticated": True}
    write_config(tmp_path, **SECTIONS, elastic=elastic, cluster=cluster)
    workers = [nodes.add_node(num_cpus=1) for _ in range(4)]
    options = ("--address", nodes.address, "--set", "parallel.dp=4")
    command = [sys.executable, "-m", "braid.jobs.cli", "train", "run.yaml", *options]
    output = (tmp_path / "output").open("w")
    process = subprocess.Popen(
        command, cwd=tmp_path, env={**environment(), **QUICK}, stdout=output, stderr=subprocess.STDOUT
    )
    run = tmp_path / "runs" / "run"

    def trained_on(ranks: int, steps: int = 10) -> bool:
        """Whether so many ranks have done so many steps, a checkpoint among them."""
        newest = read_lines(run / "metrics.jsonl")[-steps:]
        return len(newest) == steps and all(len(line["peak_bytes"]) == ranks for line in newest)

    def until(done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not done():
            assert process.poll() is None, (tmp_path / "output").read_text()
            assert time.monotonic() < deadline, (tmp_path / "output").read_text()
            time.sleep(0.1)

    try:
        until(lambda: trained_on(4))
        for left in (3, 2):
            drain(nodes.address, workers.pop().node_id)
            until(lambda left=left: trained_on(left))
        workers += [nodes.add_node(num_cpus=1) for _ in range(2)]
        until(lambda: trained_on(4))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130, (tmp_path / "output").read_text()
        incidents = read_lines(run / "incidents.jsonl")
        # Started again, where there are three nodes for the four ranks that are configured.
        drain(nodes.address, workers.pop().node_id)
        step = read_lines(run / "metrics.jsonl")[-1]["step"]
        again = (*options, "--resume", "--until", str(step + 10))
        outcome = braid(tmp_path, "train", "run.yaml", *again, timeout=200)
        assert outcome.code == 0, outcome.errors
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
    assert {(one["kind"], one["steps_lost"]) for one in incidents} == {("resized", 0)}
    changes = [one["ranks"] for one in incidents]
    # On a busy machine the two new nodes come further apart than the run waits for (settle_s).
    assert changes in ([[4, 3], [3, 2], [2, 4]], [[4, 3], [3, 2], [2, 3], [3, 4]])
    assert all(one["text"].startswith("a node is leaving") for one in incidents[:2])
    (last,) = read_lines(run / "incidents.jsonl")[len(incidents) :]
    assert last["text"].startswith("not all nodes are there: the layout asks for 4 ranks")
    assert (last["ranks"], last["steps_lost"]) == ([4, 3], 0)
    metrics = read_lines(run / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, len(metrics) + 1))
    assert {len(line["peak_bytes"]) for line in metrics} == {2, 3, 4}

    alone = ("--launcher", "processes", "--set", "name=fixed", "--set", "elastic={}")
    fixed = braid(tmp_path, "train", "run.yaml", *alone, "--until", str(len(metrics)), timeout=240)
    assert fixed.code == 0, fixed.errors
    theirs = read_lines(tmp_path / "runs" / "fixed" / "metrics.jsonl")
    assert [line["samples"] for line in metrics] == [line["samples"] for line in theirs]
    assert [line["loss"] for line in metrics] == [line["loss"] for line in theirs]  # bit for bit
    print(json.dumps(read_lines(run / "incidents.jsonl"), indent=1))


@pytest.mark.slow
@pytest.mark.own_process
@pytest.mark.timeout(120)
def test_a_place_that_is_lost_while_its_rank_starts(
    tmp_path: Path, nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank is started where Ray still sees a node that is gone: an error soon, no endless wait."""
    workers = [nodes.add_node(num_cpus=1) for _ in range(2)]
    import ray
    from ray.util.placement_group import PlacementGroup

    from braid.actors.controller.placement import RayLauncher

    ray.init(address=nodes.address, log_to_driver=False)
    try:
        cluster = {"launcher": "ray", "placement_timeout_s": 3.0, "cpus_per_rank": 1.0}
        launcher = RayLauncher(load_config(write_config(tmp_path, cluster=cluster), []))
        group = launcher.start(2)
        lost = workers.pop()
        rank = group.node_ids.index(lost.node_id)
        nodes.remove_node(lost, allow_graceful=False)
        with pytest.raises(WorkerError, match="its actor died"):
            [
                group.call(rank, Rank.process_id) for _ in range(100_000)
            ]  # it lives a little longer than its node
        assert group.interrupt(1) == [rank]
        while any(node["Alive"] and node["NodeID"] == lost.node_id for node in ray.nodes()):
            time.sleep(0.1)
        wait, answers = PlacementGroup.wait, iter([True])  # what Ray says before it knows
        monkeypatch.setattr(
            PlacementGroup, "wait", lambda self, seconds: next(answers, None) or wait(self, seconds)
        )
        with pytest.raises(NoRoomError, match=f"no room to start rank {rank}: its node is gone"):
            group.replace([rank])
        group.shutdown()
        while launcher.capacity(None) != (1, False):
            time.sleep(0.1)
    finally:
        ray.shutdown()
