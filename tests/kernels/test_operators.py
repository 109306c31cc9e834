"""Every operator with plain tensors in and out against float64 autograd."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.kernels.operators.embedding import VocabularyEmbedding
from braid.kernels.operators.linear import Residual
from braid.kernels.operators.norm import LayerNorm, RMSNorm
from tests.kernels.cases import CASES, EPSILON, assert_close, check, layer_norm, normal, prepare, rms_norm

seeds = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
@given(seed=seeds, tokens=st.integers(1, 9), width=st.integers(1, 19))
@settings(max_examples=25, deadline=None)
def test_equals_autograd(make, seed, tokens, width):
    torch.manual_seed(seed)
    check(make(tokens, width, torch.float64), torch.float64)


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_dtypes_accumulate_in_fp32(make, dtype):
    torch.manual_seed(0)
    check(make(37, 65, dtype), dtype)
    check(make(8, 64, dtype), dtype)


@pytest.mark.parametrize("make", [rms_norm, layer_norm], ids=lambda make: make.__name__)
@given(seed=seeds, tokens=st.integers(1, 9), width=st.integers(1, 19))
@settings(max_examples=10, deadline=None)
def test_norm_adds_the_gradient_of_the_skip(make, seed, tokens, width):
    torch.manual_seed(seed)
    case = make(tokens, width, torch.float64)
    before = prepare(case.operator, torch.float64)
    dy, d_skip = normal(tokens, width, dtype=torch.float64), normal(tokens, width, dtype=torch.float64)
    kept = d_skip.clone()
    with torch.no_grad():
        reads = case.input_reads(dy, case.inputs, case.operator(*case.inputs)[1:])
        (alone,) = case.operator.input_gradient(*reads)
        (together,) = case.operator.input_gradient(*reads, d_skip)
        case.operator.weight_gradient(*reads, d_skip)
        first = {name: total - before[name] for name, total in case.operator.gradients.items()}
        case.operator.weight_gradient(*reads)
    assert_close(together, alone + d_skip)
    assert torch.equal(d_skip, kept)
    for name, total in case.operator.gradients.items():
        assert_close(total, before[name] + 2 * first[name])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@torch.no_grad()
def test_norm_statistics_are_wide(dtype):
    wide = torch.promote_types(dtype, torch.float32)
    torch.manual_seed(0)
    x_tD = (normal(6, 300, dtype=torch.float64) + 2).to(dtype)
    rms, layer = (kind(hidden=300, eps=EPSILON, dtype=dtype) for kind in (RMSNorm, LayerNorm))
    for operator in (rms, layer):
        prepare(operator, wide)
    _, rstd_t1 = rms(x_tD)
    _, statistics_t2 = layer(x_tD)
    exact = x_tD.double()
    assert rstd_t1.dtype == statistics_t2.dtype == wide
    assert_close(rstd_t1, exact.pow(2).mean(-1, keepdim=True).add(EPSILON).rsqrt(), 1e-6)
    mean_t, variance_t = exact.mean(-1), exact.var(-1, correction=0)
    assert_close(statistics_t2, torch.stack((mean_t, variance_t.add(EPSILON).rsqrt()), dim=1), 1e-6)


@torch.no_grad()
def test_residual_passes_one_gradient_to_both_without_copying():
    dy = torch.randn(3, 4)
    assert all(gradient is dy for gradient in Residual(hidden=4, bias=False).input_gradient(dy))


@pytest.mark.parametrize(("first_row", "rows", "vocabulary"), [(0, 0, 5), (3, 3, 5), (-1, 2, 5)])
def test_impossible_vocabulary_rows_are_refused(first_row, rows, vocabulary):
    with pytest.raises(ValueError, match="at least one row"):
        VocabularyEmbedding(rows=rows, hidden=2, first_row=first_row, vocabulary=vocabulary)


@pytest.mark.parametrize("token", [-1, 5])
@pytest.mark.parametrize("rows", [5, 2])
@torch.no_grad()
def test_tokens_outside_the_vocabulary_are_refused(token, rows):
    embedding = VocabularyEmbedding(rows=rows, hidden=2, first_row=0, vocabulary=5)
    with pytest.raises(ValueError, match="vocabulary of 5"):
        embedding(torch.tensor([0, token]))
