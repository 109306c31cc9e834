"""Keys that a configuration no longer has, and what stands in their place."""

from collections.abc import Mapping
from typing import Final

GONE: Final[Mapping[str, str]] = {
    "model.route_evenly": "`braid bench overlap --route-evenly` measures under a balanced load",
    "train.bucket_mb": "gradient buckets hold 25 MiB",
    "parallel.late_layers": "where memory is short, raise parallel.zero or set train.recompute",
    "parallel.end_degrees": "embedding and head are cut over parallel.tp ranks",
    "overlap.expert_imbalance": "profiles have the rows of the run's first step",
    "cluster.nccl.tp.min_ctas": "NCCL decides, within cluster.nccl.tp.max_ctas",
    "cluster.nccl.pp.min_ctas": "NCCL decides, within cluster.nccl.pp.max_ctas",
    "cluster.nccl.dp.min_ctas": "NCCL decides, within cluster.nccl.dp.max_ctas",
    "checkpoint.copies_wait": "a copy travels while the next step runs",
    "failure.refill_steps": "100 new steps give one of failure.max_restarts back",
    "failure.max_tries": "a recovery is tried 5 times",
    "failure.backoff_s": "the second try waits a second, each further one twice as long",
}
"""By key."""
