"""A mixture of experts from its operators, against all experts for all tokens.

Legend: t tokens, k choices of a token, D hidden, F width of an expert, E experts, S sources of rows.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from braid.kernels.operators.activation import SwiGLU
from braid.kernels.operators.grouped_linear import GroupedLinear
from braid.kernels.operators.permute import Permute, Regroup, Unpermute
from braid.kernels.operators.router import Router
from tests.kernels.cases import assert_close, normal, prepare, wide_leaf
from tests.kernels.routing import UNEVEN, preference, rows_of_visits

FP64 = torch.float64
D, WIDTH = 10, 6
kinds = st.sampled_from(UNEVEN)
sizes = st.sampled_from([(1, 1), (3, 1), (4, 2), (7, 3), (5, 5)])


class Layer:
    """Operators called as an executor calls them."""

    def __init__(self, E, k, *, capacity, dtype, **routing: Any) -> None:
        self.capacity = capacity
        self.router = Router(hidden=D, experts=E, top_k=k, dtype=dtype, **routing)
        self.permute, self.unpermute = Permute(E, capacity), Unpermute(E, capacity)
        self.expert_in = GroupedLinear(experts=E, inputs=D, outputs=2 * WIDTH, dtype=dtype)
        self.activation = SwiGLU()
        self.expert_out = GroupedLinear(experts=E, inputs=WIDTH, outputs=D, dtype=dtype)
        self.weighted = (self.router, self.expert_in, self.expert_out)
        wide = torch.promote_types(dtype, torch.float32)
        self.before = [prepare(operator, wide)["weight"] for operator in self.weighted]

    @property
    def weights(self) -> list[Tensor]:
        return [operator.weight for operator in self.weighted]

    @property
    def gradients(self) -> list[Tensor]:
        """What was added to the sums of gradients."""
        return [one.gradients["weight"] - old for one, old in zip(self.weighted, self.before, strict=True)]

    def favour(self, kind: str) -> None:
        """Let the first feature of x, if it is 1, say how much experts are liked."""
        router = self.router
        with torch.no_grad():
            router.weight[:, 0] = preference(kind, router.experts, router.top_k)

    @torch.no_grad()
    def forward(self, x_tD: Tensor) -> Tensor:
        self.x = x_tD
        self.gates, self.choice, self.counts, self.scores = self.router(x_tD)
        kept = [self.capacity] * len(self.counts)
        self.sizes = self.counts.tolist() if self.capacity is None else kept
        (self.sent,) = self.permute(x_tD, self.choice)
        (self.gate_up,) = self.expert_in(self.sent, self.sizes)
        (self.inner,) = self.activation(self.gate_up)
        (self.made,) = self.expert_out(self.inner, self.sizes)
        return self.unpermute(self.made, self.gates, self.choice)[0]

    @torch.no_grad()
    def backward(self, dy_tD: Tensor, load_E: Tensor | None = None, scale: float | None = None) -> Tensor:
        """Return dx_tD and accumulate all weights' gradients."""
        d_made, d_gates = self.unpermute.input_gradient(dy_tD, self.made, self.gates, self.choice)
        (d_inner,) = self.expert_out.input_gradient(d_made, self.sizes)
        self.expert_out.weight_gradient(d_made, self.inner, self.sizes)
        (d_gate_up,) = self.activation.input_gradient(d_inner, self.gate_up)
        (d_sent,) = self.expert_in.input_gradient(d_gate_up, self.sizes)
        self.expert_in.weight_gradient(d_gate_up, self.sent, self.sizes)
        reads = (d_gates, self.scores, self.choice, load_E, scale)
        self.router.weight_gradient(*reads[:3], self.x, *reads[3:])
        (d_x_tD,) = self.permute.input_gradient(d_sent, self.choice)
        return d_x_tD + self.router.input_gradient(*reads)[0]


def tokens_of(count: int, dtype: torch.dtype) -> Tensor:
    """Random tokens (t x D) whose first feature is 1."""
    x_tD = normal(count, D, dtype=dtype)
    x_tD[:, 0] = 1
    return x_tD


