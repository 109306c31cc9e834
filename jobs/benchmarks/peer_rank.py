"""A rank of a peer in a process of its own, driven like a rank of Braid."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from braid.actors.config import Config
from braid.actors.stage.allocator import keep_freed_memory
from braid.actors.stage.data import TokenShards, sample_ids
from braid.actors.stage.messages import Rendezvous
from braid.actors.stage.network import Connections, bind_gloo
from braid.jobs.benchmarks.context_peers import CP, ContextPeer
from braid.jobs.benchmarks.expert_peers import EP, ExpertPeer
from braid.jobs.benchmarks.peers import Peer, PeerSettings
from braid.jobs.benchmarks.plain_torch import PlainSizes
from braid.jobs.benchmarks.replicated_peers import REPLICATED
from braid.scheduling.spec import ModelShape

SPECIAL: Mapping[str, type[Peer]] = {**REPLICATED, EP: ExpertPeer, CP: ContextPeer}
"""Kinds that `Peer` itself does not train."""


def peer_of(settings: PeerSettings, rank: int, world_size: int) -> Peer:
    """One rank of a peer of any kind."""
    return SPECIAL.get(settings.kind, Peer)(settings, rank, world_size)


@dataclass(frozen=True, kw_only=True)
class PeerPlan:
    """What the ranks of a peer are told."""

    kind: str
    messages: bool
    config: Config
    shape: ModelShape
    data: str


class PeerRank:
    """One rank of a public-torch peer; methods as those of `braid.actors.stage.worker.Worker`."""

    def __init__(self, rank: int, address: str) -> None:
        keep_freed_memory()  # as ranks of Braid do
        self.rank, self.address = rank, address
        self._store: dist.TCPStore | None = None

    def open_store(self, timeout_s: float) -> int:
        """On rank 0: host the rendezvous and return its port."""
        self._store = dist.TCPStore(
            self.address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
        return int(self._store.port)

    def setup(self, plan: PeerPlan, rendezvous: Rendezvous) -> None:
        """Join the group and build the peer."""
        config, train = plan.config, plan.config.train
        torch.set_num_threads(config.cluster.threads_per_rank)
        timeout = timedelta(seconds=config.cluster.group_timeout_s)
        bind_gloo(self.address)
        if self._store is None:
            self._store = dist.TCPStore(rendezvous.address, rendezvous.port, is_master=False, timeout=timeout)
        world = config.layout().ranks
        connections = Connections()
        dist.init_process_group("gloo", store=self._store, rank=self.rank, world_size=world, timeout=timeout)
        alike = ("micro_batch", "lr", "betas", "eps", "weight_decay", "clip_norm", "seed")
        settings = PeerSettings(
            kind=plan.kind,
            messages=plan.messages,
            sizes=PlainSizes.of(plan.shape),
            experts=plan.shape if plan.shape.experts else None,
            micro_batches=train.global_batch // train.micro_batch,
            **{name: getattr(train, name) for name in alike},
        )
        self._peer = peer_of(settings, self.rank, world)
        connections.made()
        if config.cluster.emulated_link_mbit is not None:
            connections.pace(config.cluster.emulated_link_mbit)
        self._data = TokenShards.open(Path(plan.data), "train", plan.shape.sequence)
        self._train = train

    def train_step(self, step: int) -> tuple[float, float, int]:
        """One optimizer step: seconds, mean loss, peak bytes of this process."""
        begin = time.perf_counter()
        batch = self._train.global_batch
        ids = sample_ids(self._train.seed, self._data.samples, step * batch, batch)
        tokens = torch.from_numpy(self._data.tokens_at(ids)).to(torch.int64)
        loss = self._peer.step(tokens)
        return time.perf_counter() - begin, loss, self._peer.peak_bytes()

    def process_id(self) -> int:
        """The operating system's id of this rank's process."""
        return os.getpid()

    def close(self) -> None:
        """Leave the group."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._store = None


def peer_rank(rank: int, address: str) -> PeerRank:
    """What a process of a peer serves."""
    return PeerRank(rank, address)
