"""Norms, residual addition and dropout against float64 autograd.

Legend: t tokens, D hidden.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.kernels.fused.dropout import dropout_key, reference_keep_mask
from braid.kernels.fused.norm import (
    add_norm,
    bias_dropout_add,
    norm,
)
from braid.kernels.fused.norm_gradient import (
    add_norm_gradient,
    bias_dropout_add_gradient,
    norm_input_gradient,
    norm_weight_gradient,
)
from tests.kernels.fused.cases import DEVICE, assert_near, dtypes, fresh, normal, seeds, total_near, wide
from tests.kernels.fused.references import reference_bias_dropout_add, reference_norm

EPS = 1e-5
rows = st.integers(0, 40)
widths = st.sampled_from([1, 3, 16, 17, 40, 130])


@given(seed=seeds, t=rows, D=widths, dtype=dtypes, centred=st.booleans(), skips=st.booleans())
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


@given(
    seed=seeds,
    t=st.integers(0, 9),
    D=widths,
    dtype=dtypes,
    centred=st.booleans(),
    biased=st.booleans(),
    probability=st.sampled_from([0.0, 0.1, 0.6]),
)
@fresh
def test_add_norm(seed, t, D, dtype, centred, biased, probability):
    torch.manual_seed(seed)
    x, branch, dy, skip = (normal(t, D, dtype=dtype) for _ in range(4))
    weight, shift, bias = (normal(D, dtype=dtype) for _ in range(3))
    key = dropout_key(seed=seed * 2**20, step=3, site=1, first_token=seed % 1000, device=DEVICE)
    keep = reference_keep_mask(key, t, D, probability) if probability else None
    y, z, statistics = add_norm(
        x, branch, bias if biased else None, weight, shift if centred else None, key, EPS, probability
    )
    x_, branch_, bias_ = leaves = wide(x, branch, bias)
    sums = reference_bias_dropout_add(x_, branch_, bias_ if biased else None, keep, probability)
    assert_near(z, sums, dtype)
    stored, weight_, shift_ = wide(z, weight, shift)  # the norm reads what was rounded
    expected = reference_norm(stored, weight_, shift_ if centred else None, EPS)
    assert_near(y, expected, dtype)

    vectors = [weight_, shift_] if centred else [weight_]
    dz, *d_vectors = torch.autograd.grad(expected, [stored, *vectors], dy.double())
    d_sums = dz + skip.double()
    gradients = torch.autograd.grad(sums, leaves, d_sums, allow_unused=True)
    totals = [normal(D) for _ in range(3)]
    before = [total.clone() for total in totals]
    d_weight, d_shift, d_bias = totals
    dx, d_branch = add_norm_gradient(
        dy,
        z,
        statistics,
        weight,
        skip,
        key,
        probability,
        d_weight,
        d_shift if centred else None,
        d_bias if biased else None,
    )
    assert_near(dx, d_sums, dtype)
    assert_near(d_branch if probability else dx, gradients[1], dtype)
    total_near(d_weight, before[0], d_vectors[0], dtype)
    if centred:
        total_near(d_shift, before[1], d_vectors[1], dtype)
    if biased:
        total_near(d_bias, before[2], gradients[2], dtype)


@given(seed=seeds, t=st.integers(0, 9), D=widths, dtype=dtypes, probability=st.sampled_from([0.0, 0.3]))
@fresh
def test_bias_dropout_add(seed, t, D, dtype, probability):
    torch.manual_seed(seed)
    x, branch, dy = (normal(t, D, dtype=dtype) for _ in range(3))
    bias, d_bias = normal(D, dtype=dtype), normal(D)
    before = d_bias.clone()
    key = dropout_key(seed=-seed, step=0, site=0, first_token=0, device=DEVICE)
    keep = reference_keep_mask(key, t, D, probability) if probability else None
    x_, branch_, bias_ = leaves = wide(x, branch, bias)
    expected = reference_bias_dropout_add(x_, branch_, bias_, keep, probability)
    assert_near(bias_dropout_add(x, branch, bias, key, probability), expected, dtype)
    gradients = torch.autograd.grad(expected, leaves, dy.double())
    d_branch = bias_dropout_add_gradient(dy, key, probability, d_bias)
    assert_near(d_branch if probability else dy, gradients[1], dtype)
    total_near(d_bias, before, gradients[2], dtype)


def test_dropout_is_a_function_of_its_key_and_the_tokens_number():
    """Ranks that hold slices of the tokens draw what one rank would draw; another step draws anew."""

    def mask(step, site, first_token, tokens):
        key = dropout_key(seed=5, step=step, site=site, first_token=first_token, device=DEVICE)
        ones, zeros = torch.ones(tokens, 70, device=DEVICE), torch.zeros(tokens, 70, device=DEVICE)
        return bias_dropout_add(zeros, ones, None, key, 0.25) > 0

    whole = mask(3, 1, 0, 12)
    assert torch.equal(whole[5:], mask(3, 1, 5, 7))
    for other in (mask(4, 1, 0, 12), mask(3, 2, 0, 12)):
        assert 0.2 < float((whole != other).float().mean()) < 0.6
    assert 0.65 < float(whole.float().mean()) < 0.85
    neighbours = (whole[:, 1:] == whole[:, :-1]).float().mean()
    assert 0.5 < float(neighbours) < 0.75  # independent ones agree with probability 0.625


@pytest.mark.parametrize(
    "operator", [norm_weight_gradient, bias_dropout_add_gradient], ids=lambda op: op._name
)
def test_sums_over_many_tokens_are_the_same_bits_every_time(operator):
    x = normal(700, 20)
    results = []
    for _ in range(2):
        total = torch.zeros(20, device=DEVICE)
        if operator is norm_weight_gradient:
            operator(x, x, norm(x, total + 1, None, EPS)[1], total, None)
        else:
            operator(x, None, 0.0, total)
        results.append(total)
    assert torch.equal(*results)
