"""Ray clusters of several nodes on this machine, for as long as a test lasts."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from braid.jobs.session import WORKERS, environment


@contextlib.contextmanager
def headed_cluster(settings: Mapping[str, str] | None = None) -> Iterator[Any]:
    """A cluster whose head runs no ranks; the test adds nodes. ``settings``: Ray's own, as variables."""
    with environment({"RAY_AUTH_MODE": "disabled", **WORKERS, **(settings or {})}):
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        try:
            yield cluster
        finally:
            cluster.shutdown()
