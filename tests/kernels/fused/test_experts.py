"""Router, permutation and its way back against plain Python and float64 autograd.

Legend: T tokens, E experts, k choices, D hidden.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.kernels.fused.permute import (
    combine_rows,
    combine_weight_gradient,
    gather_rows,
)
from braid.kernels.fused.router import route, route_gradient
from tests.kernels.fused.cases import DEVICE, assert_near, dtypes, fresh, normal, seeds, wide
from tests.kernels.fused.references import reference_combine_rows, reference_gather_rows, reference_route

experts = st.sampled_from([(1, 1), (2, 1), (4, 2), (7, 3), (33, 4)])


@given(
    seed=seeds,
    T=st.sampled_from([0, 1, 9, 150]),
    sizes=experts,
    capacity=st.sampled_from([1, 4, 1000]),
    normalise=st.booleans(),
    dtype=dtypes,
    ties=st.booleans(),
)
@fresh
def test_route(seed, T, sizes, capacity, normalise, dtype, ties):
    torch.manual_seed(seed)
    E, k = sizes
    logits = normal(T, E, dtype=dtype)
    if ties:
        logits = logits.round()
    weights, chosen, slots, sources, offsets, loss, share = route(logits, k, capacity, normalise)
    (leaf,) = wide(logits)
    expected, order, places, balance = reference_route(leaf, k, capacity, normalise)
    assert torch.equal(chosen.long(), order)
    assert slots.tolist() == places
    assert_near(weights, expected, torch.float32)
    assert_near(loss, balance, torch.float32)
    taken = {slot: token * k + place for token, row in enumerate(places) for place, slot in enumerate(row)}
    taken.pop(-1, None)
    assert sources.tolist() == [taken.get(place, -1) for place in range(len(sources))]
    counts = [min(capacity, int((chosen == expert).sum())) for expert in range(E)]
    assert offsets.tolist() == [sum(counts[:expert]) for expert in range(E + 1)]
    assert offsets[-1] <= len(sources)

    d_weights = torch.randn(T, k, device=DEVICE)
    if T:
        loss_of_all = (expected * d_weights.double()).sum() + 0.3 * balance
        (d_logits,) = torch.autograd.grad(loss_of_all, leaf)
        actual = route_gradient(d_weights, weights, chosen, logits, share, 0.3, normalise)
        assert_near(actual, d_logits, dtype)


@given(
    seed=seeds,
    T=st.sampled_from([0, 1, 20]),
    sizes=experts,
    capacity=st.sampled_from([2, 1000]),
    D=st.sampled_from([1, 16, 21]),
    dtype=dtypes,
)
@fresh
def test_to_the_experts_and_back(seed, T, sizes, capacity, D, dtype):
    torch.manual_seed(seed)
    E, k = sizes
    weights, _, slots, sources, *_ = route(normal(T, E), k, capacity, True)
    x, dy = normal(T, D, dtype=dtype), normal(T, D, dtype=dtype)
    (x_,) = wide(x)
    sorted_x = gather_rows(x, sources, k, None)
    expected = reference_gather_rows(x_, sources, k, None) if T else x_
    assert_near(sorted_x, expected, dtype)
    if not T:
        return
    d_sorted = normal(*sorted_x.shape, dtype=dtype)
    (dx,) = torch.autograd.grad(expected, x_, d_sorted.double())
    assert_near(combine_rows(d_sorted, slots, None), dx, dtype)

    sorted_, weights_ = leaves = wide(sorted_x, weights)
    expected = reference_combine_rows(sorted_, slots, weights_)
    assert_near(combine_rows(sorted_x, slots, weights), expected, dtype)
    d_sorted_, d_weights = torch.autograd.grad(expected, leaves, dy.double())
    assert_near(gather_rows(dy, sources, k, weights), d_sorted_, dtype)
    assert_near(combine_weight_gradient(dy, sorted_x, slots), d_weights, torch.float32)
