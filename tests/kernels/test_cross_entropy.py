"""Vocabulary-parallel cross-entropy against `torch.nn.functional.cross_entropy`, whole and cut unevenly.

Legend: T tokens, V vocabulary rows.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from braid.kernels.family import TORCH, operator_family
from braid.kernels.operators import cross_entropy
from braid.kernels.operators.cross_entropy import CrossEntropyLoss, CrossEntropyStatistics
from tests.kernels.cases import TOLERANCE, assert_close, normal, wide_leaf

TRITON = operator_family("triton", torch.device("cpu"), torch.float32)

Cut = list[int]
"""Rows of each rank."""

cuts = st.lists(st.integers(1, 9), min_size=1, max_size=3)


def parallel_loss(
    logits_TV: Tensor,
    targets_T: Tensor,
    cut: Cut,
    scale: Tensor | float,
    kind: type[CrossEntropyStatistics] = CrossEntropyStatistics,
    **terms: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, log-partition and gradient as the ranks of a group that is cut like this compute them."""
    shards = [shard.clone() for shard in logits_TV.split(cut, dim=1)]
    first = [sum(cut[:rank]) for rank in range(len(cut))]
    ranks = [
        kind(rows=rows, first_row=begin, vocabulary=sum(cut), **terms)
        for rows, begin in zip(cut, first, strict=True)
    ]
    with torch.no_grad():
        statistics = [rank(shard, targets_T)[0] for rank, shard in zip(ranks, shards, strict=True)]
        assert all(torch.equal(s, x) for s, x in zip(shards, logits_TV.split(cut, dim=1), strict=True))
        losses_T, log_partition_T = CrossEntropyLoss(groups=len(cut))(torch.cat(statistics))
        gradients = []
        for rank, shard in zip(ranks, shards, strict=True):
            (d_shard,) = rank.input_gradient(shard, log_partition_T, targets_T, scale)
            assert d_shard.data_ptr() == shard.data_ptr()
            gradients.append(d_shard)
    return losses_T, log_partition_T, torch.cat(gradients, dim=1)


def check(
    logits_TV: Tensor,
    targets_T: Tensor,
    cut: Cut,
    scale: Tensor | float,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    **kind: Any,
) -> None:
    """Compare with float64 autograd: the losses without smoothing and z-loss, the gradients with them."""
    tolerance = TOLERANCE[logits_TV.dtype]
    leaf = wide_leaf(logits_TV)
    expected_T = F.cross_entropy(leaf, targets_T, reduction="none")
    sought_T = F.cross_entropy(leaf, targets_T, reduction="none", label_smoothing=label_smoothing)
    sought_T = sought_T + z_loss * leaf.logsumexp(-1).square()
    scale_T = torch.as_tensor(scale, dtype=leaf.dtype).expand(len(targets_T))
    (d_expected,) = torch.autograd.grad((sought_T * scale_T).sum(), leaf)
    terms = {"label_smoothing": label_smoothing, "z_loss": z_loss}
    losses_T, log_partition_T, d_logits_TV = parallel_loss(logits_TV, targets_T, cut, scale, **terms, **kind)
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    assert losses_T.dtype == log_partition_T.dtype == wide
    assert d_logits_TV.dtype == logits_TV.dtype
    narrow = min(tolerance, TOLERANCE[wide])
    assert_close(losses_T, expected_T, narrow)
    assert_close(log_partition_T, leaf.logsumexp(-1), narrow)
    assert_close(d_logits_TV, d_expected, tolerance)
    assert not d_logits_TV[scale_T == 0].any(), "a masked token has a gradient"


@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.integers(1, 9),
    cut=cuts,
    scale=st.floats(-2, 2),
    spread=st.sampled_from([1.0, 30.0, 1e4]),
    kind_of_scale=st.sampled_from(["number", "tensor", "tokens"]),
    smoothing=st.sampled_from([0.0, 0.1, 0.9]),
    z_loss=st.sampled_from([0.0, 1e-4, 0.5]),
)
@settings(max_examples=80, deadline=None)
def test_equals_autograd(seed, tokens, cut, scale, spread, kind_of_scale, smoothing, z_loss):
    torch.manual_seed(seed)
    logits_TV = spread * normal(tokens, sum(cut), dtype=torch.float64)
    targets_T = torch.randint(sum(cut), (tokens,))
    tensor = torch.tensor(scale, dtype=torch.float64)
    scales = {"number": scale, "tensor": tensor, "tokens": tensor * torch.randint(3, (tokens,))}
    check(logits_TV, targets_T, cut, scales[kind_of_scale], smoothing, z_loss)


@pytest.mark.parametrize("family", [TORCH, TRITON], ids=["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cut", [[17, 16, 17], [4100, 9]])
def test_narrow_dtypes(dtype, cut, family):
    torch.manual_seed(0)
    logits_TV, targets_T = 4 * normal(13, sum(cut), dtype=dtype), torch.randint(sum(cut), (13,))
    for scale in (torch.tensor(0.125), torch.randn(13) * torch.randint(2, (13,))):
        for terms in ((0.0, 0.0), (0.3, 0.02)):
            check(logits_TV, targets_T, cut, scale, *terms, kind=family.cross_entropy_statistics)


@pytest.mark.parametrize("chunk_bytes", [1, 200, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_chunks_change_nothing(monkeypatch, chunk_bytes, dtype):
    torch.manual_seed(0)
    logits_TV, targets_T = normal(11, 12, dtype=dtype), torch.randint(12, (11,))
    expected = parallel_loss(logits_TV, targets_T, [5, 7], 1.0)
    monkeypatch.setattr(cross_entropy, "_CPU_CHUNK_BYTES", chunk_bytes)
    for actual, reference in zip(parallel_loss(logits_TV, targets_T, [5, 7], 1.0), expected, strict=True):
        assert_close(actual, reference)


@torch.no_grad()
def test_targets_that_are_no_tokens_are_refused():
    for family in (TORCH, TRITON):
        operator = family.cross_entropy_statistics(rows=3, first_row=0, vocabulary=6)
        for target in (-100, 6):
            with pytest.raises(ValueError, match=f"{target}.* not in a vocabulary of 6"):
                operator(torch.zeros(2, 3), torch.tensor([0, target]))
