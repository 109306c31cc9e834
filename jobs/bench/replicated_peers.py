"""The ways a PyTorch user has today to train replicas of one model, each on its share of the global batch.

- ``torch_ddp``: ``DistributedDataParallel`` with its own bucket size: gradients are summed bucket by bucket
  behind the last micro-batch's backward pass, not at all before it (``no_sync``).
- ``torch_fsdp2``: ``fully_shard`` of every layer and of the rest: parameters are gathered for every forward
  and every backward pass; gradients, which every rank adds up whole, are scattered in the last one.
- ``torch_fsdp2_kept``: the same, with parameters that are kept from the first forward pass of a step to the
  last backward pass, so that they are gathered once.
- ``torch_ep``: ``torch_ddp`` of all parameters but those of experts, which are cut over ranks (`Mixture`).
- ``torch_cp``: ``torch_ddp`` of ranks that have parts of the same samples (`ContextLayer`).

Everything is public PyTorch over gloo, and all else as in `braid.jobs.bench.peers`, so that losses are
those of one process. Two things differ from GPUs: gloo's reduce-scatter moves twice the bytes, and there are
no streams beside which ``fully_shard`` gathers and scatters: on CPU it waits for each of its collectives.

Legend: as in `braid.jobs.bench.plain_torch`; R ranks. Experts: T tokens of a micro-batch, E experts, L
experts on this rank, k experts that a token visits, v visits of this rank's tokens, n visits to this rank's
experts, I inputs and O outputs of a matrix. Sequences: S tokens of both pieces of this rank, P of one piece,
A all tokens of a sample, X key-value heads of keys and of values.
"""

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from braid.jobs.bench.peers import DUALPIPEV, DUALPIPEV_THREADS, PIPELINE, TP, TP_PIPELINE, Peer
from braid.jobs.bench.plain_torch import Layer, PlainModel
from braid.scheduling.model.shape import ModelShape

DDP, FSDP2, FSDP2_KEPT, EP, CP = "torch_ddp", "torch_fsdp2", "torch_fsdp2_kept", "torch_ep", "torch_cp"


class DdpPeer(Peer):
    """``DistributedDataParallel``."""

    def _build(self, rank: int, world_size: int) -> None:
        self._rank, self._replicas = rank, world_size
        model = self._own_model()
        self.stages, self._model = {0: model}, model
        self._replicate(model)

    def _own_model(self) -> PlainModel:
        """The model as this rank has it."""
        return PlainModel(self.plan.shape)

    def _replicate(self, model: PlainModel) -> None:
        """Let a model train with the models of the other ranks."""
        # Its buffers, the rotary tables, are constants and need not be sent before every step. This is the
        # option's old name, as all versions of PyTorch that Braid allows know it.
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            self._model = DistributedDataParallel(
                model, gradient_as_bucket_view=True, broadcast_buffers=False
            )

    def _part(self, tokens_BS: Tensor) -> Tensor:
        return tokens_BS.chunk(self._replicas)[self._rank]

    def _passing(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self._model.no_sync()


class FsdpPeer(DdpPeer):
    """``fully_shard``."""

    def _replicate(self, model: PlainModel) -> None:
        self._keeps = self.plan.kind == FSDP2_KEPT
        mesh = init_device_mesh("cpu", (self._replicas,))  # of CPUs: else it would look for GPUs
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh, reshard_after_forward=not self._keeps)
        # Embedding and head; as the root it keeps them for the backward pass.
        self._root: FSDPModule = fully_shard(model, mesh=mesh)

    def _passing(self, last: bool) -> AbstractContextManager[None]:
        self._root.set_requires_gradient_sync(last)
        self._root.set_reshard_after_backward(last or not self._keeps)
        return nullcontext()


# -- experts that are cut over replicas ----------------------------------------------------------------------

OF_EXPERTS = ".experts."
"""Part of the names of what is not the same on all ranks."""


