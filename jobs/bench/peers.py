"""Trains one model on several ranks with public PyTorch over gloo, in all ways that users have today.

Some peers cut one model into pieces:

- ``torch_tp``: tensor + sequence parallel over all ranks, by DTensor and ``parallelize_module``.
- ``torch_1f1b``: a stage per rank, ``Schedule1F1B`` of ``torch.distributed.pipelining``.
- ``torch_dualpipev``: two stages per rank, placed as a V, ``ScheduleDualPipeV`` as shipped: it runs the
  forward and the backward half of its overlapped actions one after the other.
- ``torch_tp_1f1b``: ``torch_1f1b``, each stage on two ranks as in ``torch_tp``.

In other peers every rank has a replica, and a share of the global batch:

- ``torch_ddp``: ``DistributedDataParallel`` with its own bucket size: gradients are summed bucket by bucket
  behind the last micro-batch's backward pass, not at all before it (``no_sync``).
- ``torch_fsdp2``: ``fully_shard`` of every layer and of the rest: parameters are gathered for every forward
  and every backward pass; gradients, which every rank adds up whole, are scattered in the last one.
- ``torch_fsdp2_kept``: ``torch_fsdp2``, with parameters that are kept from the first forward pass of a step
  to the last backward pass, so that they are gathered once.

No public module distributes experts or sequences on a CPU, so layouts that cut these have no peer.

The tensor-parallel plan is that of torchtitan's Llama: norms sequence parallel, one all-gather before and
one reduce-scatter after each of attention and MLP, embedding sharded by rows, head by columns with the loss
on sharded logits. All else is as in the plain loop (`braid.jobs.bench.plain_torch`), at a constant learning
rate, so that losses equal those of one process. Two things differ from GPUs: gloo's reduce-scatter moves
twice the bytes, and ``fully_shard`` waits for each of its collectives, as a CPU has no streams.

Legend: as in `braid.jobs.bench.plain_torch`.
"""

import math
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleDualPipeV
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from braid.actors.config import Config
from braid.actors.stage.data.mixture import open_splits
from braid.actors.stage.measure.memory import PeakMemory
from braid.actors.stage.rank.allocator import keep_freed_memory
from braid.actors.stage.rank.membership import Membership
from braid.actors.stage.rank.messages import Rendezvous, StepResult
from braid.jobs.bench.plain_torch import PlainModel, adamw
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.trace.spans import OverlapNumbers

TP, PIPELINE, TP_PIPELINE, DUALPIPEV = CUT = ("torch_tp", "torch_1f1b", "torch_tp_1f1b", "torch_dualpipev")
DDP, FSDP2, FSDP2_KEPT = "torch_ddp", "torch_fsdp2", "torch_fsdp2_kept"
KINDS = (*CUT, DDP, FSDP2, FSDP2_KEPT)


@dataclass(frozen=True, kw_only=True)
class PeerPlan:
    """Plan that the ranks of a peer receive."""

    kind: str
    config: Config
    shape: ModelShape
    data: str = ""


