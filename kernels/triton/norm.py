"""Triton kernels of `braid.kernels.operators.norm`, each of which passes over memory once.

Gradients of parameters are bitwise equal in every run and for any number of multiprocessors: each program
stores the sum of its share of the tokens, and one kernel adds these sums in a fixed order.

Legend: t tokens, D hidden, S statistics of a token (fp32): rstd of an RMSNorm, mean and rstd of a LayerNorm.
Arithmetic is in fp32.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from braid.kernels.operators.norm import LayerNorm, Norm, RMSNorm
from braid.kernels.triton.launch import ceil_div, check, fail, power_of_two, warps_for

WIDEST: Final = 1 << 15
"""Greatest number of columns, all of which one program holds."""
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
    """Store a program's partial sums, each of D elements: gradients of weight and shift."""
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
    """Return a tile of x, normalised."""
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=mask, other=0).to(tl.float32)
    if CENTRED:
        mean = tl.load(statistics_ptr + row, mask=row < rows, other=0)
        x = tl.where(mask, x - mean[:, None], 0)
    return x * _rstd(statistics_ptr, row, rows, CENTRED)[:, None]


@triton.jit
def _rstd(statistics_ptr, row, rows, CENTRED: tl.constexpr):
    """Return the reciprocal standard deviations, the last row of the statistics."""
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
    """Return rows and columns of a program's tile, and its warps, for rows of length ``width``."""
    block = power_of_two(width, 16)
    rows = max(1, min(16, 2048 // block))
    return rows, block, warps_for(rows * block)


def _tiled(rows: int, width: int) -> tuple[int, dict[str, int]]:
    """Return the number of tiles, and the kernel arguments that describe a tile."""
    tile_rows, block, warps = tile_of(width)
    return ceil_div(rows, tile_rows), {"ROWS": tile_rows, "BLOCK": block, "num_warps": warps}


class _TritonNorm(Norm):
    def forward(self, x_tD: Tensor) -> tuple[Tensor, Tensor]:
        check("norm", x=(x_tD, "tD"), weight=(self.weight, "D"), bias=(self.bias, "D"))
        rows, width = x_tD.shape
        if width > WIDEST:
            fail("norm", "x", f"has {width} columns, more than {WIDEST}")
        y_tD = x_tD.new_empty(x_tD.shape)
        statistics_St = x_tD.new_empty(1 + self.centred, rows, dtype=torch.float32)
        if rows:
            tiles, tile = _tiled(rows, width)
            parameters = self.weight, x_tD if self.bias is None else self.bias
            sizes = rows, width, x_tD.stride(0), self.eps
            forward_kernel[(tiles,)](
                x_tD, *parameters, y_tD, statistics_St, *sizes, CENTRED=self.centred, **tile
            )
        return y_tD, statistics_St.t() if self.centred else statistics_St.view(-1, 1)

    def input_gradient(
        self, dy_tD: Tensor, x_tD: Tensor, statistics_tS: Tensor, d_skip_tD: Tensor | None = None
    ) -> tuple[Tensor]:
        statistics_St = _checked("norm_input_gradient", dy_tD, x_tD, statistics_tS, d_skip_tD)
        rows, width = dy_tD.shape
        dx_tD = dy_tD.new_empty(dy_tD.shape)
        if rows:
            tiles, tile = _tiled(rows, width)
            skip, flags = d_skip_tD, {"CENTRED": self.centred, "SKIP": d_skip_tD is not None}
            tensors = dy_tD, x_tD, self.weight, statistics_St, dy_tD if skip is None else skip, dx_tD
            strides = dy_tD.stride(0), x_tD.stride(0), 0 if skip is None else skip.stride(0)
            input_gradient_kernel[(tiles,)](*tensors, rows, width, *strides, **flags, **tile)
        return (dx_tD,)

    def weight_gradient(
        self, dy_tD: Tensor, x_tD: Tensor, statistics_tS: Tensor, d_skip_tD: Tensor | None = None
    ) -> None:
        statistics_St = _checked("norm_weight_gradient", dy_tD, x_tD, statistics_tS, d_skip_tD)
        rows, width = dy_tD.shape
        if not rows:
            return
        tiles, tile = _tiled(rows, width)
        each = ceil_div(tiles, PARTIAL_SUMS)
        programs = ceil_div(tiles, each)
        partials = dy_tD.new_empty((programs, 2, width), dtype=torch.float32)
        tensors, strides = (dy_tD, x_tD, statistics_St, partials), (dy_tD.stride(0), x_tD.stride(0))
        weight_gradient_kernel[(programs,)](
            *tensors, rows, width, *strides, each, CENTRED=self.centred, **tile
        )
        sums = {"ROWS": SUM_ROWS, "COLUMNS": SUM_COLUMNS, "num_warps": 4}
        for number, name in enumerate(("weight", "bias") if self.centred else ("weight",)):
            sizes = programs, width, partials.stride(0)
            add_columns_kernel[(ceil_div(width, SUM_COLUMNS),)](
                partials[:, number], self.gradients[name], *sizes, **sums
            )


def _checked(name: str, dy_tD: Tensor, x_tD: Tensor, statistics_tS: Tensor, skip_tD: Tensor | None) -> Tensor:
    """Check the arguments; return the statistics in the layout that the kernels read, S x t."""
    statistics_St = statistics_tS.t().contiguous()
    check(name, dy=(dy_tD, "tD"), x=(x_tD, "tD"), statistics=(statistics_St, "St"), skip=(skip_tD, "tD"))
    return statistics_St


class TritonRMSNorm(_TritonNorm, RMSNorm):
    """`RMSNorm` computed by Triton kernels."""


class TritonLayerNorm(_TritonNorm, LayerNorm):
    """`LayerNorm` computed by Triton kernels."""
