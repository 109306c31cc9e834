"""Triton kernels of `braid.kernels.operators.activation`, with the same legend.

Arithmetic is in fp32. GELU's 0.5 h (1 + tanh u) is computed as h sigmoid(2u), which is equal and does not
lose precision where tanh is near -1.
"""

from typing import Any, Final

import triton
import triton.language as tl
from torch import Tensor

from braid.kernels.operators.activation import GELU, SwiGLU
from braid.kernels.triton.launch import ceil_div, check, power_of_two

_TILE: Final = 1024
_WARPS: Final = 4


@triton.jit
def _tile(rows, width, tiles_across, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return rows (int64), columns and mask of a program's tile."""
    tile = tl.program_id(0)
    row = (tile // tiles_across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tile % tiles_across) * BLOCK + tl.arange(0, BLOCK)[None, :]
    return row, column, (row < rows) & (column < width)


@triton.jit
def _gelu_sigmoid(h):
    """Return sigmoid(2u) for u = sqrt(2/pi) (h + 0.044715 h^3)."""
    return tl.sigmoid(1.5957691216057308 * h * (1 + 0.044715 * h * h))


@triton.jit
def forward_kernel(
    x_ptr,
    a_ptr,
    rows,
    width,
    x_stride,
    tiles_across,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute SwiGLU of gate and up (``GATED``), or GELU of h."""
    row, column, mask = _tile(rows, width, tiles_across, ROWS, BLOCK)
    place = row * x_stride + column
    x = tl.load(x_ptr + place, mask=mask, other=0).to(tl.float32)
    if GATED:
        up = tl.load(x_ptr + place + width, mask=mask, other=0).to(tl.float32)
        a = x * tl.sigmoid(x) * up
    else:
        a = x * _gelu_sigmoid(x)
    tl.store(a_ptr + row * width + column, a.to(a_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gradient_kernel(
    da_ptr,
    x_ptr,
    dx_ptr,
    rows,
    width,
    da_stride,
    x_stride,
    tiles_across,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, mask = _tile(rows, width, tiles_across, ROWS, BLOCK)
    place = row * x_stride + column
    x = tl.load(x_ptr + place, mask=mask, other=0).to(tl.float32)
    if GATED:
        up = tl.load(x_ptr + place + width, mask=mask, other=0).to(tl.float32)
        da = tl.load(da_ptr + row * da_stride + column, mask=mask, other=0).to(tl.float32)
        sigmoid = tl.sigmoid(x)
        dx = da * up * sigmoid * (1 + x * (1 - sigmoid))
        d_up = da * x * sigmoid
        place = row * (2 * width) + column
        tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(dx_ptr + place + width, d_up.to(dx_ptr.dtype.element_ty), mask=mask)
    else:
        da = tl.load(da_ptr + row * da_stride + column, mask=mask, other=0).to(tl.float32)
        sigmoid = _gelu_sigmoid(x)
        slope = 1.5957691216057308 * (1 + 3 * 0.044715 * x * x)
        dx = da * sigmoid * (1 + x * slope * (1 - sigmoid))
        tl.store(dx_ptr + row * width + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def tile_of(width: int) -> tuple[int, int]:
    """Return the numbers of rows and columns of a tile."""
    block = power_of_two(min(width, _TILE), 16)
    return max(1, _TILE // block), block


def _filled(out: Tensor, kernel: Any, *inputs: Tensor, across: int, gated: bool) -> tuple[Tensor]:
    """Fill ``out`` by a kernel, tile by tile over its rows and ``across`` columns; return it as a tuple."""
    rows = out.shape[0]
    if out.numel():
        tile_rows, block = tile_of(across)
        tiles_across = ceil_div(across, block)
        sizes = rows, across, *(x.stride(0) for x in inputs), tiles_across
        grid = (tiles_across * ceil_div(rows, tile_rows),)
        kernel[grid](*inputs, out, *sizes, GATED=gated, ROWS=tile_rows, BLOCK=block, num_warps=_WARPS)
    return (out,)


class TritonSwiGLU(SwiGLU):
    """`SwiGLU` with one Triton kernel for each direction."""

    def forward(self, gu_T2F: Tensor) -> tuple[Tensor]:
        halves = gu_T2F.unflatten(1, (2, -1))
        check("swiglu", gu=(halves, "T2F"))
        a_TF = gu_T2F.new_empty(halves.shape[::2])
        return _filled(a_TF, forward_kernel, gu_T2F, across=halves.shape[2], gated=True)

    def input_gradient(self, d_a_TF: Tensor, gu_T2F: Tensor) -> tuple[Tensor]:
        check("swiglu_gradient", da=(d_a_TF, "TF"), gu=(gu_T2F.unflatten(1, (2, -1)), "T2F"))
        d_gu_T2F, width = gu_T2F.new_empty(gu_T2F.shape), d_a_TF.shape[1]
        return _filled(d_gu_T2F, gradient_kernel, d_a_TF, gu_T2F, across=width, gated=True)


class TritonGELU(GELU):
    """`GELU` with one Triton kernel for each direction."""

    def forward(self, h_TF: Tensor) -> tuple[Tensor]:
        check("gelu", h=(h_TF, "TF"))
        a_TF = h_TF.new_empty(h_TF.shape)
        return _filled(a_TF, forward_kernel, h_TF, across=h_TF.shape[1], gated=False)

    def input_gradient(self, d_a_TF: Tensor, h_TF: Tensor) -> tuple[Tensor]:
        check("gelu_gradient", da=(d_a_TF, "TF"), h=(h_TF, "TF"))
        d_h_TF = h_TF.new_empty(h_TF.shape)
        return _filled(d_h_TF, gradient_kernel, d_a_TF, h_TF, across=h_TF.shape[1], gated=False)
