"""Operators of a mixture of experts by Triton against PyTorch's, on the same inputs.

Legend: t tokens, k choices of a token, n rows, D hidden, E experts.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from braid.kernels.family import TORCH, operator_family
from tests.kernels.fused.cases import DEVICE, assert_near, fresh, normal, seeds
from tests.kernels.routing import UNEVEN, check_holes, draw_choice

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


def test_what_lies_in_no_visit_is_not_read():
    check_holes(TRITON, DEVICE)
