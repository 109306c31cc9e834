"""A rank of a peer in a process of its own, driven like a rank of Braid."""

import math
import time
from pathlib import Path

import torch

from braid.actors.stage.data.token_files import TokenShards, sample_ids
from braid.actors.stage.measure.peak_memory import PeakMemory
from braid.actors.stage.rank.allocator import keep_freed_memory
from braid.actors.stage.rank.membership import Membership
from braid.actors.stage.rank.messages import Rendezvous, StepResult
from braid.jobs.bench.peers import PeerPlan
from braid.jobs.bench.replicated_peers import KINDS
from braid.scheduling.trace.spans import OverlapNumbers

_NOTHING_SEEN = OverlapNumbers(
    communication_ns=0,
    hidden_ns=0,
    slowdown_ns=None,
    launch_gap_ns=0,
    bubble_ns=0,
    compute_ns=0,
    links_together_ns=0,
)


class PeerRank:
    """One rank of a public-torch peer; methods as those of `braid.actors.stage.rank.worker.Worker`."""

    def __init__(self, rank: int, address: str) -> None:
        keep_freed_memory()  # as ranks of Braid do
        self.rank = rank
        self._membership = Membership(address)
        self._memory = PeakMemory(self._membership.device)

    def open_store(self, timeout_s: float) -> int:
        """On rank 0: host the rendezvous and return its port."""
        return self._membership.host_store(timeout_s)

    def setup(self, plan: PeerPlan, rendezvous: Rendezvous) -> None:
        """Join the group and build the peer."""
        cluster, ranks = plan.config.cluster, plan.config.layout().ranks
        torch.set_num_threads(cluster.threads_per_rank)
        self._membership.begin(cluster, self.rank, rendezvous)
        self._membership.join(cluster, rendezvous, self.rank, ranks)
        self._peer = KINDS[plan.kind](plan, self.rank, ranks)
        self._membership.connected(cluster.emulated_link_mbit)
        self._data = TokenShards.open(Path(plan.data), "train", plan.shape.sequence)
        self._train = plan.config.train

    def train_step(self, step: int) -> StepResult:
        """One optimizer step, of which no spans are recorded."""
        begin = time.perf_counter()
        batch = self._train.global_batch
        ids = sample_ids(self._train.seed, self._data.samples, step * batch, batch)
        tokens = torch.from_numpy(self._data.tokens_at(ids)).to(torch.int64)
        loss = self._peer.step(tokens)
        peak = self._memory.of_lifetime()
        return StepResult(
            loss_sum=loss * tokens[:, 1:].numel() if self.rank == 0 else 0.0,
            gradient_norm=math.nan,
            lr=self._train.lr,
            seconds=time.perf_counter() - begin,
            overlap=_NOTHING_SEEN,
            peak_bytes=peak,
            lifetime_peak_bytes=peak,
        )

    def close(self) -> None:
        """Leave the group."""
        self._membership.leave()
