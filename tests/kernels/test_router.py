"""The router against plain autograd in float64, and its choice against Python's sort.

Legend: t tokens, D hidden, E experts, k choices of a token.
"""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from braid.kernels.operators.router import Router
from tests.kernels.cases import assert_close, normal, prepare, wide_leaf
from tests.kernels.routing import UNEVEN, preference

FP64 = torch.float64
seeds = st.integers(0, 2**32 - 1)
sizes = st.sampled_from([(1, 1), (2, 1), (4, 2), (7, 3), (5, 5), (33, 4)])


def made(E, k, *, D=6, dtype=FP64, normalised=False, **more) -> Router:
    router = Router(hidden=D, experts=E, top_k=k, normalised=normalised, dtype=dtype, **more)
    if router.bias is not None:
        nn.init.zeros_(router.bias)
    return router


def best(compared_tE: Tensor, k: int) -> list[list[int]]:
    """The k best of every token; of equal ones the first."""
    return [sorted(range(len(row)), key=lambda e, row=row: (-row[e], e))[:k] for row in compared_tE.tolist()]


def share(logits_tE: Tensor) -> Tensor:
    """Softmax, by its formula."""
    return logits_tE.exp() / logits_tE.exp().sum(-1, keepdim=True)


def reference_gates(logits_tE: Tensor, choice_tk: Tensor, after: bool, normalised: bool) -> Tensor:
    if after:
        return share(logits_tE.gather(1, choice_tk))
    gates_tk = share(logits_tE).gather(1, choice_tk)
    return gates_tk / gates_tk.sum(-1, keepdim=True) if normalised else gates_tk


def reference_losses(logits_tE: Tensor, load_E: Tensor, balance: float, z: float) -> Tensor:
    """The two sums over tokens."""
    balances = logits_tE.shape[1] * (load_E * share(logits_tE)).sum()
    return torch.stack((balance * balances, z * (logits_tE.exp().sum(-1).log() ** 2).sum()))


def random_load(E: int) -> Tensor:
    load_E = torch.rand(E, dtype=FP64)
    return load_E / load_E.sum()


ROUTINGS = st.fixed_dictionaries(
    {
        "softmax_after": st.booleans(),
        "normalised": st.booleans(),
        "balance_loss": st.sampled_from([0.0, 0.3]),
        "z_loss": st.sampled_from([0.0, 0.2]),
        "bias_balanced": st.booleans(),
    }
)


@given(
    seed=seeds,
    tokens=st.integers(0, 9),
    sizes=sizes,
    routing=ROUTINGS,
    kind=st.sampled_from(UNEVEN),
    dtype=st.sampled_from([FP64, torch.bfloat16]),
)
@settings(max_examples=100, deadline=None)
def test_equals_autograd(seed, tokens, sizes, routing, kind, dtype):
    """Numbers in bfloat16 are rounded at the ends only: the gradient of the input, once."""
    torch.manual_seed(seed)
    main = torch.promote_types(dtype, torch.float32)
    tolerance, rounding = (1e-11, 0) if dtype is FP64 else (5e-6, 2**-8)
    close = partial(assert_close, tolerance=tolerance)
    E, k = sizes
    names = ("softmax_after", "normalised", "balance_loss", "z_loss", "bias_balanced")
    after, normalised, balance, z, biased = (routing[name] for name in names)
    router = made(E, k, dtype=dtype, **routing)
    before = prepare(router, main)
    x_tD, d_gates_tk = normal(tokens, 6, dtype=dtype), normal(tokens, k, dtype=main)
    with torch.no_grad():
        x_tD[:, 0], router.weight[:, 0] = 1, preference(kind, E, k)
        if biased:
            router.bias.normal_()
        gates_tk, choice_tk, counts_E, scores_tE = router(x_tD)

    x, weight = wide_leaf(x_tD), wide_leaf(router.weight)
    logits_tE = torch.einsum("td,ed->te", x, weight)
    assert scores_tE.dtype == gates_tk.dtype == main
    close(scores_tE, logits_tE)
    compared_tE = scores_tE
    if biased:
        compared_tE = (scores_tE if after else share(scores_tE)) + router.bias
    assert choice_tk.tolist() == best(compared_tE, k)
    assert counts_E.tolist() == [int((choice_tk == expert).sum()) for expert in range(E)]
    assert (choice_tk.dtype, counts_E.dtype) == (torch.int64, torch.int64)
    expected_tk = reference_gates(logits_tE, choice_tk, after, normalised)
    close(gates_tk, expected_tk)

    load_E = random_load(E).to(main)
    losses_2 = reference_losses(logits_tE, load_E.double(), balance, z)
    close(router.losses(scores_tE, load_E), losses_2)
    total = (expected_tk * d_gates_tk).sum() + 0.37 * losses_2.sum()
    d_x, d_weight = torch.autograd.grad(total, (x, weight))
    reads = (d_gates_tk, scores_tE, choice_tk, load_E if balance else None, 0.37 if balance or z else None)
    with torch.no_grad():
        kept = [value.clone() for value in (d_gates_tk, scores_tE, choice_tk, load_E, x_tD)]
        (found_tD,) = router.input_gradient(*reads)
        assert found_tD.dtype == dtype
        torch.testing.assert_close(found_tD.double(), d_x, rtol=rounding, atol=10 * tolerance)
        for _ in range(2):
            router.weight_gradient(*reads[:3], x_tD, *reads[3:])
    close(router.gradients["weight"], before["weight"] + 2 * d_weight)
    if biased:
        visits_E = counts_E.double()
        close(router.gradients["bias"], before["bias"] + 2 * E * (visits_E - visits_E.mean()))
    read = (d_gates_tk, scores_tE, choice_tk, load_E, x_tD)
    assert all(map(torch.equal, read, kept)), "it was modified"