class Peer:
    """One rank that trains the bench's model with public PyTorch (DDP, FSDP, DTensor, its pipelines) alone.
    The default process group must exist; the caller sets the number of threads."""

    def __init__(self, plan: PeerPlan, rank: int, ranks: int) -> None:
        """Build this rank's part of the model, with values drawn from ``train.seed``."""
        self.plan, self.train = plan, plan.config.train
        self.stages: dict[int, PlainModel] = {}
        self._model: Any = None
        """Model that maps tokens to logits; None if the pipeline does."""
        self._pipeline: Schedule1F1B | ScheduleDualPipeV | None = None
        self._replicas = 1
        self._share = slice(None)
        """This rank's samples of a global batch."""
        self._group: dist.ProcessGroup | None = None
        """Ranks whose losses and gradients are summed; None: all ranks."""
        torch.manual_seed(self.train.seed)
        (self._cut if plan.kind in CUT else self._replicate)(rank, ranks)
        self._optimizer = adamw((parameter for _, parameter in self.named()), self.train)

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters with names such as ``layers.3.qkv.q.weight``; sharded ones are
        DTensors."""
        for stage in self.stages.values():
            yield from stage.named_parameters()

    def _cut(self, rank: int, ranks: int) -> None:
        """Create this rank's pipeline stages, sharded over tensor-parallel ranks."""
        kind = self.plan.kind
        tensor = {TP: ranks, TP_PIPELINE: 2}.get(kind, 1)
        pipeline, position = ranks // tensor, rank // tensor
        numbers, count = [position], pipeline
        if kind == DUALPIPEV:
            numbers, count = [position, 2 * pipeline - 1 - position], 2 * pipeline
        self.stages = {n: PlainModel(self.plan.shape, stage=n, stages=count) for n in numbers}
        if tensor > 1:
            mesh = init_device_mesh("cpu", (pipeline, tensor), mesh_dim_names=("pipeline", "tensor"))
            self._group = mesh.get_group("pipeline")
            for stage in self.stages.values():
                _shard(stage, mesh["tensor"])
        if pipeline == 1:
            self._model = self.stages[0]
            return
        made: list[Any] = [
            PipelineStage(stage, n, count, torch.device("cpu"), group=self._group)
            for n, stage in self.stages.items()
        ]
        micro_batches = self.train.global_batch // self.train.micro_batch
        # The losses are shares of the global mean, so gradients need no scaling.
        if kind == DUALPIPEV:
            self._pipeline = ScheduleDualPipeV(made, micro_batches, self._loss, scale_grads=False)
        else:
            self._pipeline = Schedule1F1B(made[0], micro_batches, self._loss, scale_grads=False)

    def _replicate(self, rank: int, ranks: int) -> None:
        """Create this rank's replica and its data-parallel wrapper."""
        samples, self._replicas = self.train.global_batch // ranks, ranks
        self._share = slice(rank * samples, (rank + 1) * samples)
        model = PlainModel(self.plan.shape)
        self.stages, self._model = {0: model}, model
        if self.plan.kind != DDP:
            mesh = init_device_mesh("cpu", (ranks,))  # a mesh of CPUs: else it would look for GPUs
            for layer in model.layers.values():
                fully_shard(layer, mesh=mesh, reshard_after_forward=self.plan.kind == FSDP2)
            fully_shard(model, mesh=mesh)  # embedding and head, which the root keeps for the backward pass
            return
        # Buffers, the rotary tables, are constants and need not be sent before every step. This is the
        # option's old name, as all versions of PyTorch that Braid allows know it.
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            self._model = DistributedDataParallel(
                model, gradient_as_bucket_view=True, broadcast_buffers=False
            )

    def step(self, tokens_BS: Tensor) -> float:
        """Train on a whole global batch, samples x (sequence + 1) token ids, the same on all ranks.

        Return the mean cross-entropy over all tokens, in nats, the same on all ranks.
        """
        with parallel.loss_parallel() if self.plan.kind in (TP, TP_PIPELINE) else nullcontext():
            loss = self._passes(tokens_BS[:, :-1], tokens_BS[:, 1:])
        parameters = [parameter for _, parameter in self.named()]
        for parameter in parameters:
            # Gradients of norms are partial sums: sum them once here, not both in the norm and in the
            # optimizer.
            if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        square = (norm.full_tensor() if isinstance(norm, DTensor) else norm).square()
        # Replicas have summed their gradients; stages have different parameters.
        sums = torch.stack((square / self._replicas, loss))
        dist.all_reduce(sums, group=self._group)
        if self.train.clip_norm:
            nn.utils.clip_grads_with_norm_(parameters, self.train.clip_norm, sums[0].sqrt())
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return sums[1].item()

    def _passes(self, inputs_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Run forward and backward passes of all micro-batches; return this rank's part of the loss."""
        losses = [torch.zeros(())]
        if self._pipeline is not None:
            last = any(stage.head is not None for stage in self.stages.values())
            self._pipeline.step(
                *((inputs_BS,) if 0 in self.stages else ()),
                target=targets_BS if last else None,
                losses=losses if last else None,
                return_outputs=False,
            )
            return torch.stack(losses).detach().sum()
        windows, targets = (x[self._share].split(self.train.micro_batch) for x in (inputs_BS, targets_BS))
        for number, (window_BS, target_BS) in enumerate(zip(windows, targets, strict=True), 1):
            with self._passing(last=number == len(windows)):
                share = self._loss(self._model(window_BS), target_BS)
                # Shares of the mean over the global batch add up; multiply by replicas, as gradients will be
                # averaged.
                (share * self._replicas).backward()
            losses.append(share.detach())
        return torch.stack(losses).sum()

    def _passing(self, last: bool) -> AbstractContextManager[None]:
        """Return a context for both passes of a micro-batch; after the ``last``, gradients are averaged over
        replicas."""
        if isinstance(self._model, FSDPModule):
            self._model.set_requires_gradient_sync(last)
            self._model.set_reshard_after_backward(last or self.plan.kind == FSDP2)
        if isinstance(self._model, DistributedDataParallel) and not last:
            return self._model.no_sync()
        return nullcontext()

    def _loss(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        """Return a micro-batch's share of the global batch's mean loss."""
        total = F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten(), reduction="sum")
        share = total / (self.train.global_batch * self.plan.shape.sequence)
        return share.to_local() if isinstance(share, DTensor) else share


def _shard(stage: PlainModel, mesh: DeviceMesh) -> None:
    """Make a stage tensor and sequence parallel, in place. Activations between stages are sharded in S."""
    sequence, whole = Shard(1), Replicate()
    norm = parallel.SequenceParallel()
    gathered = parallel.PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(whole,))
    column, row = parallel.ColwiseParallel(), parallel.RowwiseParallel(output_layouts=sequence)
    layer: dict[str, parallel.ParallelStyle] = {
        **dict.fromkeys(("attention_norm", "mlp_norm"), norm),
        **dict.fromkeys(("qkv", "mlp_in"), gathered),
        **dict.fromkeys(("qkv.q", "qkv.k", "qkv.v", "mlp_in.gate", "mlp_in.up"), column),
        **dict.fromkeys(("projection", "mlp_out"), row),
    }
    plan = {f"layers.{number}.{name}": style for number in stage.layers for name, style in layer.items()}
    if stage.embedding is not None:
        plan["embedding"] = parallel.RowwiseParallel(input_layouts=whole, output_layouts=sequence)
    if stage.head is not None:
        logits = Shard(-1)
        plan["final_norm"] = norm
        plan["head"] = parallel.ColwiseParallel(
            input_layouts=sequence, output_layouts=logits, use_local_output=False
        )
    parallel.parallelize_module(stage, mesh, plan)