def all_experts(x_tD: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """What every expert makes of every token (t x E x D)."""
    gate, up = torch.einsum("td,efd->tef", x_tD, w_in).chunk(2, dim=-1)
    return torch.einsum("tef,edf->ted", gate * torch.sigmoid(gate) * up, w_out)


def kept_visits(choice_tk: Tensor, E: int, capacity: int | None) -> Tensor:
    """1 for every visit (t x k) that finds a place."""
    rows, (tokens, k) = rows_of_visits(choice_tk, E, capacity), choice_tk.shape
    return torch.tensor([[float((t, j) in rows) for j in range(k)] for t in range(tokens)], dtype=FP64)


@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.integers(1, 14),
    sizes=sizes,
    capacity=st.sampled_from([None, 1, 2, 4, 30]),
    kind=kinds,
)
@settings(max_examples=80, deadline=None)
def test_equals_every_expert_for_all_tokens(seed, tokens, sizes, capacity, kind):
    torch.manual_seed(seed)
    E, k = sizes
    layer = Layer(E, k, capacity=capacity, dtype=FP64, normalised=True, balance_loss=0.3, z_loss=0.1)
    layer.favour(kind)
    x_tD, dy_tD = tokens_of(tokens, FP64), normal(tokens, D, dtype=FP64)
    y_tD = layer.forward(x_tD)
    load_E = layer.counts.double() / layer.counts.sum()
    d_x_tD = layer.backward(dy_tD, load_E, 0.7)

    leaves = x, w_router, w_in, w_out = [wide_leaf(value) for value in (x_tD, *layer.weights)]
    logits_tE, choice_tk = x @ w_router.t(), layer.choice
    share_tE = logits_tE.softmax(-1)
    gates_tk = share_tE.gather(1, choice_tk)
    gates_tk = gates_tk / gates_tk.sum(-1, keepdim=True)
    index = choice_tk.unsqueeze(-1).expand(-1, -1, D)
    visits_tkD = all_experts(x, w_in, w_out).gather(1, index)
    expected = (visits_tkD * (gates_tk * kept_visits(choice_tk, E, capacity)).unsqueeze(-1)).sum(1)
    losses = 0.3 * E * (share_tE * load_E).sum() + 0.1 * logits_tE.logsumexp(-1).square().sum()
    d_leaves = torch.autograd.grad((expected * dy_tD).sum() + 0.7 * losses, leaves)
    assert_close(y_tD, expected)
    for actual, reference in zip((d_x_tD, *layer.gradients), d_leaves, strict=True):
        assert_close(actual, reference)


@pytest.mark.parametrize("capacity", [None, 4])
@pytest.mark.parametrize("ranks", [2, 3])
@torch.no_grad()
def test_experts_cut_over_ranks_make_the_same_rows(capacity, ranks):
    """Every rank routes its own tokens and holds E / ranks experts; rows go as in an all-to-all."""
    torch.manual_seed(0)
    E, k = 6, 2
    layers = [Layer(E, k, capacity=capacity, dtype=FP64, normalised=True) for _ in range(ranks)]
    for layer in layers:
        for mine, first in zip(layer.weights, layers[0].weights, strict=True):
            mine.copy_(first)
        layer.forward(tokens_of(20, FP64))
    sizes_SE = torch.tensor([layer.sizes for layer in layers])
    local, made = E // ranks, [[] for _ in range(ranks)]
    for rank in range(ranks):
        mine = slice(rank * local, (rank + 1) * local)
        mine_SE = sizes_SE[:, mine].contiguous()
        received = [layer.sent.split(layer.sizes)[mine] for layer in layers]
        by_source = torch.cat([segment for segments in received for segment in segments])
        there, back = Regroup(ranks, local), Regroup(ranks, local, back=True)
        (by_expert,) = there(by_source, mine_SE)
        w_in, w_out = (getattr(layers[0], name).weight[mine] for name in ("expert_in", "expert_out"))
        outputs = [
            all_experts(rows, w_in[e : e + 1], w_out[e : e + 1]).squeeze(1)
            for e, rows in enumerate(by_expert.split(mine_SE.sum(0).tolist()))
        ]
        (returned,) = back(torch.cat(outputs), mine_SE)
        for source, rows in enumerate(returned.split(mine_SE.sum(1).tolist())):
            made[source].append(rows)
    for layer, rows in zip(layers, made, strict=True):
        assert_close(torch.cat(rows), layer.made)
