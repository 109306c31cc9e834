"""Triton kernels of `braid.kernels.operators.cross_entropy`: statistics in one pass, and the gradient in
place.

Online softmax: Milakov and Gimelshein 2018. Legend: T tokens, V local vocabulary rows, 3 statistics (fp32).
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from braid.kernels.operators.cross_entropy import CrossEntropyStatistics
from braid.kernels.triton.launch import ceil_div, check, power_of_two

_WIDEST_TILE: Final = 4096


@triton.jit
def statistics_kernel(
    logits_ptr, targets_ptr, statistics_ptr, width, stride, first_row, vocabulary, BLOCK: tl.constexpr
):
    """One token per program; the logit of a target outside the vocabulary is NaN."""
    token = tl.program_id(0).to(tl.int64)
    logits_ptr += token * stride
    maximum = float("-inf")
    total = 0.0
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        logit = tl.load(logits_ptr + column, mask=column < width, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(maximum, tl.max(logit, axis=0))
        # While all values so far are -inf, differences would be NaN.
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
    scale_stride,
    width,
    stride,
    first_row,
    factor,
    z_loss,
    kept,
    spread,
    tiles_across,
    SCALED: tl.constexpr,
    PLAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile of a token. ``PLAIN``: neither z-loss nor smoothing, nothing of them is read."""
    program = tl.program_id(0)
    token = (program // tiles_across).to(tl.int64)
    column = (program % tiles_across) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    logits_ptr += token * stride
    logit = tl.load(logits_ptr + column, mask=mask, other=0).to(tl.float32)
    log_partition = tl.load(log_partition_ptr + token)
    d = tl.exp(logit - log_partition)
    target = column == tl.load(targets_ptr + token) - first_row
    if PLAIN:
        d = tl.where(target, d - 1, d)
    else:
        d = d * (1 + 2 * z_loss * log_partition) - spread - tl.where(target, kept, 0.0)
    if SCALED:
        factor *= tl.load(scale_ptr + token * scale_stride).to(tl.float32)
    tl.store(logits_ptr + column, (d * factor).to(logits_ptr.dtype.element_ty), mask=mask)


def tile_of(width: int) -> tuple[int, int]:
    """Return the number of columns of a tile, and its number of warps."""
    block = power_of_two(min(width, _WIDEST_TILE), 16)
    return block, 8 if block >= _WIDEST_TILE else 4


class TritonCrossEntropyStatistics(CrossEntropyStatistics):
    """`CrossEntropyStatistics` with one Triton kernel for each direction."""

    def forward(self, logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor]:
        """Return statistics_T3; on a GPU a target outside the vocabulary gives NaN."""
        check("cross_entropy_statistics", logits=(logits_TV, "TV"), targets=(targets_T, "T"))
        self.shard._check(targets_T)
        tokens, width = logits_TV.shape
        statistics_T3 = logits_TV.new_empty(tokens, 3, dtype=torch.float32)
        if tokens:
            block, warps = tile_of(width)
            sizes = width, logits_TV.stride(0), self.shard.first_row, self.shard.vocabulary
            statistics_kernel[(tokens,)](
                logits_TV, targets_T, statistics_T3, *sizes, BLOCK=block, num_warps=warps
            )
        return (statistics_T3,)

    def input_gradient(
        self, logits_TV: Tensor, log_partition_T: Tensor, targets_T: Tensor, scale: Tensor | float
    ) -> tuple[Tensor]:
        tensor, factor = (scale, 1.0) if isinstance(scale, Tensor) else (None, float(scale))
        per_token = tensor is not None and tensor.dim() == 1
        scales = (tensor, "T" if per_token else "")
        shared = {"log_partition": (log_partition_T, "T"), "targets": (targets_T, "T"), "scale": scales}
        check("cross_entropy_gradient", logits=(logits_TV, "TV"), **shared)
        tokens, width = logits_TV.shape
        if logits_TV.numel():
            block, warps = tile_of(width)
            across = ceil_div(width, block)
            tensors = logits_TV, log_partition_T, targets_T, logits_TV if tensor is None else tensor
            sizes = int(per_token), width, logits_TV.stride(0), self.shard.first_row
            numbers = factor, self.z_loss, 1 - self.label_smoothing, self.spread
            flags = {"SCALED": tensor is not None, "PLAIN": not (self.z_loss or self.label_smoothing)}
            gradient_kernel[(tokens * across,)](
                *tensors, *sizes, *numbers, across, **flags, BLOCK=block, num_warps=warps
            )
        return (logits_TV,)
