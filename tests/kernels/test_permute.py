"""Rows to the experts and back against a matrix that plain Python fills, and autograd through it in float64.

Legend: t tokens, k choices of a token, n rows, D hidden, E experts, S sources.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from braid.kernels.family import TORCH, operator_family
from braid.kernels.operators.permute import Permute, Regroup, Unpermute
from tests.kernels.cases import assert_close, normal, wide_leaf
from tests.kernels.routing import UNEVEN, draw_choice, rows_of_visits

FP64 = torch.float64
seeds = st.integers(0, 2**32 - 1)
sizes = st.sampled_from([(1, 1), (2, 1), (4, 2), (7, 3), (5, 5), (33, 4)])
capacities = st.sampled_from([None, 1, 2, 5, 100])
kinds = st.sampled_from(UNEVEN)
TRITON = operator_family("triton", torch.device("cpu"), torch.float32)
families = pytest.mark.parametrize("family", [TORCH, TRITON], ids=["torch", "triton"])


def selection(choice_tk: Tensor, experts: int, capacity: int | None) -> Tensor:
    """Rows x visits (float64): 1 where the visit lies in the row."""
    rows = choice_tk.numel() if capacity is None else experts * capacity
    matrix = torch.zeros(rows, choice_tk.numel(), dtype=FP64)
    for (token, number), row in rows_of_visits(choice_tk, experts, capacity).items():
        matrix[row, token * choice_tk.shape[1] + number] = 1
    return matrix


def reference_rows(x_tD: Tensor, choice_tk: Tensor, experts: int, capacity: int | None) -> Tensor:
    return selection(choice_tk, experts, capacity) @ x_tD.repeat_interleave(choice_tk.shape[1], dim=0)


def reference_sum(
    rows_nD: Tensor, gates_tk: Tensor, choice_tk: Tensor, experts: int, capacity: int | None
) -> Tensor:
    visits = selection(choice_tk, experts, capacity).t() @ rows_nD
    visits_tkD = visits.view(*choice_tk.shape, rows_nD.shape[1])
    return (visits_tkD * gates_tk.unsqueeze(-1)).sum(1)


@given(
    seed=seeds, tokens=st.integers(0, 12), sizes=sizes, capacity=capacities, kind=kinds, D=st.integers(1, 9)
)
@settings(max_examples=80, deadline=None)
def test_there_and_back_equal_autograd(seed, tokens, sizes, capacity, kind, D):
    torch.manual_seed(seed)
    E, k = sizes
    choice_tk = draw_choice(kind, tokens, E, k)
    x_tD = normal(tokens, D, dtype=FP64)
    x = wide_leaf(x_tD)
    expected = reference_rows(x, choice_tk, E, capacity)
    d_rows_nD, rows_nD = normal(*expected.shape, dtype=FP64), normal(*expected.shape, dtype=FP64)
    (d_x,) = torch.autograd.grad(expected, x, d_rows_nD)
    gates_tk, dy_tD = normal(tokens, k, dtype=FP64), normal(tokens, D, dtype=FP64)
    rows, gates = wide_leaf(rows_nD), wide_leaf(gates_tk)
    y = reference_sum(rows, gates, choice_tk, E, capacity)
    d_rows, d_gates = torch.autograd.grad(y, (rows, gates), dy_tD)
    read = (x_tD, d_rows_nD, rows_nD, gates_tk, dy_tD, choice_tk)
    kept = [value.clone() for value in read]
    with torch.no_grad():
        permute, unpermute = Permute(E, capacity), Unpermute(E, capacity)
        assert torch.equal(permute(x_tD, choice_tk)[0], expected), "rows are copies"
        assert_close(permute.input_gradient(d_rows_nD, choice_tk)[0], d_x)
        assert_close(unpermute(rows_nD, gates_tk, choice_tk)[0], y)
        actual_rows, actual_gates = unpermute.input_gradient(dy_tD, rows_nD, gates_tk, choice_tk)
        assert_close(actual_rows, d_rows)
        assert_close(actual_gates, d_gates)
    assert all(map(torch.equal, read, kept)), "it was modified"


@pytest.mark.parametrize(("kind", "capacity"), [("hot", None), ("unvisited", 50), ("zipf", 3)])
@torch.no_grad()
def test_rows_of_16_bits_are_copied_and_sums_rounded_once(kind, capacity):
    torch.manual_seed(0)
    E, k, bf16 = 8, 3, torch.bfloat16
    choice_tk = draw_choice(kind, 40, E, k)
    x_tD, dy_tD, gates_tk = normal(40, 33, dtype=bf16), normal(40, 33, dtype=bf16), torch.rand(40, k)
    permute, unpermute = Permute(E, capacity), Unpermute(E, capacity)
    (rows_nD,) = permute(x_tD, choice_tk)
    assert torch.equal(rows_nD.double(), reference_rows(x_tD.double(), choice_tk, E, capacity))
    (y_tD,) = unpermute(rows_nD, gates_tk, choice_tk)
    d_rows_nD, d_gates_tk = unpermute.input_gradient(dy_tD, rows_nD, gates_tk, choice_tk)
    (d_x_tD,) = permute.input_gradient(d_rows_nD, choice_tk)
    assert rows_nD.dtype == y_tD.dtype == d_rows_nD.dtype == d_x_tD.dtype == bf16
    assert d_gates_tk.dtype == torch.float32
    ones_tk = torch.ones(40, k, dtype=FP64)
    sums = (
        (y_tD, reference_sum(rows_nD.double(), gates_tk.double(), choice_tk, E, capacity)),
        (d_x_tD, reference_sum(d_rows_nD.double(), ones_tk, choice_tk, E, capacity)),
    )
    for actual, exact in sums:
        assert bool(((actual - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all())
    rows = rows_of_visits(choice_tk, E, capacity)
    found_tk = torch.tensor([[(t, j) in rows for j in range(k)] for t in range(40)])
    assert_close(d_gates_tk, (x_tD.double() * dy_tD.double()).sum(-1, keepdim=True) * found_tk, 1e-5)


@families
@torch.no_grad()
def test_what_lies_in_no_visit_is_not_read(family):
    """Rows that no visit fills, and the first row and token, where visits without a place could look."""
    choice_tk = torch.tensor([[0, 1], [0, 2], [0, 1]])
    permute, unpermute = family.permute(4, 2), family.unpermute(4, 2)
    x_tD = torch.tensor([[torch.inf], [1.0], [2.0]])
    (rows_nD,) = permute(x_tD, choice_tk)
    assert rows_nD.flatten().tolist() == [torch.inf, 1, torch.inf, 2, 1, 0, 0, 0]
    rows_nD[5:] = torch.nan
    (y_tD,) = unpermute(rows_nD, torch.ones(3, 2), choice_tk)
    assert y_tD.flatten().tolist() == [torch.inf, 2, 2]
    rows_nD[0] = torch.nan
    dy_tD = torch.tensor([[torch.nan], [3.0], [5.0]])
    d_rows_nD, d_gates_tk = unpermute.input_gradient(dy_tD, rows_nD, torch.ones(3, 2), choice_tk)
    assert d_rows_nD.flatten().tolist()[1:2] + d_rows_nD.flatten().tolist()[3:] == [3, 5, 3, 0, 0, 0]
    assert d_gates_tk[1:].tolist() == [[3, 3], [0, 10]]
    d_rows_nD[5:] = torch.nan
    assert permute.input_gradient(d_rows_nD, choice_tk)[0].flatten().tolist()[1:] == [6, 5]


@given(seed=seeds, S=st.integers(1, 5), E=st.integers(1, 5), largest=st.integers(0, 4), back=st.booleans())
@settings(max_examples=60, deadline=None)
def test_regrouping_sorts_by_expert_and_its_gradient_by_source(seed, S, E, largest, back):
    torch.manual_seed(seed)
    sizes_SE = torch.randint(largest + 1, (S, E))
    by_source = [(s, e, i) for s in range(S) for e in range(E) for i in range(int(sizes_SE[s, e]))]
    by_expert = sorted(by_source, key=lambda label: (label[1], label[0], label[2]))
    came, wanted = (torch.tensor(rows).view(-1, 3) for rows in (by_source, by_expert))
    if back:
        came, wanted = wanted, came
    regroup = Regroup(back=back)
    (there,) = regroup(came, sizes_SE)
    (returned,) = regroup.input_gradient(there, sizes_SE)
    assert there.tolist() == wanted.tolist()
    assert returned.tolist() == came.tolist()
    if 1 in (S, E):
        assert there is came
        assert returned is there


def test_what_is_wrong_is_refused():
    choice_tk, zeros = torch.tensor([[0, 4]]), torch.zeros
    with pytest.raises(ValueError, match=r"choices lie in \[0, 4\], not in \[0, 4\)"):
        Permute(4, None)(zeros(1, 2), choice_tk)
    with pytest.raises(ValueError, match="3 rows, not the 2 that were sent out"):
        Unpermute(5, None)(zeros(3, 2), zeros(1, 2), choice_tk)
    with pytest.raises(ValueError, match="9 rows, not the 10"):
        Permute(5, 2).input_gradient(zeros(9, 2), choice_tk)
