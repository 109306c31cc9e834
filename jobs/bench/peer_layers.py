"""Layers of peers that no public module offers on CPU: experts and sequences that are cut over ranks.

Legend: as in `braid.jobs.bench.plain_torch`; R ranks. Experts: T tokens of a micro-batch, E experts, L
experts on this rank, k experts that a token visits, v visits of this rank's tokens, n visits to this rank's
experts, I inputs and O outputs of a matrix. Sequences: S tokens of both pieces of this rank, P of one piece,
A all tokens of a sample, X key-value heads of keys and of values.
"""

from functools import cache

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional as F

from braid.jobs.bench.plain_torch import Layer
from braid.scheduling.model.shape import ModelShape

OF_EXPERTS = ".experts."
"""Part of the names of parameters that are not the same on all ranks."""


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
        self.group = group
        held, hidden, width = shape.experts // group.size(), shape.hidden, shape.expert_width
        self.router = nn.Linear(hidden, shape.experts, bias=False)
        sizes = {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}
        self.experts = nn.ModuleDict({name: ExpertLinear(held, *each) for name, each in sizes.items()})
        self.auxiliary = torch.zeros(())
        """Sum of the last micro-batch's auxiliary losses over its tokens."""

    def mlp(self, x_BSD: Tensor) -> Tensor:
        x_TD = x_BSD.flatten(0, 1)
        gates_Tk, choice_Tk, visits_E = self._route(x_TD)
        told_E = torch.empty_like(visits_E)
        dist.all_to_all_single(told_E, visits_E, group=self.group)
        visits_RL = told_E.view(self.group.size(), -1)
        sends = visits_E.view_as(visits_RL).sum(1).tolist()
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
        choice_Tk = shares_TE.topk(sizes.top_k, dim=-1).indices
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


class ContextLayer(Layer):
    """A layer with causal attention of two pieces of a sample to all of it.

    PyTorch's own ``context_parallel`` (prototype, 2.13) has none on CPU: it replaces attention by rings of
    CUDA's kernels, and knows none of ``_scaled_dot_product_flash_attention_for_cpu``, whatever sends the
    messages. So this is what Llama 3 and Megatron do (Llama Team 2024, section 3.3.2; ``cp_comm_type:
    all_gather``), written in public PyTorch. Of two pieces for every rank, rank r has the r-th from the front
    and the r-th from the back. Keys and values of all are gathered before attention, their gradients sent
    back to where they are from, and nothing computes meanwhile. Both go by an all-to-all: the gradients are
    summed where they arrive, which is half the bytes of gloo's reduce-scatter.

    Each piece attends to all keys up to its end, in one call of ``scaled_dot_product_attention``: the first
    with ``is_causal``, others with a mask, as there is no other causal attention of fewer queries than keys
    on CPU (``causal_lower_right`` makes a mask there). Such a call computes half a square of a piece in vain.
    """

    def __init__(self, shape: ModelShape, group: dist.ProcessGroup) -> None:
        super().__init__(shape)
        self.group = group

    def attend(self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Tensor | None) -> Tensor:
        rank, ranks = self.group.rank(), self.group.size()
        x_BXSH = torch.cat((k_BKSH, v_BKSH), dim=1)
        # All get the same: the gradient of `expand` is the sum over ranks.
        sent = x_BXSH.expand(ranks, *x_BXSH.shape).flatten(0, 1)
        parts = all_to_all_single_autograd(sent, None, None, self.group).unflatten(0, (ranks, -1))
        early, late = zip(*(part.chunk(2, dim=2) for part in parts), strict=True)
        k_BKAH, v_BKAH = torch.cat((*early, *reversed(late)), dim=2).chunk(2, dim=1)
        mask_PA = _mask_of_last_piece(self.sizes.sequence, 2 * ranks)
        outputs = []
        for index, q_BNPH in zip((rank, 2 * ranks - 1 - rank), q_BNSH.chunk(2, dim=2), strict=True):
            end = (index + 1) * q_BNPH.shape[2]
            k_BKEH, v_BKEH = k_BKAH[:, :, :end], v_BKAH[:, :, :end]
            outputs.append(super().attend(q_BNPH, k_BKEH, v_BKEH, mask_PA[:, -end:] if index else None))
        return torch.cat(outputs, dim=2)


@cache
def _mask_of_last_piece(sequence: int, pieces: int) -> Tensor:
    """Mask_PA: of its queries, 0 for the keys that they see, else minus infinity."""
    places_A = torch.arange(sequence)
    return torch.where(places_A.chunk(pieces)[-1][:, None] >= places_A, 0.0, -torch.inf)
