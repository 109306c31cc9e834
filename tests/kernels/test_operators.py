"""Every operator with plain tensors in and out against float64 autograd."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.kernels.operators.embedding import VocabularyEmbedding
from tests.kernels.cases import CASES, check

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
