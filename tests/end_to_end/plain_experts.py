"""A mixture of experts in plain PyTorch: every expert in turn, autograd, names as Braid's parameters."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from braid.jobs.bench.plain_torch import Layer, PlainModel, Projections
from braid.scheduling.model.shape import ModelShape


class Weight(nn.Module):
    """A matrix of every expert, E x outputs x inputs."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(sizes))


@dataclass
class Counted:
    """What one layer's router did since somebody looked."""

    visits: Tensor
    """Of every expert, E, int64."""
    dropped: int = 0
    balance: float = 0.0
    """Sums of the auxiliary losses over tokens."""
    z: float = 0.0


class ExpertLayer(Layer):
    """A layer whose MLP is a mixture.

    ``groups``: places of the micro-batch's flattened tokens on every rank, of which each has a capacity.
    """

    def __init__(self, shape: ModelShape, groups: Sequence[Tensor]) -> None:
        super().__init__(shape)
        del self.mlp_in, self.mlp_out
        self.shape, self.groups = shape, groups
        width, hidden, experts = shape.expert_width, shape.hidden, shape.experts
        self.router = nn.Linear(hidden, experts, bias=False)
        if shape.balance_rate:
            self.register_buffer("bias_E", torch.zeros(experts))
        self.experts = nn.ModuleDict(
            {
                "gate": Weight(experts, width, hidden),
                "up": Weight(experts, width, hidden),
                "down": Weight(experts, hidden, width),
            }
        )
        if shape.shared_experts:
            wide = width * shape.shared_experts
            self.shared_mlp_in = Projections(hidden, {"gate": wide, "up": wide}, bias=False)
            self.shared_mlp_out = nn.Linear(wide, hidden, bias=False)
        self.auxiliary = torch.zeros(())
        self.counted = Counted(torch.zeros(experts, dtype=torch.int64))

    def mlp(self, x_BSD: Tensor) -> Tensor:
        shape, x_TD = self.shape, x_BSD.flatten(0, 1)
        logits_TE = F.linear(x_TD, self.router.weight)
        bias_E = self.bias_E if shape.balance_rate else torch.zeros(())
        all_TE = logits_TE.softmax(-1)
        if shape.mixer_jitter:
            choice_Tk, gates_Tk = sparse_mixer(logits_TE, shape.mixer_jitter, shape.top_k)
        elif shape.softmax_after:
            choice_Tk = (logits_TE + bias_E).topk(shape.top_k, dim=-1).indices
            gates_Tk = logits_TE.gather(1, choice_Tk).softmax(-1)
        else:
            choice_Tk = (all_TE + bias_E).topk(shape.top_k, dim=-1).indices
            gates_Tk = all_TE.gather(1, choice_Tk)
            if shape.normalised:
                gates_Tk = gates_Tk / gates_Tk.sum(-1, keepdim=True)
        visited_TE = F.one_hot(choice_Tk, shape.experts).sum(1)
        load_E = visited_TE.sum(0) / choice_Tk.numel()
        balance = shape.balance_loss * shape.experts * (all_TE * load_E).sum()
        z = shape.z_loss * logits_TE.logsumexp(-1).square().sum()
        self.auxiliary = balance + z
        taken_Tk = torch.ones_like(choice_Tk, dtype=torch.bool)
        if shape.capacity_factor:
            for group in self.groups:
                room = [shape.capacity(len(group))] * shape.experts
                for token in group.tolist():
                    for place, expert in enumerate(choice_Tk[token].tolist()):
                        taken_Tk[token, place] = room[expert] > 0
                        room[expert] -= 1
        self.counted.visits += torch.bincount(choice_Tk.flatten(), minlength=shape.experts)
        self.counted.dropped += int((~taken_Tk).sum())
        self.counted.balance += float(balance.detach())
        self.counted.z += float(z.detach())
        y_TD = torch.zeros_like(x_TD)
        for expert in range(shape.experts):
            gate, up, down = (self.experts[name].weight[expert] for name in ("gate", "up", "down"))
            tokens, places = torch.nonzero((choice_Tk == expert) & taken_Tk, as_tuple=True)
            x_nD = x_TD[tokens]
            made_nD = (F.silu(x_nD @ gate.T) * (x_nD @ up.T)) @ down.T
            y_TD = y_TD.index_add(0, tokens, made_nD * gates_Tk[tokens, places].unsqueeze(-1))
        if shape.shared_experts:
            gate_TF, up_TF = self.shared_mlp_in(x_TD)
            y_TD = y_TD + self.shared_mlp_out(F.silu(gate_TF) * up_TF)
        return y_TD.view(x_BSD.shape)


def sparse_mixer(logits_TE: Tensor, jitter: float, top_k: int) -> tuple[Tensor, Tensor]:
    """Choices and gates, token by token and choice by choice."""
    choices, gates = [], []
    for row in logits_TE.unbind():
        left = list(range(len(row)))
        for _ in range(top_k):
            best = max(left, key=lambda expert, row=row: row[expert].item())
            near = [e for e in left if (row[best] - row[e]) <= 2 * jitter * max(row[e].abs(), row[best])]
            choices.append(best)
            gates.append(row[near].softmax(-1)[near.index(best)])
            left.remove(best)
    return torch.tensor(choices).view(-1, top_k), torch.stack(gates).view(-1, top_k)


class ExpertModel(PlainModel):
    """With the gradients of the auxiliary losses, whose values are no part of the loss."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, groups: Sequence[Tensor]) -> None:
        def layer(number: int) -> Layer:
            return ExpertLayer(shape, groups) if shape.kinds[number] == "layer" else Layer(shape)

        super().__init__(shape, dtype, layer=layer)

    @property
    def mixtures(self) -> list[ExpertLayer]:
        return [layer for layer in self.layers.values() if isinstance(layer, ExpertLayer)]

    def take_counted(self) -> list[Counted]:
        """Of every mixture since the last time; a bias that balances is moved by that."""
        found = [layer.counted for layer in self.mixtures]
        for layer in self.mixtures:
            if rate := layer.shape.balance_rate:
                visits_E = layer.counted.visits
                layer.bias_E += rate * (visits_E.sum() / len(visits_E) - visits_E).sign()
            layer.counted = Counted(torch.zeros_like(layer.counted.visits))
        return found

    def loss_sum(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        loss = super().loss_sum(tokens_BS, targets_BS)
        more = sum(layer.auxiliary for layer in self.mixtures)
        return loss + (more - more.detach())
