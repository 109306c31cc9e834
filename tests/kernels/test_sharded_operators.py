"""Operators split over an emulated tensor group against the whole ones.

Legend: T all tokens, t a rank's slice of them, D hidden, F feed-forward width, Q and K query and key widths.
"""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from braid.kernels.operators.activation import SwiGLU
from braid.kernels.operators.attention import Attention
from braid.kernels.operators.embedding import PositionEmbedding, VocabularyEmbedding
from braid.kernels.operators.head_norm import HeadNorm
from braid.kernels.operators.linear import Linear
from braid.kernels.operators.norm import LayerNorm, RMSNorm
from braid.kernels.operators.operator import ComputeOperator
from braid.kernels.operators.residual import Residual
from tests.kernels.cases import EPSILON, assert_close

DOUBLE = {"dtype": torch.float64}
seeds = st.integers(0, 2**32 - 1)
degrees = pytest.mark.parametrize("tp", [2, 3])


def double(*shape: int) -> Tensor:
    return torch.randn(shape, **DOUBLE)


def load(operator: ComputeOperator, **values: Tensor) -> ComputeOperator:
    """Set parameters, and the sums of their gradients to zero."""
    for name, value in values.items():
        parameter = operator.get_parameter(name)
        parameter.data.copy_(value)
        operator.gradients[name] = torch.zeros_like(value)
    return operator


def parts(x: Tensor, tp: int, dim: int) -> Sequence[Tensor]:
    return x.chunk(tp, dim=dim)


