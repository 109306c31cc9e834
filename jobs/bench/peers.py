"""The ways a PyTorch user has today to train one Llama on several ranks.

Nothing of Braid is in them, unless ``PeerPlan.messages`` asks for its exchange of messages on CPU.

- ``torch_tp``: tensor + sequence parallel over all ranks, by DTensor and ``parallelize_module``.
- ``torch_1f1b``: a stage per rank, ``Schedule1F1B`` of ``torch.distributed.pipelining``.
- ``torch_dualpipev``: two stages per rank, placed as a V, ``ScheduleDualPipeV`` as shipped: it runs the
  forward and the backward half of its overlapped actions one after the other.
- ``torch_dualpipev_threads``: the same with an overlap registered: the forward half runs in the calling
  thread, the backward half beside it in a second one.
- ``torch_tp_1f1b``: ``torch_1f1b``, each stage on two ranks as in ``torch_tp``.

Replicas, experts and parts of sequences: `braid.jobs.bench.replicated_peers`.

The tensor-parallel plan is that of torchtitan's Llama: norms sequence parallel, one all-gather before and one
reduce-scatter after each of attention and MLP, embedding sharded by rows, head by columns with the loss on
sharded logits: faster than gathering them but for vocabularies of a few hundred tokens, and lighter on the
network always. The rest is the plain loop's (`braid.jobs.bench.plain_torch`), at a constant learning
rate.

Legend: as in `braid.jobs.bench.plain_torch`.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleDualPipeV
from torch.distributed.pipelining.schedules import OVERLAP_F_B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, parallel
from torch.nn import functional as F

from braid.actors.config import Config
from braid.jobs.bench.peer_messages import MessageCollectives
from braid.jobs.bench.plain_torch import PlainModel, adamw
from braid.jobs.bench.threaded_overlap import ThreadedOverlap
from braid.scheduling.model.shape import ModelShape

TP, PIPELINE, TP_PIPELINE = "torch_tp", "torch_1f1b", "torch_tp_1f1b"
DUALPIPEV, DUALPIPEV_THREADS = "torch_dualpipev", "torch_dualpipev_threads"


@dataclass(frozen=True, kw_only=True)
class PeerPlan:
    """What the ranks of a peer are told."""

    kind: str
    config: Config
    shape: ModelShape
    """Its experts are only trained by kinds that cut experts; others have an MLP in every layer."""
    data: str = ""
    messages: bool = False
    """Collectives of tensor-parallel ranks are Braid's messages between pairs of ranks, not gloo's, whose
    reduce-scatter moves twice the bytes (`braid.jobs.bench.peer_messages`)."""


def shard(stage: PlainModel, mesh: DeviceMesh) -> None:
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


class Peer:
    """One rank of a peer. The default process group must exist; threads per rank are the caller's matter."""

    def __init__(self, plan: PeerPlan, rank: int, world_size: int) -> None:
        """Build this rank's part of the model, with values drawn from ``train.seed``; see `load`."""
        self.plan, self.train = plan, plan.config.train
        self.stages: dict[int, PlainModel] = {}
        self._is_sharded = False  # every stage, over tensor-parallel ranks
        self._group: dist.ProcessGroup | None = None  # the ranks with the other stages; None: all ranks
        self._replicas = 1
        self._schedule: Schedule1F1B | ScheduleDualPipeV | None = None
        torch.manual_seed(self.train.seed)
        self._build(rank, world_size)
        self._optimizer = adamw((parameter for _, parameter in self._named()), self.train)

    def _build(self, rank: int, world_size: int) -> None:
        """Make this rank's stages, and what lets them train with those of other ranks."""
        kind = self.plan.kind
        tensor = {TP: world_size, TP_PIPELINE: 2}.get(kind, 1)
        pipeline = world_size // tensor
        count = pipeline * (2 if kind in (DUALPIPEV, DUALPIPEV_THREADS) else 1)
        place = rank // tensor
        self.stages = {
            index: PlainModel(self.plan.shape, stage=index, stages=count)
            for index in ([place] if count == pipeline else [place, count - 1 - place])
        }
        self._is_first, self._is_last = 0 in self.stages, count - 1 in self.stages
        self._is_sharded = tensor > 1
        if self._is_sharded:
            mesh = init_device_mesh("cpu", (pipeline, tensor), mesh_dim_names=("pipeline", "tensor"))
            self._group = mesh.get_group("pipeline")
            if self.plan.messages:
                self._messages = MessageCollectives(mesh.get_group("tensor"))
            for stage in self.stages.values():
                shard(stage, mesh["tensor"])
        if pipeline > 1:
            self._schedule = self._pipelined(count)
        self._model: Any = self.stages.get(0)
        """What makes logits of tokens where there is no pipeline."""

    def _pipelined(self, count: int) -> Schedule1F1B | ScheduleDualPipeV:
        device, micro_batches = torch.device("cpu"), self.train.global_batch // self.train.micro_batch
        stages: list[Any] = [
            PipelineStage(stage, index, count, device, group=self._group)
            for index, stage in self.stages.items()
        ]
        # The losses are shares of the global mean, so gradients need no scaling.
        if len(stages) == 1:
            return Schedule1F1B(stages[0], micro_batches, self._loss, scale_grads=False)
        schedule = ScheduleDualPipeV(stages, micro_batches, self._loss, scale_grads=False)
        if self.plan.kind == DUALPIPEV_THREADS:
            schedule.register_custom_function(OVERLAP_F_B, ThreadedOverlap())
        return schedule

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        for stage in self.stages.values():
            yield from stage.named_parameters()

    @torch.no_grad()
    def load(self, named: Mapping[str, Tensor]) -> None:
        """Set this rank's parameters from the full ones, by names as ``layers.3.qkv.q.weight``."""
        for name, parameter in self._named():
            value = named[name]
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                value = distribute_tensor(value, mesh, placements, src_data_rank=None)
            parameter.copy_(value)

    def parameters(self) -> dict[str, Tensor]:
        """Copies of this rank's parameters, whole, by the names of `load`. All ranks call it together."""
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
            for name, value in self._named()
        }

    def step(self, tokens_BS: Tensor) -> float:
        """Train on a whole global batch, samples x (sequence + 1) token ids, the same on all ranks.

        Returns the mean cross-entropy over all tokens, in nats, the same on all ranks.
        """
        inputs_BS, targets_BS = tokens_BS[:, :-1], tokens_BS[:, 1:]
        with parallel.loss_parallel() if self._is_sharded else nullcontext():
            loss = self._clip(self._passes(inputs_BS, targets_BS))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss

    def _loss(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        """A micro-batch's share of the mean over the global batch."""
        total = F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten(), reduction="sum")
        share = total / (self.train.global_batch * self.plan.shape.sequence)
        return share.to_local() if isinstance(share, DTensor) else share

    def _part(self, tokens_BS: Tensor) -> Tensor:
        """What this rank computes of a global batch."""
        return tokens_BS

    def _passing(self, last: bool) -> AbstractContextManager[None]:
        """Surrounds both passes of a micro-batch; ``last``: they end with gradients' mean over replicas."""
        return nullcontext()

    def _passes(self, inputs_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Both passes of all micro-batches; returns the loss of all replicas, 0 but on the last stage."""
        if self._schedule is not None:
            losses = [torch.zeros(())]
            self._schedule.step(
                *((inputs_BS,) if self._is_first else ()),
                target=targets_BS if self._is_last else None,
                losses=losses if self._is_last else None,
                return_outputs=False,
            )
            return torch.stack(losses).detach().sum()
        inputs, targets = (
            self._part(tokens_BS).split(self.train.micro_batch) for tokens_BS in (inputs_BS, targets_BS)
        )
        loss = torch.zeros(())
        for number, (window_BS, target_BS) in enumerate(zip(inputs, targets, strict=True), 1):
            with self._passing(last=number == len(inputs)):
                share = self._loss(self._model(window_BS), target_BS)
                # A share of the mean over the global batch is to be added up; gradients will be averaged.
                (share * self._replicas).backward()
            loss += share.detach()
        if self._replicas > 1:
            dist.all_reduce(loss)
        return loss

    def _clip(self, loss: Tensor) -> float:
        """Clip by the norm of the gradients of all ranks; returns the sum of all stages' ``loss``."""
        parameters = [parameter for _, parameter in self._named()]
        for parameter in parameters:
            # Norms' gradients are partial sums: summed once here, not in the norm and in the optimizer again.
            if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        sums = torch.stack((norm.square(), loss))
        if self._schedule is not None:
            dist.all_reduce(sums, group=self._group)
        if self.train.clip_norm:
            nn.utils.clip_grads_with_norm_(parameters, self.train.clip_norm, sums[0].sqrt())
        return sums[1].item()