_TIMES = ("communication", "hidden", "launch_gap", "bubble", "compute", "links_together")
_NO_TIMES: dict[str, Any] = {f"{name}_ns": 0 for name in _TIMES}


class PeerRank:
    """Runs a peer's rank in a process of its own; has the methods of
    `braid.actors.stage.rank.worker.Worker`."""

    def __init__(self, rank: int, address: str) -> None:
        keep_freed_memory()  # Braid's ranks do the same
        self.rank = rank
        self._membership = Membership(address)
        self._memory = PeakMemory(self._membership.device)

    def open_store(self, timeout_s: float) -> int:
        """On rank 0, host the rendezvous and return its port."""
        return self._membership.host_store(timeout_s)

    def setup(self, plan: PeerPlan, rendezvous: Rendezvous) -> None:
        """Join the group and build the peer."""
        cluster, ranks = plan.config.cluster, plan.config.layout().ranks
        torch.set_num_threads(cluster.threads_per_rank)
        self._membership.begin(cluster, self.rank, rendezvous)
        self._membership.join(cluster, rendezvous, self.rank, ranks)
        self._peer = Peer(plan, self.rank, ranks)
        self._membership.connected(cluster.emulated_link_mbit)
        self._data, _ = open_splits(plan.data, plan.shape.sequence)

    def train_step(self, step: int) -> StepResult:
        """Run one optimizer step, without recording spans."""
        begin, train = time.perf_counter(), self._peer.train
        ids = self._data.order(train.seed, step * train.global_batch, train.global_batch)
        tokens = torch.from_numpy(self._data.tokens_at(ids)).to(torch.int64)
        loss = self._peer.step(tokens)
        peak = self._memory.of_lifetime()
        return StepResult(
            loss_sum=loss * tokens[:, 1:].numel() if self.rank == 0 else 0.0,
            gradient_norm=math.nan,
            lr=train.lr,
            seconds=time.perf_counter() - begin,
            overlap=OverlapNumbers(slowdown_ns=None, **_NO_TIMES),
            peak_bytes=peak,
            lifetime_peak_bytes=peak,
        )

    def close(self) -> None:
        """Leave the group."""
        self._membership.leave()
