"""SwiGLU (Shazeer 2020) and GELU (tanh approximation; Hendrycks and Gimpel 2016), with gradients.

Legend: T tokens, F local feed-forward width, 2F gate and up side by side. Arithmetic is in fp32. GELU's
0.5 h (1 + tanh u) is computed as h sigmoid(2u), which is the same and loses nothing where tanh is near -1.
"""

from typing import Final

import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from braid.kernels.triton.launch import ceil_div, check, fail, power_of_two

_TILE: Final = 1024
_WARPS: Final = 4


@triton.jit
def _tile(rows, width, tile_row, tile_column, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows (int64), columns and the mask of a tile."""
    row = tile_row.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tile_column * BLOCK + tl.arange(0, BLOCK)[None, :]
    return row, column, (row < rows) & (column < width)


@triton.jit
def swiglu_kernel(
    gu_ptr, a_ptr, rows, width, gu_stride, tiles_across, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    tile = tl.program_id(0)
    row, column, mask = _tile(rows, width, tile // tiles_across, tile % tiles_across, ROWS, BLOCK)
    place = row * gu_stride + column
    gate = tl.load(gu_ptr + place, mask=mask, other=0).to(tl.float32)
    up = tl.load(gu_ptr + place + width, mask=mask, other=0).to(tl.float32)
    a = gate * tl.sigmoid(gate) * up
    tl.store(a_ptr + row * width + column, a.to(a_ptr.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_gradient_kernel(
    da_ptr,
    gu_ptr,
    d_gu_ptr,
    rows,
    width,
    da_stride,
    gu_stride,
    tiles_across,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile = tl.program_id(0)
    row, column, mask = _tile(rows, width, tile // tiles_across, tile % tiles_across, ROWS, BLOCK)
    place = row * gu_stride + column
    gate = tl.load(gu_ptr + place, mask=mask, other=0).to(tl.float32)
    up = tl.load(gu_ptr + place + width, mask=mask, other=0).to(tl.float32)
    da = tl.load(da_ptr + row * da_stride + column, mask=mask, other=0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    d_gate = da * up * sigmoid * (1 + gate * (1 - sigmoid))
    d_up = da * gate * sigmoid
    place = row * (2 * width) + column
    tl.store(d_gu_ptr + place, d_gate.to(d_gu_ptr.dtype.element_ty), mask=mask)
    tl.store(d_gu_ptr + place + width, d_up.to(d_gu_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gelu_sigmoid(h):
    """sigmoid(2u) for u = sqrt(2/pi) (h + 0.044715 h^3)."""
    return tl.sigmoid(1.5957691216057308 * h * (1 + 0.044715 * h * h))


@triton.jit
def gelu_kernel(h_ptr, a_ptr, rows, width, h_stride, tiles_across, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    tile = tl.program_id(0)
    row, column, mask = _tile(rows, width, tile // tiles_across, tile % tiles_across, ROWS, BLOCK)
    h = tl.load(h_ptr + row * h_stride + column, mask=mask, other=0).to(tl.float32)
    tl.store(a_ptr + row * width + column, (h * _gelu_sigmoid(h)).to(a_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gelu_gradient_kernel(
    da_ptr,
    h_ptr,
    dh_ptr,
    rows,
    width,
    da_stride,
    h_stride,
    tiles_across,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile = tl.program_id(0)
    row, column, mask = _tile(rows, width, tile // tiles_across, tile % tiles_across, ROWS, BLOCK)
    h = tl.load(h_ptr + row * h_stride + column, mask=mask, other=0).to(tl.float32)
    da = tl.load(da_ptr + row * da_stride + column, mask=mask, other=0).to(tl.float32)
    sigmoid = _gelu_sigmoid(h)
    slope = 1.5957691216057308 * (1 + 3 * 0.044715 * h * h)
    dh = da * sigmoid * (1 + h * slope * (1 - sigmoid))
    tl.store(dh_ptr + row * width + column, dh.to(dh_ptr.dtype.element_ty), mask=mask)


def tile_of(width: int) -> tuple[int, int]:
    """Rows and columns of a tile."""
    block = power_of_two(min(width, _TILE), 16)
    return max(1, _TILE // block), block


# -- operators ---------------------------------------------------------------------------------------------


def _check_gated(name: str, gu: Tensor, da: Tensor | None = None) -> None:
    check(name, "gu", gu, (None, None))
    if gu.shape[1] % 2:
        fail(name, "gu", f"has {gu.shape[1]} columns, but gate and up must be equally wide")
    if da is not None:
        check(name, "da", da, (gu.shape[0], gu.shape[1] // 2), like=gu, dtypes=(gu.dtype,))


@custom_op("braid::swiglu", mutates_args=())
def swiglu(gu: Tensor) -> Tensor:
    """Return a = silu(gate) * up (T x F) of gu (T x 2F)."""
    _check_gated("swiglu", gu)
    rows, width = gu.shape[0], gu.shape[1] // 2
    a = gu.new_empty(rows, width)
    if a.numel():
        tile_rows, block = tile_of(width)
        across = ceil_div(width, block)
        swiglu_kernel[(across * ceil_div(rows, tile_rows),)](
            gu, a, rows, width, gu.stride(0), across, ROWS=tile_rows, BLOCK=block, num_warps=_WARPS
        )
    return a


@swiglu.register_fake
def _(gu: Tensor) -> Tensor:
    _check_gated("swiglu", gu)
    return gu.new_empty(gu.shape[0], gu.shape[1] // 2)


@custom_op("braid::swiglu_gradient", mutates_args=())
def swiglu_gradient(da: Tensor, gu: Tensor) -> Tensor:
    """Return d_gu (T x 2F)."""
    _check_gated("swiglu_gradient", gu, da)
    rows, width = da.shape
    d_gu = gu.new_empty(gu.shape)
    if da.numel():
        tile_rows, block = tile_of(width)
        across = ceil_div(width, block)
        swiglu_gradient_kernel[(across * ceil_div(rows, tile_rows),)](
            da,
            gu,
            d_gu,
            rows,
            width,
            da.stride(0),
            gu.stride(0),
            across,
            ROWS=tile_rows,
            BLOCK=block,
            num_warps=_WARPS,
        )
    return d_gu


@swiglu_gradient.register_fake
def _(da: Tensor, gu: Tensor) -> Tensor:
    _check_gated("swiglu_gradient", gu, da)
    return gu.new_empty(gu.shape)


def _check_gelu(name: str, h: Tensor, da: Tensor | None = None) -> None:
    check(name, "h", h, (None, None))
    if da is not None:
        check(name, "da", da, tuple(h.shape), like=h, dtypes=(h.dtype,))


@custom_op("braid::gelu", mutates_args=())
def gelu(h: Tensor) -> Tensor:
    """Return gelu(h) (T x F)."""
    _check_gelu("gelu", h)
    rows, width = h.shape
    a = h.new_empty(h.shape)
    if a.numel():
        tile_rows, block = tile_of(width)
        across = ceil_div(width, block)
        gelu_kernel[(across * ceil_div(rows, tile_rows),)](
            h, a, rows, width, h.stride(0), across, ROWS=tile_rows, BLOCK=block, num_warps=_WARPS
        )
    return a


@gelu.register_fake
def _(h: Tensor) -> Tensor:
    _check_gelu("gelu", h)
    return h.new_empty(h.shape)


@custom_op("braid::gelu_gradient", mutates_args=())
def gelu_gradient(da: Tensor, h: Tensor) -> Tensor:
    """Return dh (T x F)."""
    _check_gelu("gelu_gradient", h, da)
    rows, width = h.shape
    dh = h.new_empty(h.shape)
    if dh.numel():
        tile_rows, block = tile_of(width)
        across = ceil_div(width, block)
        gelu_gradient_kernel[(across * ceil_div(rows, tile_rows),)](
            da,
            h,
            dh,
            rows,
            width,
            da.stride(0),
            h.stride(0),
            across,
            ROWS=tile_rows,
            BLOCK=block,
            num_warps=_WARPS,
        )
    return dh


@gelu_gradient.register_fake
def _(da: Tensor, h: Tensor) -> Tensor:
    _check_gelu("gelu_gradient", h, da)
    return h.new_empty(h.shape)
