"""Activations, rotary embedding and cross-entropy against float64 autograd.

Legend: T tokens, D hidden, V vocabulary rows; b samples, s tokens of each.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from braid.kernels.fused.activation import (
    bias_gelu,
    bias_gelu_gradient,
    reference_bias_gelu,
    reference_swiglu,
    swiglu,
    swiglu_gradient,
)
from braid.kernels.fused.cross_entropy import (
    cross_entropy_gradient,
    cross_entropy_statistics,
)
from braid.kernels.fused.linear_cross_entropy import linear_cross_entropy, reference_linear_cross_entropy
from braid.kernels.fused.rotary import reference_rotary, rotary
from tests.kernels.fused.cases import DEVICE, assert_near, dtypes, fresh, normal, seeds, total_near, wide
from tests.kernels.fused.references import (
    reference_cross_entropy_gradient,
    reference_cross_entropy_statistics,
)

tokens = st.integers(0, 70)
widths = st.sampled_from([1, 5, 16, 33, 1100])


@given(seed=seeds, T=tokens, width=widths, dtype=dtypes)
@fresh
def test_swiglu(seed, T, width, dtype):
    torch.manual_seed(seed)
    gu, da = normal(T, 2 * width, dtype=dtype, scale=2), normal(T, width, dtype=dtype)
    (leaf,) = wide(gu)
    expected = reference_swiglu(leaf)
    assert_near(swiglu(gu), expected, dtype)
    assert_near(swiglu_gradient(da, gu), *torch.autograd.grad(expected, leaf, da.double()), dtype)


@given(seed=seeds, T=tokens, width=widths, dtype=dtypes, biased=st.booleans())
@fresh
def test_bias_gelu(seed, T, width, dtype, biased):
    torch.manual_seed(seed)
    h, da = normal(T, width, dtype=dtype, scale=3), normal(T, width, dtype=dtype)
    bias, d_bias = normal(width, dtype=dtype), normal(width)
    before = d_bias.clone()
    leaves = wide(h, bias)
    expected = reference_bias_gelu(leaves[0], leaves[1] if biased else None)
    assert_near(bias_gelu(h, bias if biased else None), expected, dtype)
    gradients = torch.autograd.grad(expected, leaves, da.double(), allow_unused=True)
    dh = bias_gelu_gradient(da, h, bias if biased else None, d_bias if biased else None)
    assert_near(dh, gradients[0], dtype)
    total_near(d_bias, before, gradients[1] if biased else torch.zeros_like(before), dtype)


def test_gelu_of_large_numbers():
    h = torch.tensor([[-300.0, -20.0, 20.0, 300.0]], device=DEVICE)
    assert_near(bias_gelu(h, None), torch.tensor([[0.0, 0.0, 20.0, 300.0]], device=DEVICE), torch.float32)
    gradient = bias_gelu_gradient(torch.ones_like(h), h, None, None)
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
    expected = reference_rotary(q.double(), k.double(), v.double(), cos.double(), sin.double(), back)
    assert_near(rotary(q, k, v, cos, sin, back), expected, dtype)


def test_turning_back_undoes_turning():
    q, k, v = (normal(2, 5, n, 6) for n in (4, 2, 2))
    angles = torch.randn(5, 3, device=DEVICE)
    turned = rotary(q, k, v, angles.cos(), angles.sin(), False).view(2, 5, 8, 6).split([4, 2, 2], dim=2)
    again = rotary(*turned, angles.cos(), angles.sin(), True)
    assert_near(again, torch.cat((q, k, v), dim=2).reshape(10, -1).double(), torch.float32)


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
        kept, d_shard = shard.clone(), shard.clone()
        assert torch.equal(shard, kept)
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


@given(
    seed=seeds,
    T=st.integers(0, 11),
    D=st.sampled_from([1, 9, 24]),
    V=st.sampled_from([1, 10, 50]),
    dtype=dtypes,
    chunk=st.integers(1, 12),
)
@fresh
def test_linear_cross_entropy(seed, T, D, V, dtype, chunk):
    torch.manual_seed(seed)
    x, weight, d_weight = normal(T, D, dtype=dtype), normal(V, D, dtype=dtype, scale=0.3), normal(V, D)
    before, targets = d_weight.clone(), torch.randint(V, (T,), device=DEVICE)
    leaves = wide(x, weight)
    expected = reference_linear_cross_entropy(*leaves, targets)
    loss, dx = linear_cross_entropy(x, weight, targets, d_weight, 0.5, chunk)
    assert loss.shape == ()
    # Logits are rounded to the dtype: a loss of T terms is off by as much as a logit.
    near = 1e-5 if dtype == torch.float32 else 2e-2
    assert abs(loss.item() - expected.item()) <= near * max(1.0, expected.item())
    d_x, d_w = torch.autograd.grad(0.5 * expected, leaves)
    assert_near(dx, d_x, dtype)
    total_near(d_weight, before, d_w, dtype)


def test_linear_cross_entropy_keeps_logits_of_one_chunk_only():
    """The largest allocation is a chunk's logits, not all tokens'."""
    x, weight = torch.randn(64, 8, device=DEVICE), torch.randn(300, 8, device=DEVICE)
    targets, d_weight = torch.randint(300, (64,), device=DEVICE), torch.zeros(300, 8, device=DEVICE)
    with torch.profiler.profile(profile_memory=True) as profile:
        loss, _ = linear_cross_entropy(x, weight, targets, d_weight, 1.0, 4)
    sizes = [event.cpu_memory_usage + event.device_memory_usage for event in profile.events()]
    assert max(sizes) < 64 * 300 * 4 / 2
    assert_near(
        loss, F.cross_entropy(x.double() @ weight.double().t(), targets, reduction="sum"), torch.float32
    )
