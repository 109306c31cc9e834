"""Bias, dropout, residual addition and normalisation in one pass over the memory.

    z = x + dropout(branch + bias)                  where there is a branch, else z = x
    y = (z - mean) / sqrt(var + eps) * weight + shift         LayerNorm; RMSNorm has no mean and no shift

DHelix (section 4) counts bias-dropout-add as one operator; the norm that follows it reads the same values.

Legend: t tokens, D hidden. ``statistics`` are fp32, one row per statistic: rstd (1 x t) of an RMSNorm, mean
and rstd (2 x t) of a LayerNorm. Arithmetic is in fp32. The gradients: `braid.kernels.fused.norm_gradient`.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from braid.kernels.fused.dropout import check_key, keep_mask, threshold
from braid.kernels.fused.launch import ceil_div, check, fail, power_of_two, warps_for

WIDEST: Final = 1 << 15
"""Columns that one program holds at most."""


@triton.jit
def forward_kernel(
    x_ptr,
    branch_ptr,
    bias_ptr,
    weight_ptr,
    shift_ptr,
    z_ptr,
    y_ptr,
    statistics_ptr,
    key_ptr,
    rows,
    width,
    x_stride,
    branch_stride,
    eps,
    threshold,
    keep_scale,
    BRANCH: tl.constexpr,
    BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
    NORM: tl.constexpr,
    CENTRED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    in_rows, in_columns = row < rows, column < width
    mask = in_rows[:, None] & in_columns[None, :]
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=mask, other=0).to(tl.float32)
    place = row[:, None] * width + column[None, :]
    if BRANCH:
        branch_place = row[:, None] * branch_stride + column[None, :]
        branch = tl.load(branch_ptr + branch_place, mask=mask, other=0).to(tl.float32)
        if BIAS:
            bias = tl.load(bias_ptr + column, mask=in_columns, other=0).to(tl.float32)
            branch += bias[None, :]
        if DROPOUT:
            keep = keep_mask(key_ptr, row, threshold, ROWS, BLOCK)
            branch = tl.where(keep, branch * keep_scale, 0)
        z = (x + branch).to(z_ptr.dtype.element_ty)
        tl.store(z_ptr + place, z, mask=mask)
        x = tl.where(mask, z.to(tl.float32), 0)
    if NORM:
        weight = tl.load(weight_ptr + column, mask=in_columns, other=0).to(tl.float32)
        if CENTRED:
            mean = tl.sum(x, axis=1) / width
            tl.store(statistics_ptr + row, mean, mask=in_rows)
            statistics_ptr += rows
            x = tl.where(mask, x - mean[:, None], 0)
        rstd = 1 / tl.sqrt(tl.sum(x * x, axis=1) / width + eps)
        tl.store(statistics_ptr + row, rstd, mask=in_rows)
        y = x * rstd[:, None] * weight[None, :]
        if CENTRED:
            shift = tl.load(shift_ptr + column, mask=in_columns, other=0).to(tl.float32)
            y += shift[None, :]
        tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=mask)


def tile_of(width: int) -> tuple[int, int, int]:
    """Rows and columns of a program's tile, and its warps, for rows of ``width``."""
    block = power_of_two(width, 16)
    rows = max(1, min(16, 2048 // block))
    return rows, block, warps_for(rows * block)


def check_width(operator: str, argument: str, x: Tensor) -> None:
    """ValueError unless x is a matrix whose rows a program can hold."""
    check(operator, argument, x, (None, None))
    if not 1 <= x.shape[1] <= WIDEST:
        fail(operator, argument, f"has {x.shape[1]} columns, not 1 to {WIDEST}")


# -- operators ---------------------------------------------------------------------------------------------


def _check_forward(
    name: str,
    x: Tensor,
    branch: Tensor | None,
    bias: Tensor | None,
    weight: Tensor | None,
    shift: Tensor | None,
    key: Tensor | None,
    probability: float,
) -> None:
    check_width(name, "x", x)
    width = x.shape[1]
    if branch is not None:
        check(name, "branch", branch, tuple(x.shape), like=x, dtypes=(x.dtype,))
    for argument, vector in (("bias", bias), ("weight", weight), ("shift", shift)):
        if vector is not None:
            check(name, argument, vector, (width,), like=x)
    threshold(name, probability)
    check_key(name, key, probability, x)


def _forward(
    x: Tensor,
    branch: Tensor | None,
    bias: Tensor | None,
    weight: Tensor | None,
    shift: Tensor | None,
    key: Tensor | None,
    eps: float,
    probability: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, z and statistics; those that are not wanted are empty."""
    rows, width = x.shape
    norm, branched = weight is not None, branch is not None
    y = x.new_empty(x.shape if norm else (0,))
    z = x.new_empty(x.shape if branched else (0,))
    statistics = x.new_empty((1 + (shift is not None)) * norm, rows, dtype=torch.float32)
    if rows:
        tile_rows, block, warps = tile_of(width)
        forward_kernel[(ceil_div(rows, tile_rows),)](
            x,
            x if branch is None else branch,
            x if bias is None else bias,
            x if weight is None else weight,
            x if shift is None else shift,
            z,
            y,
            statistics,
            x if key is None else key,
            rows,
            width,
            x.stride(0),
            0 if branch is None else branch.stride(0),
            eps,
            threshold("norm", probability),
            1 / (1 - probability),
            BRANCH=branched,
            BIAS=bias is not None,
            DROPOUT=probability > 0,
            NORM=norm,
            CENTRED=shift is not None,
            ROWS=tile_rows,
            BLOCK=block,
            num_warps=warps,
        )
    return y, z, statistics


@custom_op("braid::norm", mutates_args=())
def norm(x: Tensor, weight: Tensor, shift: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Normalise x (t x D): LayerNorm with a ``shift``, RMSNorm without; return y and statistics."""
    _check_forward("norm", x, None, None, weight, shift, None, 0)
    y, _, statistics = _forward(x, None, None, weight, shift, None, eps, 0.0)
    return y, statistics


@norm.register_fake
def _(x: Tensor, weight: Tensor, shift: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    _check_forward("norm", x, None, None, weight, shift, None, 0)
    return x.new_empty(x.shape), x.new_empty(1 + (shift is not None), x.shape[0], dtype=torch.float32)


@custom_op("braid::add_norm", mutates_args=())
def add_norm(
    x: Tensor,
    branch: Tensor,
    bias: Tensor | None,
    weight: Tensor,
    shift: Tensor | None,
    key: Tensor | None,
    eps: float,
    probability: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y = norm(z), z = x + dropout(branch + bias), and statistics.

    ``probability`` is that of an element to be dropped; ``key``: see `braid.kernels.fused.dropout`.
    """
    _check_forward("add_norm", x, branch, bias, weight, shift, key, probability)
    return _forward(x, branch, bias, weight, shift, key, eps, probability)


@add_norm.register_fake
def _(
    x: Tensor,
    branch: Tensor,
    bias: Tensor | None,
    weight: Tensor,
    shift: Tensor | None,
    key: Tensor | None,
    eps: float,
    probability: float,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_forward("add_norm", x, branch, bias, weight, shift, key, probability)
    statistics = x.new_empty(1 + (shift is not None), x.shape[0], dtype=torch.float32)
    return x.new_empty(x.shape), x.new_empty(x.shape), statistics


@custom_op("braid::bias_dropout_add", mutates_args=())
def bias_dropout_add(
    x: Tensor, branch: Tensor, bias: Tensor | None, key: Tensor | None, probability: float
) -> Tensor:
    """Return x + dropout(branch + bias), all t x D but for bias (D)."""
    _check_forward("bias_dropout_add", x, branch, bias, None, None, key, probability)
    return _forward(x, branch, bias, None, None, key, 0.0, probability)[1]


@bias_dropout_add.register_fake
def _(x: Tensor, branch: Tensor, bias: Tensor | None, key: Tensor | None, probability: float) -> Tensor:
    _check_forward("bias_dropout_add", x, branch, bias, None, None, key, probability)
    return x.new_empty(x.shape)
