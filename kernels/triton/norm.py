"""LayerNorm and RMSNorm with their gradients, each in one pass over the memory.

    y = (x - mean) / sqrt(var + eps) * weight + shift         LayerNorm; RMSNorm has no mean and no shift

Gradients of parameters are the same bits on every run and on any number of multiprocessors: each program
leaves the sum of its share of the tokens, and one kernel adds these sums in a fixed order.

Legend: t tokens, D hidden, P partial sums. ``statistics`` are fp32, one row per statistic: rstd (1 x t) of an
RMSNorm, mean and rstd (2 x t) of a LayerNorm. Arithmetic is in fp32.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from braid.kernels.triton.launch import ceil_div, check, fail, power_of_two, warps_for

WIDEST: Final = 1 << 15
"""Columns that one program holds at most."""
PARTIAL_SUMS: Final = 256
SUM_COLUMNS: Final = 32
SUM_ROWS: Final = 32


@triton.jit
def forward_kernel(
    x_ptr,
    weight_ptr,
    shift_ptr,
    y_ptr,
    statistics_ptr,
    rows,
    width,
    x_stride,
    eps,
    CENTRED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    in_rows, in_columns = row < rows, column < width
    mask = in_rows[:, None] & in_columns[None, :]
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=mask, other=0).to(tl.float32)
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
    place = row[:, None] * width + column[None, :]
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def input_gradient_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    statistics_ptr,
    skip_ptr,
    dx_ptr,
    rows,
    width,
    dy_stride,
    x_stride,
    skip_stride,
    CENTRED: tl.constexpr,
    SKIP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    in_rows, in_columns = row < rows, column < width
    mask = in_rows[:, None] & in_columns[None, :]
    weight = tl.load(weight_ptr + column, mask=in_columns, other=0).to(tl.float32)
    dy = tl.load(dy_ptr + row[:, None] * dy_stride + column[None, :], mask=mask, other=0).to(tl.float32)
    normal = _normal(x_ptr, statistics_ptr, row, column, rows, mask, x_stride, CENTRED)
    rstd = _rstd(statistics_ptr, row, rows, CENTRED)
    scaled = dy * weight[None, :]
    dx = scaled - normal * (tl.sum(scaled * normal, axis=1) / width)[:, None]
    if CENTRED:
        dx -= (tl.sum(scaled, axis=1) / width)[:, None]
    dx *= rstd[:, None]
    if SKIP:
        skip_place = row[:, None] * skip_stride + column[None, :]
        dx += tl.load(skip_ptr + skip_place, mask=mask, other=0).to(tl.float32)
    place = row[:, None] * width + column[None, :]
    tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def weight_gradient_kernel(
    dy_ptr,
    x_ptr,
    statistics_ptr,
    partials_ptr,
    rows,
    width,
    dy_stride,
    x_stride,
    tiles_per_program,
    CENTRED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Partial sums of a program, each of D: weight, shift."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    in_columns = column < width
    d_weight = tl.zeros((BLOCK,), dtype=tl.float32)
    d_shift = tl.zeros((BLOCK,), dtype=tl.float32)
    for tile in range(tiles_per_program):
        row = (program * tiles_per_program + tile) * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & in_columns[None, :]
        dy = tl.load(dy_ptr + row[:, None] * dy_stride + column[None, :], mask=mask, other=0).to(tl.float32)
        d_weight += tl.sum(
            dy * _normal(x_ptr, statistics_ptr, row, column, rows, mask, x_stride, CENTRED), axis=0
        )
        if CENTRED:
            d_shift += tl.sum(dy, axis=0)
    partials_ptr += program * 2 * width
    tl.store(partials_ptr + column, d_weight, mask=in_columns)
    if CENTRED:
        tl.store(partials_ptr + width + column, d_shift, mask=in_columns)


@triton.jit
def _normal(x_ptr, statistics_ptr, row, column, rows, mask, x_stride, CENTRED: tl.constexpr):
    """A tile of x, normalised."""
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=mask, other=0).to(tl.float32)
    if CENTRED:
        mean = tl.load(statistics_ptr + row, mask=row < rows, other=0)
        x = tl.where(mask, x - mean[:, None], 0)
    return x * _rstd(statistics_ptr, row, rows, CENTRED)[:, None]


@triton.jit
def _rstd(statistics_ptr, row, rows, CENTRED: tl.constexpr):
    """The last row of the statistics."""
    if CENTRED:
        statistics_ptr += rows
    return tl.load(statistics_ptr + row, mask=row < rows, other=0)


@triton.jit
def add_columns_kernel(
    partials_ptr, total_ptr, count, width, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Add the sum over the rows of partials (count x width) to total (width), in a fixed order."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_columns = column < width
    sums = tl.zeros((COLUMNS,), dtype=tl.float32)
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < count)[:, None] & in_columns[None, :]
        place = row[:, None].to(tl.int64) * stride + column[None, :]
        sums += tl.sum(tl.load(partials_ptr + place, mask=mask, other=0), axis=0)
    total = tl.load(total_ptr + column, mask=in_columns, other=0).to(tl.float32)
    tl.store(total_ptr + column, (total + sums).to(total_ptr.dtype.element_ty), mask=in_columns)


def tile_of(width: int) -> tuple[int, int, int]:
    """Rows and columns of a program's tile, and its warps, for rows of ``width``."""
    block = power_of_two(width, 16)
    rows = max(1, min(16, 2048 // block))
    return rows, block, warps_for(rows * block)


# -- operators ---------------------------------------------------------------------------------------------


def _check_forward(x: Tensor, weight: Tensor, shift: Tensor | None) -> None:
    check("norm", "x", x, (None, None))
    if not 1 <= x.shape[1] <= WIDEST:
        fail("norm", "x", f"has {x.shape[1]} columns, not 1 to {WIDEST}")
    check("norm", "weight", weight, (x.shape[1],), like=x)
    if shift is not None:
        check("norm", "shift", shift, (x.shape[1],), like=x)


@custom_op("braid::norm", mutates_args=())
def norm(x: Tensor, weight: Tensor, shift: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Normalise x (t x D): LayerNorm with a ``shift``, RMSNorm without; return y and statistics."""
    _check_forward(x, weight, shift)
    rows, width = x.shape
    y = x.new_empty(x.shape)
    statistics = x.new_empty(1 + (shift is not None), rows, dtype=torch.float32)
    if rows:
        tile_rows, block, warps = tile_of(width)
        forward_kernel[(ceil_div(rows, tile_rows),)](
            x,
            weight,
            x if shift is None else shift,
            y,
            statistics,
            rows,
            width,
            x.stride(0),
            eps,
            CENTRED=shift is not None,
            ROWS=tile_rows,
            BLOCK=block,
            num_warps=warps,
        )
    return y, statistics


@norm.register_fake
def _(x: Tensor, weight: Tensor, shift: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    _check_forward(x, weight, shift)
    return x.new_empty(x.shape), x.new_empty(1 + (shift is not None), x.shape[0], dtype=torch.float32)


def _check_gradient(name: str, dy: Tensor, x: Tensor, statistics: Tensor, **others: Tensor | None) -> None:
    """``others``: vectors (D), and ``skip`` (t x D)."""
    check(name, "dy", dy, (None, None))
    if not 1 <= dy.shape[1] <= WIDEST:
        fail(name, "dy", f"has {dy.shape[1]} columns, not 1 to {WIDEST}")
    check(name, "x", x, tuple(dy.shape), like=dy, dtypes=(dy.dtype,))
    size = (None, dy.shape[0])
    check(name, "statistics", statistics, size, like=dy, dtypes=(torch.float32,), contiguous=True)
    for argument, tensor in others.items():
        if tensor is None:
            continue
        if argument == "skip":
            check(name, argument, tensor, tuple(dy.shape), like=dy, dtypes=(dy.dtype,))
        else:
            check(name, argument, tensor, (dy.shape[1],), like=dy)


@custom_op("braid::norm_input_gradient", mutates_args=())
def norm_input_gradient(
    dy: Tensor, x: Tensor, statistics: Tensor, weight: Tensor, skip: Tensor | None
) -> Tensor:
    """Return dx (t x D), plus ``skip`` if given: the gradient that goes round the norm."""
    _check_gradient("norm_input_gradient", dy, x, statistics, weight=weight, skip=skip)
    rows, width = dy.shape
    dx = dy.new_empty(dy.shape)
    if rows:
        tile_rows, block, warps = tile_of(width)
        input_gradient_kernel[(ceil_div(rows, tile_rows),)](
            dy,
            x,
            weight,
            statistics,
            dy if skip is None else skip,
            dx,
            rows,
            width,
            dy.stride(0),
            x.stride(0),
            0 if skip is None else skip.stride(0),
            CENTRED=statistics.shape[0] == 2,
            SKIP=skip is not None,
            ROWS=tile_rows,
            BLOCK=block,
            num_warps=warps,
        )
    return dx


@norm_input_gradient.register_fake
def _(dy: Tensor, x: Tensor, statistics: Tensor, weight: Tensor, skip: Tensor | None) -> Tensor:
    _check_gradient("norm_input_gradient", dy, x, statistics, weight=weight, skip=skip)
    return dy.new_empty(dy.shape)


@custom_op("braid::norm_weight_gradient", mutates_args=("d_weight", "d_shift"))
def norm_weight_gradient(
    dy: Tensor, x: Tensor, statistics: Tensor, d_weight: Tensor, d_shift: Tensor | None
) -> None:
    """Add the parameters' gradients to ``d_weight`` and ``d_shift`` (each D)."""
    _check_gradient("norm_weight_gradient", dy, x, statistics, d_weight=d_weight, d_shift=d_shift)
    rows, width = dy.shape
    if not rows:
        return
    tile_rows, block, warps = tile_of(width)
    tiles = ceil_div(rows, tile_rows)
    each = ceil_div(tiles, PARTIAL_SUMS)
    programs = ceil_div(tiles, each)
    partials = dy.new_empty((programs, 2, width), dtype=torch.float32)
    weight_gradient_kernel[(programs,)](
        dy,
        x,
        statistics,
        partials,
        rows,
        width,
        dy.stride(0),
        x.stride(0),
        each,
        CENTRED=statistics.shape[0] == 2,
        ROWS=tile_rows,
        BLOCK=block,
        num_warps=warps,
    )
    for place, total in enumerate((d_weight, d_shift)):
        if total is not None:
            add_columns_kernel[(ceil_div(width, SUM_COLUMNS),)](
                partials[:, place],
                total,
                programs,
                width,
                partials.stride(0),
                ROWS=SUM_ROWS,
                COLUMNS=SUM_COLUMNS,
                num_warps=4,
            )


@norm_weight_gradient.register_fake
def _(dy: Tensor, x: Tensor, statistics: Tensor, d_weight: Tensor, d_shift: Tensor | None) -> None:
    _check_gradient("norm_weight_gradient", dy, x, statistics, d_weight=d_weight, d_shift=d_shift)
