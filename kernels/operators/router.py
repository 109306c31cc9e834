"""The router of a mixture of experts: scores all experts for every token, and chooses the best.

Sources: the choice of k experts, Shazeer et al. 2017; the balance loss, Fedus et al. 2021 (Switch
Transformer), equations 4 to 6; the z loss, which keeps logits small, Zoph et al. 2022 (ST-MoE), equation 5;
balancing by a bias instead of a loss, Wang et al. 2024 (arXiv 2408.15664); gates of SparseMixer, Liu et al.
2024 (arXiv 2409.12136), here without its random choice of experts: the best are chosen, as in inference.

Legend: t tokens of this rank, D hidden, E experts, k experts that a token visits. A visit is a token together
with one of its choices. Logits, softmax and gates have the wide dtype: fp32, or float64 if the weight has it.
"""

from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from braid.kernels.operators.accumulation import accumulate_product
from braid.kernels.operators.operator import ComputeOperator, Home, wide

_softmax_backward = torch.ops.aten._softmax_backward_data.default


def count_visits(choice_tk: Tensor, experts: int) -> Tensor:
    """Return counts_E (int64), the visits of every expert; the host does not wait."""
    choice = choice_tk.flatten()
    counts_E = torch.zeros(experts, dtype=torch.int64, device=choice.device)
    return counts_E.scatter_add_(0, choice, torch.ones_like(choice))