class ExpertLinear(nn.Module):
    """A linear map without bias for each of this rank's experts."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = inputs**-0.5  # as of nn.Linear
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs).uniform_(-bound, bound))

    def forward(self, x_nI: Tensor, ends_L: Tensor) -> Tensor:
        """Rows in the order of experts to outputs_nO; ``ends``: where each expert's rows end, int32."""
        return F.grouped_mm(x_nI, self.weight.transpose(1, 2), offs=ends_L)


class Mixture(Layer):
    """A layer with experts over all ranks of a group, and the router before them, in place of its MLP.

    As torchtitan writes it, over gloo. Rows are sorted by the expert that they visit, ranks tell each other
    how many come, ``all_to_all_single_autograd`` sends them (torchtitan's choice, though its module has an
    underscore), they are sorted by this rank's experts, go through three ``grouped_mm``, and all the way back
    to be weighed and summed. Nothing computes meanwhile, as there.

    A quick check on CPU (fp32, 4 experts on a rank, with freed memory kept) chose ``grouped_mm``, which took
    no longer than a loop over experts with matrices of their own, and less than one over parts of a common
    tensor; and ``index_select`` to sort rows, which took less than indices, ``embedding`` and ``gather``.
    """

    def __init__(self, shape: ModelShape, group: dist.ProcessGroup) -> None:
        super().__init__(shape)
        del self.mlp_in, self.mlp_out
        self.group, self.ranks = group, group.size()
        held, hidden, width = shape.experts // self.ranks, shape.hidden, shape.expert_width
        self.router = nn.Linear(hidden, shape.experts, bias=False)
        self.experts = nn.ModuleDict(
            {
                "gate": ExpertLinear(held, hidden, width),
                "up": ExpertLinear(held, hidden, width),
                "down": ExpertLinear(held, width, hidden),
            }
        )
        self.auxiliary = torch.zeros(())
        """Sum of the last micro-batch's auxiliary losses over its tokens."""

    def mlp(self, x_BSD: Tensor) -> Tensor:
        x_TD = x_BSD.flatten(0, 1)
        gates_Tk, choice_Tk, visits_E = self._route(x_TD)
        told_E = torch.empty_like(visits_E)
        dist.all_to_all_single(told_E, visits_E, group=self.group)
        visits_RL = told_E.view(self.ranks, -1)
        sends = visits_E.view(self.ranks, -1).sum(1).tolist()
        receives = visits_RL.sum(1).tolist()

        by_expert_v = choice_Tk.flatten().argsort(stable=True)
        x_vD = x_TD.index_select(0, by_expert_v // self.sizes.top_k)
        x_nD = all_to_all_single_autograd(x_vD, receives, sends, self.group)
        y_nD = self._visit(x_nD, visits_RL)
        y_vD = all_to_all_single_autograd(y_nD, sends, receives, self.group)
        y_TkD = y_vD.index_select(0, by_expert_v.argsort()).unflatten(0, choice_Tk.shape)
        return torch.bmm(gates_Tk.unsqueeze(1), y_TkD).view_as(x_BSD)

    def _route(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gates_Tk, the experts that they are of, and how many of these visits every expert gets."""
        sizes = self.sizes
        logits_TE = self.router(x_TD)
        shares_TE = logits_TE.softmax(-1)
        gates_Tk, choice_Tk = shares_TE.topk(sizes.top_k, dim=-1)
        if sizes.route_evenly:
            choice_Tk = torch.arange(choice_Tk.numel()).remainder(sizes.experts).view_as(choice_Tk)
            gates_Tk = shares_TE.gather(1, choice_Tk)
        if sizes.normalised:
            gates_Tk = gates_Tk / gates_Tk.sum(-1, keepdim=True)
        visits_E = torch.bincount(choice_Tk.flatten(), minlength=sizes.experts)
        self.auxiliary = torch.zeros(())
        if sizes.balance_loss:
            load_E = visits_E / choice_Tk.numel()
            self.auxiliary = sizes.balance_loss * sizes.experts * (shares_TE @ load_E).sum()
        if sizes.z_loss:
            squares_T = logits_TE.logsumexp(-1).square()
            self.auxiliary = self.auxiliary + sizes.z_loss * squares_T.sum()
        return gates_Tk, choice_Tk, visits_E

    def _visit(self, x_nD: Tensor, visits_RL: Tensor) -> Tensor:
        """What this rank's experts make of rows that are sorted by the rank that they are from."""
        held_RL = torch.arange(visits_RL.shape[1]).expand_as(visits_RL)
        by_expert_n = held_RL.flatten().repeat_interleave(visits_RL.flatten()).argsort(stable=True)
        ends_L = visits_RL.sum(0).cumsum(0).int()
        x_nD = x_nD.index_select(0, by_expert_n)
        gate, up, down = (self.experts[name] for name in ("gate", "up", "down"))
        y_nD = down(F.silu(gate(x_nD, ends_L)) * up(x_nD, ends_L), ends_L)
        return y_nD.index_select(0, by_expert_n.argsort())


class ExpertPeer(DdpPeer):
    """``DistributedDataParallel`` leaves experts alone, whose gradients are of all replicas' tokens already.

    Experts have a process group of their own, as they have a mesh in torchtitan.
    """

    def _own_model(self) -> PlainModel:
        group = dist.new_group()
        # Other experts on every rank; what else is drawn here is made the same by DistributedDataParallel.
        torch.manual_seed(self.train.seed + self._rank)
        return PlainModel(self.plan.shape, layer=lambda _: Mixture(self.plan.shape, group))

    def _replicate(self, model: PlainModel) -> None:
        named = dict(model.named_parameters())
        own = [name for name in named if OF_EXPERTS in name]
        self._own = [named.pop(name) for name in own]
        self._shared = list(named.values())
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
        super()._replicate(model)

    def load(self, named: Mapping[str, Tensor]) -> None:
        """As of `Peer`, experts as matrices_EOI of all of them, named as ``layers.3.experts.gate.weight``."""
        super().load(
            {
                name: value.chunk(self._replicas)[self._rank] if OF_EXPERTS in name else value
                for name, value in named.items()
            }
        )

    def parameters(self) -> dict[str, Tensor]:
        """As of `Peer`, with the experts of all ranks."""
        found = super().parameters()
        for name, value in found.items():
            if OF_EXPERTS in name:
                parts = [torch.empty_like(value) for _ in range(self._replicas)]
                dist.all_gather(parts, value)
                found[name] = torch.cat(parts)
        return found

    def _loss(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        layers: Any = self.stages[0].layers.values()
        auxiliary = torch.stack([layer.auxiliary for layer in layers]).sum()
        auxiliary = auxiliary / (self.train.global_batch * self.plan.shape.sequence)
        return super()._loss(logits_BSV, targets_BS) + (auxiliary - auxiliary.detach())

    def _passes(self, inputs_BS: Tensor, targets_BS: Tensor) -> Tensor:
        loss = super()._passes(inputs_BS, targets_BS)
        for parameter in self._own:
            # Losses were scaled for a mean over ranks, which experts' gradients are not subject to.
            assert parameter.grad is not None, "an expert that nobody visits has a gradient of zeros"
            parameter.grad /= self._replicas
        return loss

    def _clip(self, loss: Tensor) -> float:
        own, shared = (
            nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            for parameters in (self._own, self._shared)
        )
        square = own.square()
        dist.all_reduce(square)
        if self.train.clip_norm:
            norm = (square + shared.square()).sqrt()
            nn.utils.clip_grads_with_norm_([*self._own, *self._shared], self.train.clip_norm, norm)
        return loss.item()


# -- sequences that are cut over ranks -----------------------------------------------------------------------


class GatherPieces(torch.autograd.Function):
    """Both pieces of every rank, in the order of the sample; their gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x_BXSH: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return x_BXAH."""
        ctx.group = group
        x_BXSH = x_BXSH.contiguous()
        parts = [torch.empty_like(x_BXSH) for _ in range(group.size())]
        dist.all_gather(parts, x_BXSH, group=group)
        early, late = zip(*(part.chunk(2, dim=2) for part in parts), strict=True)
        return torch.cat((*early, *reversed(late)), dim=2)

    @staticmethod
    def backward(ctx: Any, d_BXAH: Tensor) -> tuple[Tensor, None]:
        """Return d_BXSH."""
        ranks = ctx.group.size()
        pieces = d_BXAH.chunk(2 * ranks, dim=2)
        pairs = zip(pieces[:ranks], reversed(pieces[ranks:]), strict=True)
        sent_RBXSH = torch.stack([torch.cat(pair, dim=2) for pair in pairs])
        found_RBXSH = torch.empty_like(sent_RBXSH)
        dist.all_to_all_single(found_RBXSH, sent_RBXSH, group=ctx.group)
        return found_RBXSH.sum(0), None


class ContextLayer(Layer):
    """A layer with causal attention of two pieces of a sample to all of it.

    PyTorch's own ``context_parallel`` (prototype, 2.13) has none on CPU: it replaces attention by rings of
    CUDA's kernels, and knows none of ``_scaled_dot_product_flash_attention_for_cpu``, whatever sends the
    messages. So this is what Llama 3 and Megatron do (Llama Team 2024, section 3.3.2; ``cp_comm_type:
    all_gather``), written in public PyTorch. Of two pieces for every rank, rank r has the r-th from the front
    and the r-th from the back. Keys and values of all are gathered before attention, their gradients
    scattered to where they are from, and nothing computes meanwhile.

    Each piece attends to all keys up to its end, in one call of ``scaled_dot_product_attention``: the first
    with ``is_causal``, others with a mask, as there is no other causal attention of fewer queries than keys
    on CPU (``causal_lower_right`` makes a mask there). Such a call computes half a square of a piece in vain.
    Gradients of keys and values go by an all-to-all and are summed where they arrive: half the bytes of
    gloo's reduce-scatter.
    """

    def __init__(self, shape: ModelShape, group: dist.ProcessGroup, mask_PA: Tensor) -> None:
        """``mask``: of the last piece."""
        super().__init__(shape)
        self.group, self.mask_PA = group, mask_PA

    def attend(self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Tensor | None) -> Tensor:
        x_BXAH = GatherPieces.apply(torch.cat((k_BKSH, v_BKSH), dim=1), self.group)
        k_BKAH, v_BKAH = x_BXAH.chunk(2, dim=1)
        first, ranks = self.group.rank(), self.group.size()
        found = []
        for index, q_BNPH in zip((first, 2 * ranks - 1 - first), q_BNSH.chunk(2, dim=2), strict=True):
            end = (index + 1) * q_BNPH.shape[2]
            k_BKEH, v_BKEH = k_BKAH[:, :, :end], v_BKAH[:, :, :end]
            found.append(super().attend(q_BNPH, k_BKEH, v_BKEH, self.mask_PA[:, -end:] if index else None))
        return torch.cat(found, dim=2)


class ContextPeer(DdpPeer):
    """``DistributedDataParallel`` over ranks that have pieces of the same samples."""

    def _own_model(self) -> PlainModel:
        shape, group = self.plan.shape, dist.new_group()
        pieces = torch.arange(shape.sequence).chunk(2 * self._replicas)
        self._places_S = torch.cat((pieces[self._rank], pieces[-1 - self._rank]))
        mask_PA = torch.where(pieces[-1][:, None] >= torch.arange(shape.sequence), 0.0, -torch.inf)
        return PlainModel(shape, layer=lambda _: ContextLayer(shape, group, mask_PA))

    def _replicate(self, model: PlainModel) -> None:
        super()._replicate(model)
        # Behind DistributedDataParallel, which makes buffers the same on all ranks when it is made.
        assert model.rotary is not None
        model.rotary.cos, model.rotary.sin = (
            table_AH[self._places_S] for table_AH in (model.rotary.cos, model.rotary.sin)
        )

    def _part(self, tokens_BS: Tensor) -> Tensor:
        return tokens_BS[:, self._places_S]


KINDS: Mapping[str, type[Peer]] = {
    **dict.fromkeys((TP, PIPELINE, TP_PIPELINE, DUALPIPEV, DUALPIPEV_THREADS), Peer),
    DDP: DdpPeer,
    **dict.fromkeys((FSDP2, FSDP2_KEPT), FsdpPeer),
    EP: ExpertPeer,
    CP: ContextPeer,
}
"""Kinds of peers, and what trains them."""
