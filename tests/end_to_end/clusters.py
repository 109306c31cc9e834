"""Hosts and Ray clusters of several nodes on this machine, for as long as tests last."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from braid.jobs.cluster.session import WORKERS, environment
from braid.jobs.drill.hosts import HostsError, check_hosts


def require_hosts() -> None:
    """Skip, and say why, where hosts cannot be made."""
    try:
        check_hosts()
    except HostsError as error:
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
