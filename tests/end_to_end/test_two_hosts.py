"""A run that joins a Ray cluster of two nodes: one rank on each, gloo over the link between them."""

import json
import sys
from pathlib import Path

import pytest

from tests.end_to_end.command import write_config, write_corpus
from tests.end_to_end.hosts import ray_cluster, two_hosts


@pytest.mark.slow
def test_train_across_two_hosts(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    write_config(tmp_path, parallel={"tp": 2}, cluster={"launcher": "ray"})
    with two_hosts() as hosts, ray_cluster(hosts) as address:
        command = (sys.executable, "-m", "braid.jobs.cli", "train", "run.yaml", "--address", address)
        result = hosts[0].run(*command, timeout=120, cwd=tmp_path)
        assert result.returncode == 0, result.stdout + result.stderr
        before = {process for host in hosts for process in host.processes()}
    assert before, "the cluster itself must still be there after the run"
    run = tmp_path / "runs" / "run"
    cluster = json.loads((run / "cluster.json").read_text())
    assert {rank["address"] for rank in cluster["ranks"]} == {host.address for host in hosts}
    report = json.loads((run / "report.json").read_text())
    assert len(report["steps"]) == 4
    assert report["communication"]["seconds"] > 0