class Router(ComputeOperator):
    """Computes scores x weightᵀ with weight_ED, and chooses the k experts with the best scores.

    ``softmax_after``: take the softmax over the chosen experts, instead of over all experts before the
    choice. ``normalised``: divide the gates of the chosen experts by their sum; with ``softmax_after`` they
    always sum to 1. ``balance_loss`` and ``z_loss``: factors of the auxiliary losses (`losses`).
    ``bias_balanced``: add a learned number per expert (the parameter ``bias``, E) to the values that the
    choice compares, but not to the gates. The compared values are then probabilities, or logits with
    ``softmax_after``. The bias's gradient does not come from the loss: it is E times an expert's visits minus
    the number of all visits, and the bias is updated by steps of one size against its sign (Wang et al.,
    algorithm 1). ``mixer_jitter``: if not 0, the gate of a token's n-th choice is a softmax over the experts
    that were not chosen earlier, except experts whose scores are below the best score by more than twice
    ``mixer_jitter`` times the greater of the best score and their own magnitude; these have no gradient.
    ``evenly``: tokens visit experts in turn, k each, which loads all experts equally; gates are those of the
    visited experts. This measures the time that a balanced load would take.
    """

    def __init__(
        self,
        *,
        hidden: int,
        experts: int,
        top_k: int,
        softmax_after: bool = False,
        normalised: bool,
        balance_loss: float = 0.0,
        z_loss: float = 0.0,
        bias_balanced: bool = False,
        mixer_jitter: float = 0.0,
        evenly: bool = False,
        **home: Unpack[Home],
    ) -> None:
        super().__init__()
        self.experts, self.top_k, self.softmax_after = experts, top_k, softmax_after
        self.normalised, self.evenly = normalised or softmax_after, evenly
        self.balance_loss, self.z_loss, self.mixer_jitter = balance_loss, z_loss, mixer_jitter
        self.weight = nn.Parameter(torch.empty(experts, hidden, **home))
        self.bias = nn.Parameter(torch.empty(experts, **home)) if bias_balanced else None

    def forward(self, x_tD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return gates_tk (wide), choice_tk (int64, best expert first), counts_E (int64) and scores_tE.

        x has the weight's dtype. ``counts``: number of visits of every expert. ``scores``: the logits (wide).
        Among experts with equal scores the first is chosen, in every run and on every device.
        """
        scores_tE = F.linear(*(x.to(wide(self.weight.dtype)) for x in (x_tD, self.weight)))
        choice_tk = self._chosen(scores_tE)
        return self._gates(scores_tE, choice_tk), choice_tk, count_visits(choice_tk, self.experts), scores_tE

    def input_gradient(self, d_gates_tk: Tensor, scores_tE: Tensor, *more: Any) -> tuple[Tensor]:
        """Return dx_tD of token losses and auxiliary losses; arguments: as for `_d_logits`."""
        d_logits_tE = self._d_logits(d_gates_tk, scores_tE, *more)
        return ((d_logits_tE @ self.weight.to(d_logits_tE.dtype)).to(self.weight.dtype),)

    def weight_gradient(
        self, d_gates_tk: Tensor, scores_tE: Tensor, choice_tk: Tensor, x_tD: Tensor, *more: Any
    ) -> None:
        """Accumulate the gradients of weight and bias; arguments: as for ``input_gradient``, and x."""
        d_logits_tE = self._d_logits(d_gates_tk, scores_tE, choice_tk, *more)
        accumulate_product(self.gradients["weight"], d_logits_tE, x_tD.to(d_logits_tE.dtype))
        if self.bias is not None:
            more_E = count_visits(choice_tk, self.experts) * self.experts - choice_tk.numel()
            self.gradients["bias"].add_(more_E)

    def losses(self, scores_tE: Tensor, load_E: Tensor | None) -> Tensor:
        """Return the sums over the tokens of the two auxiliary losses (wide); `input_gradient` adds their
        gradients.

        For one token these losses are balance_loss * E * sum_e load_e p_e, with p the softmax over all
        experts (equal to balance_loss if p is uniform), and z_loss * logsumexp(logits)². ``load_E`` may be
        None without balance loss.
        """
        sums_2 = scores_tE.new_zeros(2)
        if self.balance_loss:
            assert load_E is not None
            shares_t = scores_tE.softmax(-1) @ load_E.to(scores_tE.dtype)
            sums_2[0] = shares_t.sum() * (self.balance_loss * self.experts)
        if self.z_loss:
            sums_2[1] = scores_tE.logsumexp(-1).square().sum() * self.z_loss
        return sums_2

    def _chosen(self, scores_tE: Tensor) -> Tensor:
        if self.evenly:
            visits = torch.arange(scores_tE.shape[0] * self.top_k, device=scores_tE.device)
            return visits.remainder(self.experts).view(-1, self.top_k)
        compared_tE = scores_tE  # probabilities have the order of logits, but may round to ties
        if self.bias is not None:
            compared_tE = self.bias + (scores_tE if self.softmax_after else scores_tE.softmax(-1))
        order_tE = torch.sort(compared_tE, dim=-1, descending=True, stable=True).indices
        return order_tE[:, : self.top_k].contiguous()

    def _gates(self, scores_tE: Tensor, choice_tk: Tensor) -> Tensor:
        """Return the chosen experts' gates; normalised, they are a softmax over the chosen."""
        if self.mixer_jitter:
            mixed = zip(choice_tk.split(1, dim=1), self._mixed(scores_tE, choice_tk), strict=True)
            return torch.cat([share_tE.gather(1, choice_t1) for choice_t1, share_tE in mixed], dim=1)
        if self.normalised:
            return scores_tE.gather(1, choice_tk).softmax(-1)
        return scores_tE.softmax(-1).gather(1, choice_tk)

    def _mixed(self, scores_tE: Tensor, choice_tk: Tensor) -> list[Tensor]:
        """Return for each choice the softmax (t x E) over the experts that compete for it
        (``mixer_jitter``)."""
        left_tE, found = scores_tE, []
        for choice_t1 in choice_tk.split(1, dim=1):
            best_t1 = left_tE.max(dim=1, keepdim=True).values
            far_tE = (best_t1 - scores_tE) / scores_tE.abs().clamp(min=best_t1) > 2 * self.mixer_jitter
            found.append(left_tE.masked_fill(far_tE, float("-inf")).softmax(-1))
            left_tE = left_tE.scatter(1, choice_t1, float("-inf"))
        return found

    def _d_logits(
        self,
        d_gates_tk: Tensor,
        scores_tE: Tensor,
        choice_tk: Tensor,
        load_E: Tensor | None = None,
        scale: Tensor | float | None = None,
    ) -> Tensor:
        """Return the gradient of the logits (t x E).

        ``load_E``: share of every expert in the micro-batch's visits, over all ranks; it has no gradient.
        ``scale``: gradient of the sum of token losses, which also multiplies the auxiliary losses. Both are
        unused if there are no auxiliary losses.
        """
        nothing_tE = torch.zeros_like(scores_tE)
        d_gates_tk = d_gates_tk.to(scores_tE.dtype)
        if self.mixer_jitter:
            d_logits_tE = nothing_tE
            for n, share_tE in enumerate(self._mixed(scores_tE, choice_tk)):
                place_t1 = choice_tk[:, n : n + 1]
                d_share_tE = torch.zeros_like(scores_tE).scatter_(1, place_t1, d_gates_tk[:, n : n + 1])
                d_logits_tE += _through_softmax(d_share_tE, share_tE)
        elif self.normalised:
            d_chosen_tk = _through_softmax(d_gates_tk, self._gates(scores_tE, choice_tk))
            d_logits_tE = nothing_tE.scatter_(1, choice_tk, d_chosen_tk)
        else:
            d_probability_tE = nothing_tE.scatter_(1, choice_tk, d_gates_tk)
            d_logits_tE = _through_softmax(d_probability_tE, scores_tE.softmax(-1))
        if self.balance_loss or self.z_loss:
            assert scale is not None
            d_logits_tE += self._d_losses(scores_tE, load_E).mul_(scale)
        return d_logits_tE

    def _d_losses(self, scores_tE: Tensor, load_E: Tensor | None) -> Tensor:
        """Return the gradient of the sum of both auxiliary losses with respect to the logits (t x E)."""
        probability_tE = scores_tE.softmax(-1)
        d_logits_tE = torch.zeros_like(scores_tE)
        if self.balance_loss:
            assert load_E is not None
            d_probability_E = load_E.to(scores_tE.dtype) * (self.balance_loss * self.experts)
            d_logits_tE += _through_softmax(d_probability_E.expand_as(scores_tE), probability_tE)
        if self.z_loss:
            d_logits_tE.addcmul_(probability_tE, scores_tE.logsumexp(-1, keepdim=True), value=2 * self.z_loss)
        return d_logits_tE


def _through_softmax(d_y: Tensor, y: Tensor) -> Tensor:
    """Return y (d_y - sum(y d_y)), the gradient through a softmax with output y."""
    d_x: Tensor = _softmax_backward(d_y, y, -1, y.dtype)
    return d_x