@given(
    seed=seeds,
    tokens=st.integers(1, 9),
    E=st.sampled_from([2, 4, 16]),
    jitter=st.sampled_from([0.01, 0.2, 5.0]),
    z=st.sampled_from([0.0, 0.2]),
    away=st.sampled_from([-3.0, 0.0, 3.0]),
)
@settings(max_examples=60, deadline=None)
def test_gates_of_sparse_mixer_are_those_of_transformers(seed, tokens, E, jitter, z, away):
    """With scores on either side of zero (``away`` from it): there the best one's own size may not count."""
    torch.manual_seed(seed)
    router = made(E, 2, mixer_jitter=jitter, z_loss=z)
    before = prepare(router, FP64)
    x_tD, d_gates_tk = normal(tokens, 6, dtype=FP64), normal(tokens, 2, dtype=FP64)
    with torch.no_grad():
        x_tD[:, 0], router.weight[:, 0] = 1, away
        gates_tk, choice_tk, _, scores_tE = router(x_tD)
    x, weight = wide_leaf(x_tD), wide_leaf(router.weight)
    logits_tE = torch.einsum("td,ed->te", x, weight)
    expected_tk, chosen_tk = sparsemixer(logits_tE, jitter, training=False)
    assert_close(gates_tk, expected_tk)
    assert torch.equal(choice_tk, chosen_tk)
    losses_2 = reference_losses(logits_tE, torch.zeros(E), 0.0, z)
    total = (expected_tk * d_gates_tk).sum() + 0.37 * losses_2.sum()
    d_x, d_weight = torch.autograd.grad(total, (x, weight))
    reads = (d_gates_tk, scores_tE, choice_tk)
    with torch.no_grad():
        assert_close(router.input_gradient(*reads, None, 0.37 if z else None)[0], d_x)
        router.weight_gradient(*reads, x_tD, None, 0.37 if z else None)
    assert_close(router.gradients["weight"], before["weight"] + d_weight)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@torch.no_grad()
def test_of_equal_experts_the_first_is_chosen(after, biased):
    dtype = torch.bfloat16
    torch.manual_seed(0)
    router = made(33, 5, D=2, softmax_after=after, dtype=dtype, bias_balanced=biased)
    router.weight.copy_(torch.randint(3, (33, 2)))
    _, choice_tk, _, scores_tE = router(torch.randint(3, (200, 2)).to(dtype))
    assert len(scores_tE.unique()) < 33
    assert choice_tk.tolist() == best(scores_tE, 5)
    _, choice_tk, counts_E, _ = router(torch.zeros(4, 2, dtype=dtype))
    assert choice_tk.tolist() == [[0, 1, 2, 3, 4]] * 4
    assert counts_E.tolist() == [4] * 5 + [0] * 28


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("normalised", [False, True])
@torch.no_grad()
def test_gates_of_zero_give_numbers(after, normalised):
    """Logits so far apart that all probabilities but one are 0, and a bias that does not choose that one."""
    router = made(
        3, 2, D=1, softmax_after=after, normalised=normalised, dtype=torch.float32, bias_balanced=True
    )
    router.weight.copy_(torch.tensor([[0.0], [-3000.0], [-2000.0]]))
    router.bias.copy_(torch.tensor([-1e4, 0.0, 0.0]))
    gates_tk, choice_tk, _, scores_tE = router(torch.ones(4, 1))
    assert sorted(choice_tk[0].tolist()) == [1, 2]
    (d_x,) = router.input_gradient(torch.ones(4, 2), scores_tE, choice_tk, None, None)
    assert bool(gates_tk.isfinite().all())
    assert bool(d_x.isfinite().all())
    assert float(gates_tk.sum()) == (4 if router.normalised else 0)


@torch.no_grad()
def test_evenly_routed_tokens_visit_all_experts_alike():
    torch.manual_seed(0)
    router = made(6, 4, evenly=True)
    prepare(router, FP64)
    gates_tk, choice_tk, counts_E, scores_tE = router(normal(7, 6, dtype=FP64))
    assert int(counts_E.max() - counts_E.min()) <= 1
    assert all(len(set(own)) == 4 for own in choice_tk.tolist()), "a token visits an expert once"
    assert_close(gates_tk, reference_gates(scores_tE, choice_tk, False, False))
