"""Operators of a mixture of experts by Triton against PyTorch's, on the same inputs.

Legend: t tokens, k choices of a token, n rows, D hidden, E experts.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from braid.kernels.family import TORCH, operator_family
from tests.kernels.fused.cases import DEVICE, assert_near, fresh, normal, seeds
from tests.kernels.routing import UNEVEN, draw_choice

TRITON = operator_family("triton", DEVICE, torch.float32)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
kinds = st.sampled_from(UNEVEN)
capacities = st.sampled_from([None, None, 1, 3, 100])


def alike(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> None:
    """The same shapes, dtypes and strides, values within the dtype's tolerance."""
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.dtype, mine.stride()) == (other.dtype, other.stride())
        assert_near(mine, other.double(), mine.dtype)


@given(
    seed=seeds,
    tokens=st.sampled_from([0, 1, 9, 20]),
    sizes=st.sampled_from([(1, 1), (4, 2), (7, 3), (5, 5)]),
    capacity=capacities,
    kind=kinds,
    D=st.sampled_from([1, 16, 21]),
    dtype=dtypes,
)
@fresh
@torch.no_grad()
def test_rows_there_and_back(seed, tokens, sizes, capacity, kind, D, dtype):
    torch.manual_seed(seed)
    E, k = sizes
    choice_tk = draw_choice(kind, tokens, E, k).to(DEVICE)
    gates_tk, n = torch.rand(tokens, k, device=DEVICE), tokens * k if capacity is None else E * capacity
    x_tD, dy_tD, rows_nD = (normal(count, D, dtype=dtype) for count in (tokens, tokens, n))
    read = (choice_tk, gates_tk, x_tD, dy_tD, rows_nD)
    kept = [value.clone() for value in read]
    ours, theirs = (family.permute(E, capacity) for family in (TRITON, TORCH))
    sent, expected = ours(x_tD, choice_tk), theirs(x_tD, choice_tk)
    assert torch.equal(sent[0], expected[0]), "rows are copies, or zero"
    alike(sent, expected)
    alike(ours.input_gradient(rows_nD, choice_tk), theirs.input_gradient(rows_nD, choice_tk))
    ours, theirs = (family.unpermute(E, capacity) for family in (TRITON, TORCH))
    alike(ours(rows_nD, gates_tk, choice_tk), theirs(rows_nD, gates_tk, choice_tk))
    reads = (dy_tD, rows_nD, gates_tk, choice_tk)
    alike(ours.input_gradient(*reads), theirs.input_gradient(*reads))
    alike(ours(rows_nD, gates_tk.t().contiguous().t(), choice_tk), theirs(rows_nD, gates_tk, choice_tk))
    assert all(torch.equal(value, copy) for value, copy in zip(read, kept, strict=True)), "it was modified"


@torch.no_grad()
def test_what_lies_in_no_visit_is_not_read():
    """Rows that no visit fills, and the first row and token, where visits without a place could look."""
    choice_tk = torch.tensor([[0, 1], [0, 2], [0, 1]], device=DEVICE)
    permute, unpermute = TRITON.permute(4, 2), TRITON.unpermute(4, 2)
    x_tD, ones_tk = torch.tensor([[torch.inf], [1.0], [2.0]], device=DEVICE), torch.ones(3, 2, device=DEVICE)
    (rows_nD,) = permute(x_tD, choice_tk)
    assert rows_nD.flatten().tolist() == [torch.inf, 1, torch.inf, 2, 1, 0, 0, 0]
    rows_nD[5:] = torch.nan
    (y_tD,) = unpermute(rows_nD, ones_tk, choice_tk)
    assert y_tD.flatten().tolist() == [torch.inf, 2, 2]
    rows_nD[0] = torch.nan
    dy_tD = torch.tensor([[torch.nan], [3.0], [5.0]], device=DEVICE)
    d_rows_nD, d_gates_tk = unpermute.input_gradient(dy_tD, rows_nD, ones_tk, choice_tk)
    assert d_rows_nD.flatten().tolist()[1:2] + d_rows_nD.flatten().tolist()[3:] == [3, 5, 3, 0, 0, 0]
    assert d_gates_tk[1:].tolist() == [[3, 3], [0, 10]]
    d_rows_nD[5:] = torch.nan
    assert permute.input_gradient(d_rows_nD, choice_tk)[0].flatten().tolist()[1:] == [6, 5]


@torch.no_grad()
def test_what_is_wrong_is_refused_as_by_pytorch():
    x, no_rows = torch.zeros(5, 3, device=DEVICE), torch.zeros(1, 2, device=DEVICE)
    for kind in (TRITON.permute, TRITON.unpermute):
        with pytest.raises(ValueError, match="capacity=0 must be at least 1"):
            kind(4, 0)
    choice_tk = torch.tensor([[0, 4]], device=DEVICE)
    with pytest.raises(ValueError, match="3 rows, not the 2 that were sent out"):
        TRITON.unpermute(5, None)(x[:3], no_rows, choice_tk)
    with pytest.raises(ValueError, match="3 rows, not the 2 that were sent out"):
        TRITON.unpermute(5, None).input_gradient(x[:1], x[:3], no_rows, choice_tk)
    with pytest.raises(ValueError, match="9 rows, not the 10"):
        TRITON.permute(5, 2).input_gradient(torch.zeros(9, 2, device=DEVICE), choice_tk)
    if DEVICE.type == "cpu":
        with pytest.raises(ValueError, match=r"choices lie in \[0, 4\], not in \[0, 4\)"):
            TRITON.permute(4, None)(x[:1], choice_tk)