@degrees
@given(seed=seeds, tokens=st.integers(1, 7), hidden=st.integers(1, 9), share=st.integers(1, 5))
@settings(max_examples=15, deadline=None)
@torch.no_grad()
def test_mlp_by_columns_and_rows(tp, seed, tokens, hidden, share):
    torch.manual_seed(seed)
    width = tp * share
    gate, up, down = double(width, hidden), double(width, hidden), double(hidden, width)
    x_TD, dy_TD, activation = double(tokens, hidden), double(tokens, hidden), SwiGLU()

    def run(gate: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
        width = gate.shape[0]
        first = load(
            Linear(inputs=hidden, outputs=2 * width, bias=False, **DOUBLE), weight=torch.cat((gate, up))
        )
        second = load(Linear(inputs=width, outputs=hidden, bias=False, **DOUBLE), weight=down)
        (gu,) = first(x_TD)
        (a,) = activation(gu)
        (y,) = second(a)
        (d_a,) = second.input_gradient(dy_TD)
        second.weight_gradient(dy_TD, a)
        (d_gu,) = activation.input_gradient(d_a, gu)
        first.weight_gradient(d_gu, x_TD)
        (dx,) = first.input_gradient(d_gu)
        return y, dx, *first.gradients["weight"].chunk(2), second.gradients["weight"]

    expected = run(gate, up, down)
    ranks = zip(parts(gate, tp, 0), parts(up, tp, 0), parts(down, tp, 1), strict=True)
    y, dx, d_gate, d_up, d_down = zip(*[run(*shard) for shard in ranks], strict=True)
    assert_close(sum(y), expected[0])
    assert_close(sum(dx), expected[1])
    assert_close(torch.cat(d_gate), expected[2])
    assert_close(torch.cat(d_up), expected[3])
    assert_close(torch.cat(d_down, dim=1), expected[4])


@degrees
@given(
    seed=seeds,
    batch=st.integers(1, 2),
    sequence=st.integers(1, 6),
    kv_share=st.integers(1, 2),
    group=st.integers(1, 2),
    base=st.sampled_from([None, 100.0]),
)
@settings(max_examples=15, deadline=None)
@torch.no_grad()
def test_attention_by_heads(tp, seed, batch, sequence, kv_share, group, base):
    torch.manual_seed(seed)
    head_dim, kv_heads = 4, tp * kv_share
    heads = group * kv_heads
    q, k, v = (double(batch * sequence, n * head_dim) for n in (heads, kv_heads, kv_heads))
    d_o = double(batch * sequence, heads * head_dim)

    def run(q: Tensor, k: Tensor, v: Tensor, d_o: Tensor) -> tuple[Tensor, ...]:
        operator = Attention(
            heads=q.shape[1] // head_dim,
            kv_heads=k.shape[1] // head_dim,
            head_dim=head_dim,
            sequence=sequence,
            rotary_base=base,
        )
        o, saved = operator(torch.cat((q, k, v), dim=1))
        (d_qkv,) = operator.input_gradient(d_o, saved)
        return o, *d_qkv.split([q.shape[1], k.shape[1], v.shape[1]], dim=1)

    expected = run(q, k, v, d_o)
    shards = zip(*[parts(x, tp, 1) for x in (q, k, v, d_o)], strict=True)
    for actual, reference in zip(zip(*[run(*shard) for shard in shards], strict=True), expected, strict=True):
        assert_close(torch.cat(actual, dim=1), reference)


@given(seed=seeds, tokens=st.integers(1, 9), cut=st.lists(st.integers(1, 6), min_size=2, max_size=3))
@settings(max_examples=30, deadline=None)
@torch.no_grad()
def test_vocabulary_by_uneven_rows(seed, tokens, cut):
    torch.manual_seed(seed)
    vocabulary, hidden = sum(cut), 5
    weight, d_TD = double(vocabulary, hidden), double(tokens, hidden)
    tokens_T = torch.randint(vocabulary, (tokens,))

    def run(weight: Tensor, first_row: int) -> tuple[Tensor, Tensor]:
        rows = weight.shape[0]
        operator = load(
            VocabularyEmbedding(
                rows=rows, hidden=hidden, first_row=first_row, vocabulary=vocabulary, **DOUBLE
            ),
            weight=weight,
        )
        (partial_TD,) = operator(tokens_T)
        operator.weight_gradient(d_TD, tokens_T)
        return partial_TD, operator.gradients["weight"]

    expected = run(weight, 0)
    ranks = [run(shard, sum(cut[:rank])) for rank, shard in enumerate(weight.split(cut))]
    partials, gradients = zip(*ranks, strict=True)
    assert_close(sum(partials), expected[0])
    assert_close(torch.cat(gradients), expected[1])


@degrees
@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
@torch.no_grad()
def test_norm_by_tokens(tp, kind):
    torch.manual_seed(tp)
    hidden, x, dy = 7, double(4 * tp, 7), double(4 * tp, 7)
    values = {name: double(hidden) for name in (("weight",) if kind is RMSNorm else ("weight", "bias"))}

    def run(x_tD: Tensor, dy_tD: Tensor) -> tuple[Tensor, ...]:
        operator = load(kind(hidden=hidden, eps=EPSILON, **DOUBLE), **values)
        y_tD, statistics = operator(x_tD)
        (dx_tD,) = operator.input_gradient(dy_tD, x_tD, statistics)
        operator.weight_gradient(dy_tD, x_tD, statistics)
        return y_tD, dx_tD, *operator.gradients.values()

    expected = run(x, dy)
    shards = zip(parts(x, tp, 0), parts(dy, tp, 0), strict=True)
    y, dx, *sums = zip(*[run(*shard) for shard in shards], strict=True)
    assert_close(torch.cat(y), expected[0])
    assert_close(torch.cat(dx), expected[1])
    for actual, reference in zip(sums, expected[2:], strict=True):
        assert_close(sum(actual), reference)


@degrees
@torch.no_grad()
def test_head_norm_by_heads(tp):
    """Every rank norms its own heads; gradients of the weights, which all have, add up."""
    torch.manual_seed(tp)
    d, values = 5, {"q_weight": double(5), "k_weight": double(5)}
    qkv, dy = ([double(6, n * tp * d) for n in (2, 1, 1)] for _ in range(2))

    def run(*columns: Tensor) -> tuple[Tensor, ...]:
        qkv, dy = torch.cat(columns[:3], dim=1), torch.cat(columns[3:], dim=1)
        widths = [part.shape[1] for part in columns[:3]]
        heads, kv_heads = widths[0] // d, widths[1] // d
        operator = load(HeadNorm(heads=heads, kv_heads=kv_heads, head_dim=d, eps=EPSILON, **DOUBLE), **values)
        y, statistics = operator(qkv)
        (dx,) = operator.input_gradient(dy, qkv, statistics)
        operator.weight_gradient(dy, qkv, statistics)
        return *y.split(widths, dim=1), *dx.split(widths, dim=1), *operator.gradients.values()

    expected = run(*qkv, *dy)
    shards = zip(*[parts(x, tp, 1) for x in (*qkv, *dy)], strict=True)
    results = [*zip(*[run(*shard) for shard in shards], strict=True)]
    for actual, reference in zip(results[:6], expected[:6], strict=True):
        assert_close(torch.cat(actual, dim=1), reference)
    for actual, reference in zip(results[6:], expected[6:], strict=True):
        assert_close(sum(actual), reference)


@degrees
@given(seed=seeds, sequence=st.integers(1, 7), share=st.integers(1, 9))
@settings(max_examples=15, deadline=None)
@torch.no_grad()
def test_positions_and_bias_by_tokens(tp, seed, sequence, share):
    torch.manual_seed(seed)
    table, bias = double(sequence, 3), double(3)
    branch_TD, x_TD, dy_TD = (double(tp * share, 3) for _ in range(3))

    def run(branch: Tensor, x: Tensor, dy: Tensor, token_offset: int) -> tuple[Tensor, ...]:
        positions = PositionEmbedding(sequence=sequence, hidden=3, token_offset=token_offset, **DOUBLE)
        load(positions, weight=table)
        residual = load(Residual(hidden=3, bias=True, **DOUBLE), bias=bias)
        (y,) = positions(*residual(branch, x))
        (d_sum,) = positions.input_gradient(dy)
        positions.weight_gradient(dy)
        residual.weight_gradient(d_sum)
        return y, positions.gradients["weight"], residual.gradients["bias"]

    expected = run(branch_TD, x_TD, dy_TD, 0)
    shards = zip(*[parts(x, tp, 0) for x in (branch_TD, x_TD, dy_TD)], strict=True)
    results = [run(*shard, rank * share) for rank, shard in enumerate(shards)]
    y, d_table, d_bias = zip(*results, strict=True)
    assert_close(torch.cat(y), expected[0])
    assert_close(sum(d_table), expected[1])
    assert_close(sum(d_bias), expected[2])
