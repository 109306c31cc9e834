"""A run that joins a Ray cluster of two nodes: one rank on each, gloo over the link between them."""

import json
import sys
from pathlib import Path

import pytest

from braid.jobs.drill.hosts import HostsError, check_hosts, ray_cluster, two_hosts
from tests.end_to_end.command import environment, write_config, write_corpus


def require_hosts() -> None:
    """Skip, and say why, where hosts cannot be made."""
    try:
        check_hosts()
    except HostsError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_train_across_two_hosts(tmp_path: Path) -> None:
    require_hosts()
    write_corpus(tmp_path)
    write_config(tmp_path, parallel={"tp": 2}, cluster={"launcher": "ray"})
    with two_hosts() as link, ray_cluster(link.hosts, environment()) as address:
        hosts = link.hosts
        command = (sys.executable, "-m", "braid.jobs.cli", "train", "run.yaml", "--address", address)
        refused = hosts[0].run(*command, timeout=60, cwd=tmp_path, env=environment())
        assert refused.returncode == 2, refused.stdout + refused.stderr
        for text in (address, "without a token", "RAY_AUTH_MODE=token", "cluster.allow_unauthenticated"):
            assert text in refused.stderr
        assert not (tmp_path / "runs").exists()
        command += ("--set", "cluster.allow_unauthenticated=true")
        result = hosts[0].run(*command, timeout=120, cwd=tmp_path, env=environment())
        assert result.returncode == 0, result.stdout + result.stderr
        assert f"warning: the Ray cluster at {address} takes orders without a token" in result.stderr
        before = {process for host in hosts for process in host.processes()}
    assert before, "the cluster itself must still be there after the run"
    run = tmp_path / "runs" / "run"
    cluster = json.loads((run / "cluster.json").read_text())
    assert {rank["address"] for rank in cluster["ranks"]} == {host.address for host in hosts}
    report = json.loads((run / "report.json").read_text())
    assert len(report["steps"]) == 4
    assert report["communication"]["seconds"] > 0
