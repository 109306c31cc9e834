"""Vocabulary-parallel cross-entropy: statistics in one pass by online softmax, and the gradient in place.

The same contract as `braid.kernels.operators.cross_entropy`: a rank's columns of the logits are reduced to
maximum, sum of exp(logit - maximum), and the target's logit (0 if another rank holds it); no probabilities
are stored. Online softmax: Milakov and Gimelshein 2018.

Legend: T tokens, V local vocabulary rows, 3 statistics per token (fp32).
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from braid.kernels.triton.launch import ceil_div, check, check_indices, power_of_two

_UNKNOWN: Final = (1 << 31) - 1
"""Stands for the size of a vocabulary that is not known."""
_WIDEST_TILE: Final = 4096


@triton.jit
def statistics_kernel(
    logits_ptr,
    targets_ptr,
    statistics_ptr,
    width,
    stride,
    first_row,
    vocabulary,
    BLOCK: tl.constexpr,
):
    """One token per program. A target outside the vocabulary makes its statistics NaN."""
    token = tl.program_id(0).to(tl.int64)
    logits_ptr += token * stride
    maximum = float("-inf")
    total = 0.0
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        logit = tl.load(logits_ptr + column, mask=column < width, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(maximum, tl.max(logit, axis=0))
        # Where everything so far is -inf, differences to it would be NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(maximum - base) + tl.sum(tl.exp(logit - base), axis=0)
        maximum = higher
    target = tl.load(targets_ptr + token)
    local = target - first_row
    here = (local >= 0) & (local < width)
    chosen = tl.load(logits_ptr + local, mask=here, other=0).to(tl.float32)
    chosen = tl.where((target < 0) | (target >= vocabulary), float("nan"), chosen)
    statistics_ptr += token * 3
    tl.store(statistics_ptr, maximum)
    tl.store(statistics_ptr + 1, total)
    tl.store(statistics_ptr + 2, chosen)


@triton.jit
def gradient_kernel(
    logits_ptr,
    log_partition_ptr,
    targets_ptr,
    scale_ptr,
    width,
    stride,
    first_row,
    factor,
    tiles_across,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    token = (program // tiles_across).to(tl.int64)
    column = (program % tiles_across) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    logits_ptr += token * stride
    logit = tl.load(logits_ptr + column, mask=mask, other=0).to(tl.float32)
    d = tl.exp(logit - tl.load(log_partition_ptr + token))
    d = tl.where(column == tl.load(targets_ptr + token) - first_row, d - 1, d)
    if SCALED:
        factor *= tl.load(scale_ptr).to(tl.float32)
    tl.store(logits_ptr + column, (d * factor).to(logits_ptr.dtype.element_ty), mask=mask)


def tile_of(width: int) -> tuple[int, int]:
    """Columns of a tile and its warps."""
    block = power_of_two(min(width, _WIDEST_TILE), 16)
    return block, 8 if block >= _WIDEST_TILE else 4


def _check(name: str, logits: Tensor, targets: Tensor, first_row: int, vocabulary: int | None) -> None:
    check(name, "logits", logits, (None, None))
    check(name, "targets", targets, (logits.shape[0],), like=logits, dtypes=(torch.int64,))
    check_indices(name, "targets", targets, _UNKNOWN if vocabulary is None else vocabulary)


@custom_op("braid::cross_entropy_statistics", mutates_args=())
def cross_entropy_statistics(
    logits: Tensor, targets: Tensor, first_row: int, vocabulary: int | None
) -> Tensor:
    """Return statistics (T x 3, fp32) of columns ``first_row`` to ``first_row`` + V of the logits (T x V).

    ``targets`` (T, int64) are rows of the whole vocabulary, whose size may be None: not known.
    """
    _check("cross_entropy_statistics", logits, targets, first_row, vocabulary)
    tokens, width = logits.shape
    statistics = logits.new_empty(tokens, 3, dtype=torch.float32)
    if tokens:
        block, warps = tile_of(width)
        statistics_kernel[(tokens,)](
            logits,
            targets,
            statistics,
            width,
            logits.stride(0),
            first_row,
            _UNKNOWN if vocabulary is None else vocabulary,
            BLOCK=block,
            num_warps=warps,
        )
    return statistics


@cross_entropy_statistics.register_fake
def _(logits: Tensor, targets: Tensor, first_row: int, vocabulary: int | None) -> Tensor:
    _check("cross_entropy_statistics", logits, targets, first_row, vocabulary)
    return logits.new_empty(logits.shape[0], 3, dtype=torch.float32)


@custom_op("braid::cross_entropy_gradient", mutates_args=("logits",))
def cross_entropy_gradient(
    logits: Tensor,
    log_partition: Tensor,
    targets: Tensor,
    scale: Tensor | None,
    factor: float,
    first_row: int,
) -> None:
    """Write factor * scale * (softmax - onehot) over the logits (T x V), as their last reader.

    ``log_partition`` (T, fp32) is of the whole vocabulary; ``scale`` a 0-dim tensor (None: 1).
    """
    name = "cross_entropy_gradient"
    _check(name, logits, targets, first_row, None)
    size = (logits.shape[0],)
    check(name, "log_partition", log_partition, size, like=logits, dtypes=(torch.float32,))
    if scale is not None:
        check(name, "scale", scale, (), like=logits)
    tokens, width = logits.shape
    if logits.numel():
        block, warps = tile_of(width)
        across = ceil_div(width, block)
        gradient_kernel[(tokens * across,)](
            logits,
            log_partition,
            targets,
            logits if scale is None else scale,
            width,
            logits.stride(0),
            first_row,
            factor,
            across,
            SCALED=scale is not None,
            BLOCK=block,
            num_warps=warps,
        )


@cross_entropy_gradient.register_fake
def _(
    logits: Tensor,
    log_partition: Tensor,
    targets: Tensor,
    scale: Tensor | None,
    factor: float,
    first_row: int,
) -> None:
    _check("cross_entropy_gradient", logits, targets, first_row, None)
