"""The way a PyTorch user has today to train a mixture of experts that are cut over replicas: ``torch_ep``.

The layer is as torchtitan writes it, over gloo. Rows are sorted by the expert that they visit, ranks tell
each other how many come, ``all_to_all_single_autograd`` sends them (torchtitan's choice, though its module
has an underscore), they are sorted by this rank's experts, go through three ``grouped_mm``, and all the way
back to be weighed and summed. Nothing computes meanwhile, as there. Experts have a process group of their
own, as they have a mesh there.

All other parameters are replicated by ``DistributedDataParallel``, as in
`braid.jobs.benchmarks.replicated_peers`. It leaves experts alone, whose gradients are of all replicas' tokens
already.

A quick check on CPU (fp32, 4 experts on a rank, with freed memory kept) chose ``grouped_mm``, which took no
longer than a loop over experts with matrices of their own, and less than one over parts of a common tensor;
and ``index_select`` to sort rows, which took less than indices, ``embedding`` and ``gather``.

Legend: T tokens of a micro-batch, D hidden, E experts, L of them on this rank, k experts that a token visits,
R ranks, v visits of this rank's tokens, n visits to this rank's experts, I inputs and O outputs of a matrix.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from braid.jobs.benchmarks.peer_model import Stage
from braid.jobs.benchmarks.replicated_peers import DdpPeer
from braid.scheduling.spec import ModelShape

EP = "torch_ep"
OF_EXPERTS = ".experts."
"""Part of the names of what is not the same on all ranks."""


class GroupedLinear(nn.Module):
    """A linear map without bias for each of this rank's experts."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = inputs**-0.5  # as of nn.Linear
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs).uniform_(-bound, bound))

    def forward(self, x_nI: Tensor, ends_L: Tensor) -> Tensor:
        """Rows in the order of experts to outputs_nO; ``ends``: where each expert's rows end, int32."""
        return F.grouped_mm(x_nI, self.weight.transpose(1, 2), offs=ends_L)


class Mixture(nn.Module):
    """Experts over all ranks, and the router before them; it has the place of a layer's MLP."""

    def __init__(self, sizes: ModelShape, group: dist.ProcessGroup) -> None:
        super().__init__()
        hidden = sizes.hidden
        self.sizes, self.group, self.ranks = sizes, group, group.size()
        held = sizes.experts // self.ranks
        self.router = nn.Linear(hidden, sizes.experts, bias=False)
        self.experts = nn.ModuleDict(
            {
                "gate": GroupedLinear(held, hidden, sizes.expert_width),
                "up": GroupedLinear(held, hidden, sizes.expert_width),
                "down": GroupedLinear(held, sizes.expert_width, hidden),
            }
        )
        self.auxiliary = torch.zeros(())
        """Sum of the last micro-batch's auxiliary losses over its tokens."""

    def forward(self, x_BSD: Tensor) -> Tensor:
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
    """``DistributedDataParallel`` of all but the experts."""

    def _replicate(self, model: Stage) -> None:
        experts = self.settings.experts
        assert experts is not None
        group = dist.new_group()
        # Other experts on every rank; what else is drawn here is made the same by DistributedDataParallel.
        torch.manual_seed(self.settings.seed + self._rank)
        self._mixtures = []
        for layer in model.layers.values():
            layer.mlp = Mixture(experts, group)
            self._mixtures.append(layer.mlp)
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
        auxiliary = torch.stack([mixture.auxiliary for mixture in self._mixtures]).sum()
        auxiliary = auxiliary / self.settings.tokens
        return super()._loss(logits_BSV, targets_BS) + (auxiliary - auxiliary.detach())

    def _passes(self, inputs_BS: Tensor, targets_BS: Tensor) -> list[Tensor]:
        losses = super()._passes(inputs_BS, targets_BS)
        for parameter in self._own:
            # Losses were scaled for a mean over ranks, which experts' gradients are not subject to.
            assert parameter.grad is not None, "an expert that nobody visits has a gradient of zeros"
            parameter.grad /= self._replicas
        return losses

    def _clip(self, loss: Tensor) -> float:
        own, shared = (
            nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            for parameters in (self._own, self._shared)
        )
        square = own.square()
        dist.all_reduce(square)
        if self.settings.clip_norm:
            norm = (square + shared.square()).sqrt()
            nn.utils.clip_grads_with_norm_([*self._own, *self._shared], self.settings.clip_norm, norm)
        return loss.item()
