"""The ways a PyTorch user has today to train replicas of one Llama, each on its share of the global batch.

- ``torch_ddp``: ``DistributedDataParallel`` with its own bucket size: gradients are summed bucket by bucket
  behind the last micro-batch's backward pass, not at all before it (``no_sync``).
- ``torch_fsdp2``: ``fully_shard`` of every layer and of the rest: parameters are gathered for every forward
  and every backward pass; gradients, which every rank adds up whole, are scattered in the last one.
- ``torch_fsdp2_kept``: the same, with parameters that are kept from the first forward pass of a step to the
  last backward pass, so that they are gathered once.

Everything is public PyTorch over gloo, and all else as in `braid.jobs.benchmarks.peers`, so that losses are
those of one process. Two things differ from GPUs: gloo's reduce-scatter moves twice the bytes, and there are
no streams beside which ``fully_shard`` gathers and scatters: on CPU it waits for each of its collectives.

Legend: as in `braid.jobs.benchmarks.peer_model`.
"""

import warnings
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from braid.jobs.benchmarks.peer_model import Stage
from braid.jobs.benchmarks.peers import Peer

DDP, FSDP2, FSDP2_KEPT = "torch_ddp", "torch_fsdp2", "torch_fsdp2_kept"


class ReplicatedPeer(Peer, ABC):
    """One of several ranks that all have the whole model, or a share of each of its parameters."""

    def _build(self, rank: int, world_size: int) -> None:
        self._rank, self._replicas = rank, world_size
        self.stages = {0: Stage(self.settings.sizes, 0, 1)}
        self._replicate(self.stages[0])

    def _part(self, tokens_BS: Tensor) -> Tensor:
        """What this rank computes of a global batch."""
        return tokens_BS.chunk(self._replicas)[self._rank]

    @abstractmethod
    def _replicate(self, model: Stage) -> None:
        """Let a model train with those of the other ranks."""

    @abstractmethod
    def _logits(self, tokens_BS: Tensor) -> Tensor:
        """Logits_BSV of the model, in the way that lets it communicate."""

    @abstractmethod
    def _passing(self, last: bool) -> AbstractContextManager[None]:
        """Surrounds both passes of a micro-batch; ``last``: they end with the gradients' mean over ranks."""

    def _passes(self, inputs_BS: Tensor, targets_BS: Tensor) -> list[Tensor]:
        """Both passes of this rank's micro-batches; the loss of all ranks."""
        inputs, targets = (
            self._part(tokens_BS).split(self.settings.micro_batch) for tokens_BS in (inputs_BS, targets_BS)
        )
        loss = torch.zeros(())
        for number, (window_BS, target_BS) in enumerate(zip(inputs, targets, strict=True), 1):
            with self._passing(last=number == len(inputs)):
                share = self._loss(self._logits(window_BS), target_BS)
                # A share of the mean over the global batch is to be added up; gradients will be averaged.
                (share * self._replicas).backward()
            loss += share.detach()
        dist.all_reduce(loss)
        return [loss]


class DdpPeer(ReplicatedPeer):
    """``DistributedDataParallel``."""

    def _replicate(self, model: Stage) -> None:
        # Its buffers, the rotary tables, are constants and need not be sent before every step. This is the
        # option's old name, as all versions of PyTorch that Braid allows know it.
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            self._model = DistributedDataParallel(
                model, gradient_as_bucket_view=True, broadcast_buffers=False
            )

    def _logits(self, tokens_BS: Tensor) -> Tensor:
        logits_BSV: Tensor = self._model(tokens_BS)
        return logits_BSV

    def _passing(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self._model.no_sync()


class FsdpPeer(ReplicatedPeer):
    """``fully_shard``."""

    def _replicate(self, model: Stage) -> None:
        self._keeps = self.settings.kind == FSDP2_KEPT
        mesh = init_device_mesh("cpu", (self._replicas,))  # of CPUs: else it would look for GPUs
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh, reshard_after_forward=not self._keeps)
        # Embedding and head; as the root it keeps them for the backward pass.
        self._root: FSDPModule = fully_shard(model, mesh=mesh)

    def _logits(self, tokens_BS: Tensor) -> Tensor:
        logits_BSV: Tensor = self.stages[0](tokens_BS)
        return logits_BSV

    def _passing(self, last: bool) -> AbstractContextManager[None]:
        self._root.set_requires_gradient_sync(last)
        self._root.set_reshard_after_backward(last or not self._keeps)
        return nullcontext()


REPLICATED: dict[str, type[ReplicatedPeer]] = {DDP: DdpPeer, FSDP2: FsdpPeer, FSDP2_KEPT: FsdpPeer}
"""Kinds of peers, and what trains them."""
