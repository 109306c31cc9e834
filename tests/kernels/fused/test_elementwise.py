"""Norms, activations, rotary embedding and cross-entropy against float64 autograd.

Legend: T or t tokens, D hidden, V vocabulary rows; b samples, s tokens of each.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from braid.kernels.fused.activation import gelu, gelu_gradient, swiglu, swiglu_gradient
from braid.kernels.fused.cross_entropy import cross_entropy_gradient, cross_entropy_statistics
from braid.kernels.fused.norm import norm, norm_input_gradient, norm_weight_gradient
from braid.kernels.fused.rotary import rotary
from tests.kernels.fused.cases import DEVICE, assert_near, dtypes, fresh, normal, seeds, total_near, wide
from tests.kernels.fused.references import (
    reference_cross_entropy_gradient,
    reference_cross_entropy_statistics,
    reference_norm,
    reference_rotary,
    reference_swiglu,
)

EPS = 1e-5
tokens = st.integers(0, 70)
widths = st.sampled_from([1, 5, 16, 33, 1100])


@given(
    seed=seeds,
    t=st.integers(0, 40),
    D=st.sampled_from([1, 3, 16, 17, 40, 130]),
    dtype=dtypes,
    centred=st.booleans(),
    skips=st.booleans(),
)
@fresh
def test_norm(seed, t, D, dtype, centred, skips):
    torch.manual_seed(seed)
    x, dy, skip = (normal(t, D, dtype=dtype) for _ in range(3))
    weight, shift = normal(D, dtype=dtype), normal(D, dtype=dtype) if centred else None
    y, statistics = norm(x, weight, shift, EPS)
    vectors = [weight] if shift is None else [weight, shift]
    leaves = wide(x, *vectors)
    expected = reference_norm(leaves[0], leaves[1], leaves[2] if centred else None, EPS)
    assert y.dtype == dtype
    assert_near(y, expected, dtype)
    gradients = torch.autograd.grad(expected, leaves, dy.double())
    dx = norm_input_gradient(dy, x, statistics, weight, skip if skips else None)
    assert_near(dx, gradients[0] + (skip.double() if skips else 0), dtype)
    totals = [normal(D) for _ in vectors]
    before = [total.clone() for total in totals]
    norm_weight_gradient(dy, x, statistics, totals[0], totals[1] if centred else None)
    for total, old, gradient in zip(totals, before, gradients[1:], strict=True):
        total_near(total, old, gradient, dtype)


def test_sums_over_many_tokens_are_the_same_bits_every_time():
    x, weight = normal(700, 20), torch.ones(20, device=DEVICE)
    statistics = norm(x, weight, None, EPS)[1]
    totals = torch.zeros(2, 20, device=DEVICE)
    for total in totals:
        norm_weight_gradient(x, x, statistics, total, None)
    assert torch.equal(*totals)


@given(seed=seeds, T=tokens, width=widths, dtype=dtypes)
@fresh
def test_swiglu(seed, T, width, dtype):
    torch.manual_seed(seed)
    gu, da = normal(T, 2 * width, dtype=dtype, scale=2), normal(T, width, dtype=dtype)
    (leaf,) = wide(gu)
    expected = reference_swiglu(leaf)
    assert_near(swiglu(gu), expected, dtype)
    assert_near(swiglu_gradient(da, gu), *torch.autograd.grad(expected, leaf, da.double()), dtype)


@given(seed=seeds, T=tokens, width=widths, dtype=dtypes)
@fresh
def test_gelu(seed, T, width, dtype):
    torch.manual_seed(seed)
    h, da = normal(T, width, dtype=dtype, scale=3), normal(T, width, dtype=dtype)
    (leaf,) = wide(h)
    expected = F.gelu(leaf, approximate="tanh")
    assert_near(gelu(h), expected, dtype)
    assert_near(gelu_gradient(da, h), *torch.autograd.grad(expected, leaf, da.double()), dtype)


def test_gelu_of_large_numbers():
    h = torch.tensor([[-300.0, -20.0, 20.0, 300.0]], device=DEVICE)
    assert_near(gelu(h), torch.tensor([[0.0, 0.0, 20.0, 300.0]], device=DEVICE), torch.float32)
    gradient = gelu_gradient(torch.ones_like(h), h)
    assert_near(gradient, torch.tensor([[0.0, 0.0, 1.0, 1.0]], device=DEVICE), torch.float32)


@given(
    seed=seeds,
    b=st.integers(0, 2),
    s=st.integers(1, 4),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2)]),
    half=st.sampled_from([1, 3, 8]),
    dtype=dtypes,
    back=st.booleans(),
)
@fresh
def test_rotary(seed, b, s, heads, half, dtype, back):
    torch.manual_seed(seed)
    n, k = heads
    q, k, v = (normal(b, count, s, 2 * half, dtype=dtype).transpose(1, 2) for count in (n, k, k))
    angles = torch.randn(s, half, device=DEVICE)
    cos, sin = angles.cos(), angles.sin()
    expected = reference_rotary(
        q.double(), k.double(), v.double(), cos.double(), (-sin if back else sin).double()
    )
    assert_near(rotary(q, k, v, cos, sin, back), expected, dtype)


@given(
    seed=seeds,
    T=st.integers(0, 9),
    cut=st.lists(st.sampled_from([1, 7, 20, 4100]), min_size=1, max_size=3),
    dtype=dtypes,
    size=st.sampled_from([1.0, 60.0]),
)
@fresh
def test_cross_entropy_of_a_cut_vocabulary(seed, T, cut, dtype, size):
    torch.manual_seed(seed)
    logits = normal(T, sum(cut), dtype=dtype, scale=size)
    targets = torch.randint(sum(cut), (T,), device=DEVICE)
    exact = logits.double()
    log_partition = exact.logsumexp(-1)
    scale = torch.tensor(0.7, device=DEVICE)
    first = 0
    for shard, exact_shard in zip(logits.split(cut, dim=1), exact.split(cut, dim=1), strict=True):
        statistics = cross_entropy_statistics(shard, targets, first, sum(cut))
        expected = reference_cross_entropy_statistics(exact_shard, targets, first)
        assert_near(statistics, expected, torch.float32)
        gradient = reference_cross_entropy_gradient(exact_shard, log_partition, targets, first)
        d_shard = shard.clone()
        cross_entropy_gradient(d_shard, log_partition.float(), targets, scale, 2.0, first)
        # exp(logit - log_partition) with a rounded log-partition of magnitude 60 is off by 60 roundings
        assert_near(d_shard / max(1.0, size / 4), 1.4 * gradient / max(1.0, size / 4), dtype)
        first += shard.shape[1]


def test_logits_that_forbid_tokens():
    """-inf stands for a forbidden token, also where a whole block is forbidden."""
    logits = torch.full((2, 9000), float("-inf"), device=DEVICE)
    logits[0, 8999], logits[1, 3], logits[1, 8000] = 1.0, 2.0, 2.0
    targets = torch.tensor([8999, 3], device=DEVICE)
    statistics = cross_entropy_statistics(logits, targets, 0, 9000)
    assert statistics.tolist() == [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]
