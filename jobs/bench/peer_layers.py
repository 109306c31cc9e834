"""Layers of peers that no public module offers on CPU: experts and sequences that are cut over ranks.

Legend: as in `braid.jobs.bench.plain_torch`; R ranks. Experts: T tokens of a micro-batch, E experts, L
experts on this rank, k experts that a token visits, v visits of this rank's tokens, n visits to this rank's
experts, I inputs and O outputs of a matrix. Sequences: S tokens of both pieces of this rank, P tokens of one
piece, A all tokens of a sample, X key-value heads, counted once for keys and once for values.
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
"""Substring in the names of parameters that differ between ranks."""


class ExpertLinear(nn.Module):
    """A linear map without bias for each of this rank's experts."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = inputs**-0.5  # the same bound as in nn.Linear
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs).uniform_(-bound, bound))

    def forward(self, x_nI: Tensor, ends_L: Tensor) -> Tensor:
        """Multiply rows, sorted by expert, by their experts' matrices, giving outputs_nO; ``ends``: each
        expert's last row + 1, int32."""
        return F.grouped_mm(x_nI, self.weight.transpose(1, 2), offs=ends_L)


class Mixture(Layer):
    """A layer with experts that are distributed over a group's ranks, and their router, in place of an MLP.

    It follows torchtitan, over gloo: rows are sorted by the expert that they visit, ranks exchange their
    numbers, ``all_to_all_single_autograd`` sends the rows (torchtitan's choice, though its module has an
    underscore); they are sorted by this rank's experts, go through three ``grouped_mm``, and return to be
    weighed and summed. As there, no computation overlaps with this.

    A quick check on CPU (fp32, 4 experts on a rank, with freed memory kept) chose ``grouped_mm``, which took
    no longer than a loop over experts with separate matrices, and less than a loop over slices of one tensor;
    and ``index_select`` to sort rows, which was faster than indexing, ``embedding`` and ``gather``.
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
        """Return the gates, the experts to which they belong, and the number of visits to each expert."""
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
        """Apply this rank's experts to rows that are sorted by source rank, and return the results in that
        order."""
        held_RL = torch.arange(visits_RL.shape[1]).expand_as(visits_RL)
        by_expert_n = held_RL.flatten().repeat_interleave(visits_RL.flatten()).argsort(stable=True)
        ends_L = visits_RL.sum(0).cumsum(0).int()
        x_nD = x_nD.index_select(0, by_expert_n)
        gate, up, down = (self.experts[name] for name in ("gate", "up", "down"))
        y_nD = down(F.silu(gate(x_nD, ends_L)) * up(x_nD, ends_L), ends_L)
        return y_nD.index_select(0, by_expert_n.argsort())


class ContextLayer(Layer):
    """A layer with causal attention from this rank's two pieces of a sample to the whole sample.

    PyTorch's own ``context_parallel`` (prototype, 2.13) does not work on CPU: it replaces attention by rings
    of CUDA kernels, and does not know ``_scaled_dot_product_flash_attention_for_cpu``, whatever sends the
    messages. So this does what Llama 3 and Megatron do (Llama Team 2024, section 3.3.2; ``cp_comm_type:
    all_gather``), in public PyTorch. A sample has two pieces per rank: rank r has the r-th from the front and
    the r-th from the back. Keys and values of all ranks are gathered before attention, their gradients are
    sent back, and no computation overlaps with this. Both use an all-to-all: gradients are summed by the
    receiver, which moves half the bytes of gloo's reduce-scatter.

    Each piece attends to all keys up to its end, in one call of ``scaled_dot_product_attention``: the first
    piece with ``is_causal``, others with a mask, since CPU has no other causal attention of fewer queries
    than keys (``causal_lower_right`` makes a mask there). Such a call wastes half a square of a piece.
    """

    def __init__(self, shape: ModelShape, group: dist.ProcessGroup) -> None:
        super().__init__(shape)
        self.group = group

    def attend(self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Tensor | None) -> Tensor:
        rank, ranks = self.group.rank(), self.group.size()
        x_BXSH = torch.cat((k_BKSH, v_BKSH), dim=1)
        # All ranks get the same data: the gradient of `expand` is the sum over ranks.
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
    """Return Mask_PA for the last piece's queries: 0 for the keys that a query sees, else minus infinity."""
    places_A = torch.arange(sequence)
    return torch.where(places_A.chunk(pieces)[-1][:, None] >= places_A, 0.0, -torch.inf)
