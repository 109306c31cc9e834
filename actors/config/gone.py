"""Keys that a configuration no longer has, and what stands in their place."""

from collections.abc import Mapping
from typing import Final

GONE: Final[Mapping[str, str]] = {
    "model.route_evenly": "leave it out; `braid bench overlap --route-evenly` measures under a balanced load",
    "train.bucket_mb": "leave it out; gradient buckets hold 25 MiB",
    "parallel.late_layers": "leave it out; where memory is short, raise parallel.zero or set train.recompute",
    "parallel.end_degrees": "leave it out; embedding and head are cut over parallel.tp ranks",
    "overlap.expert_imbalance": "leave it out; profiles have the rows of the run's first step",
    "cluster.nccl.tp.min_ctas": "leave it out; NCCL decides, within cluster.nccl.tp.max_ctas",
    "cluster.nccl.pp.min_ctas": "leave it out; NCCL decides, within cluster.nccl.pp.max_ctas",
    "cluster.nccl.dp.min_ctas": "leave it out; NCCL decides, within cluster.nccl.dp.max_ctas",
    "checkpoint.copies_wait": "leave it out; a copy travels while the next step runs",
    "failure.refill_steps": "leave it out; 100 new steps give one of failure.max_restarts back",
    "failure.max_tries": "leave it out; a recovery is tried 5 times",
    "failure.backoff_s": "leave it out; the second try waits a second, each further one twice as long",
}
"""By key: what to do instead."""
