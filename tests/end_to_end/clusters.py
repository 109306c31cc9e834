"""Hosts and Ray clusters of several nodes on this machine, for as long as tests last."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from braid.actors.config import ConfigError
from braid.jobs.cluster.guardian import MARK
from braid.jobs.cluster.session import WORKERS, environment, session_folder
from braid.jobs.drill.hosts import Host, check_hosts

JOB_PORT = 8265


def require_hosts() -> None:
    """Skip, and say why, where hosts cannot be made."""
    try:
        check_hosts()
    except ConfigError as error:
        pytest.skip(str(error))


@contextlib.contextmanager
def headed_cluster(settings: Mapping[str, str]) -> Iterator[Any]:
    """A cluster whose head runs no ranks; the test adds nodes. ``settings``: Ray's own, as variables."""
    with environment({"RAY_AUTH_MODE": "disabled", **WORKERS, **settings}):
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        try:
            yield cluster
        finally:
            cluster.shutdown()


def run_on(host: Host, *command: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a command on an emulated host; ``options``: of `subprocess.run`."""
    words = ["ip", "netns", "exec", host.namespace, *command]
    return subprocess.run(words, capture_output=True, text=True, **options)


@contextlib.contextmanager
def ray_on_hosts(hosts: Sequence[Host], env: Mapping[str, str], cpus: int) -> Iterator[None]:
    """A Ray cluster with a node on each of two hosts, its head and job server (`JOB_PORT`) on the first."""
    address, job_server = f"{hosts[0].address}:6379", f"--dashboard-host={hosts[0].address}"
    head = ["--head", "--port=6379", "--include-dashboard=true", job_server, f"--dashboard-port={JOB_PORT}"]
    with session_folder() as folder:  # ends Ray's processes, which carry its mark
        for host, options in zip(hosts, (head, [f"--address={address}"]), strict=True):
            options += [f"--temp-dir={folder}/{host.address[-1]}", f"--node-ip-address={host.address}"]
            options += [f"--num-cpus={cpus}", "--disable-usage-stats"]
            start = (sys.executable, "-m", "ray.scripts.scripts", "start", *options)
            result = run_on(host, *start, timeout=120, env={**WORKERS, MARK: str(folder), **env})
            assert result.returncode == 0, result.stdout + result.stderr
        yield
