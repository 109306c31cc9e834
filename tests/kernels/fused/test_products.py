"""Matrix products, single and grouped, against float64.

Legend: T tokens, I input features, O output features, E experts.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.kernels.fused import gemm
from braid.kernels.fused.gemm import (
    accumulate_product,
    linear,
    linear_input_gradient,
    rows_of_chunk,
    tiles_of_chunks,
)
from braid.kernels.fused.grouped_gemm import (
    grouped_input_gradient,
    grouped_linear,
    grouped_weight_gradient,
)
from braid.kernels.fused.tiles import tiles_for
from tests.kernels.fused.cases import DEVICE, assert_near, dtypes, fresh, normal, seeds, total_near, wide
from tests.kernels.fused.references import reference_grouped_linear, reference_linear

sizes = st.sampled_from([1, 15, 16, 33, 70])


@given(
    seed=seeds,
    T=st.sampled_from([0, 1, 17, 70]),
    inputs=sizes,
    outputs=sizes,
    dtype=dtypes,
    num_sms=st.integers(0, 3),
    chunks=st.integers(1, 4),
    biased=st.booleans(),
)
@fresh
def test_linear(seed, T, inputs, outputs, dtype, num_sms, chunks, biased):
    torch.manual_seed(seed)
    x, dy = normal(T, inputs, dtype=dtype), normal(T, outputs, dtype=dtype)
    weight, bias = normal(outputs, inputs, dtype=dtype), normal(outputs, dtype=dtype) if biased else None
    leaves = wide(x, weight)
    expected = reference_linear(*leaves, None if bias is None else bias.double())
    assert_near(linear(x, weight, bias, num_sms, chunks, None), expected, dtype)
    dx, d_weight = torch.autograd.grad(expected, leaves, dy.double())
    assert_near(linear_input_gradient(dy, weight, num_sms, chunks, None), dx, dtype)
    total = normal(outputs, inputs)
    before = total.clone()
    accumulate_product(total, dy, x, num_sms)
    total_near(total, before, d_weight, torch.float32)  # fp32 sums and an fp32 result, whatever the inputs


@given(T=st.integers(1, 200), outputs=sizes, chunks=st.integers(1, 5), num_sms=st.integers(1, 3))
@fresh
def test_chunks_count_their_tiles_and_change_no_bit(T, outputs, chunks, num_sms):
    x, weight = normal(T, 20), normal(outputs, 20)
    done = torch.zeros(chunks, dtype=torch.int32, device=DEVICE)
    y = linear(x, weight, None, num_sms, chunks, done)
    tiles = tiles_for("linear", (T, outputs, 20), x.dtype, DEVICE)
    counts = tiles_of_chunks(T, outputs, chunks, tiles)
    assert done.tolist() == counts
    across = -(-outputs // tiles.n)
    assert sum(counts) == -(-T // tiles.m) * across
    assert counts[0] == -(-min(T, rows_of_chunk(T, chunks, tiles)) // tiles.m) * across
    assert torch.equal(y, linear(x, weight, None, 0, 1, None))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="programs run one after the other in the interpreter only")
def test_the_first_chunk_of_tokens_is_finished_first(monkeypatch):
    """The tiles of the first chunk come first: they write its rows, all of them and no others."""
    x, weight = torch.randn(96, 8), torch.randn(70, 8)
    tiles = tiles_for("linear", (96, 70, 8), x.dtype, DEVICE)
    first_tiles = tiles_of_chunks(96, 70, 3, tiles)[0]
    rows = rows_of_chunk(96, 3, tiles)
    y = torch.full((96, 70), float("nan"))
    monkeypatch.setattr(gemm, "programs_for", lambda *arguments: 10_000)
    original = gemm.gemm_kernel

    class FirstTiles:
        """The kernel with one program for each of the first chunk's tiles."""

        def __getitem__(self, grid):
            return original[(first_tiles,)]

    monkeypatch.setattr(gemm, "gemm_kernel", FirstTiles())
    gemm.launch("linear", x, weight.t(), y, chunks=3)
    assert_near(y[:rows], x[:rows].double() @ weight.double().t(), torch.float32)
    assert torch.isnan(y[rows:]).all()


@st.composite
def ragged(draw):
    """Tokens of each expert, some without any, and how many places lie after the last."""
    counts = draw(st.lists(st.sampled_from([0, 1, 5, 16, 40]), min_size=1, max_size=4))
    return counts, draw(st.sampled_from([0, 3]))


@given(seed=seeds, batch=ragged(), inputs=sizes, outputs=sizes, dtype=dtypes, num_sms=st.integers(0, 3))
@fresh
def test_grouped(seed, batch, inputs, outputs, dtype, num_sms):
    torch.manual_seed(seed)
    counts, spare = batch
    rows = sum(counts) + spare
    offsets = torch.tensor([0, *counts], dtype=torch.int32, device=DEVICE).cumsum(0, dtype=torch.int32)
    x, dy = normal(rows, inputs, dtype=dtype), normal(rows, outputs, dtype=dtype)
    weight = normal(len(counts), outputs, inputs, dtype=dtype)
    leaves = wide(x, weight)
    expected = reference_grouped_linear(*leaves, offsets)
    assert_near(grouped_linear(x, weight, offsets, num_sms), expected, dtype)
    assert torch.equal(grouped_linear(x, weight, offsets, num_sms), grouped_linear(x, weight, offsets, 0)), (
        "another number of multiprocessors gave other bits"
    )
    dx, d_weight = torch.autograd.grad(expected, leaves, dy.double())
    assert_near(grouped_input_gradient(dy, weight, offsets, num_sms), dx, dtype)
    total = normal(len(counts), outputs, inputs)
    before = total.clone()
    grouped_weight_gradient(total, dy, x, offsets, num_sms)
    total_near(total, before, d_weight, torch.float32)
