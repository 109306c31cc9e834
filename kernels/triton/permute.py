"""Moves token rows to experts and back with Triton; every move is a gather, so sums have a fixed order.

`braid.kernels.operators.permute` computes the visit of each row (``sources``) and the row of each visit
(``slots``); its legend holds here. Sums are in fp32.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from braid.kernels.operators.permute import Dispatch, Permute, Places, Unpermute
from braid.kernels.triton.launch import ceil_div, check, power_of_two

_COLUMNS: Final = 1024


@triton.jit
def gather_kernel(
    x_ptr,
    sources_ptr,
    weights_ptr,
    out_ptr,
    width,
    stride,
    choices,
    limit,
    tiles_across,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy a token's row to each place, times its gate if ``WEIGHTED``. A place without a token gets zeros, a
    place whose source is out of range gets NaN."""
    program = tl.program_id(0)
    place = (program // tiles_across).to(tl.int64)
    column = (program % tiles_across) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    source = tl.load(sources_ptr + place)
    here = (source >= 0) & (source < limit)
    row = (source // choices).to(tl.int64)
    x = tl.load(x_ptr + row * stride + column, mask=mask & here, other=0).to(tl.float32)
    if WEIGHTED:
        x *= tl.load(weights_ptr + source, mask=here, other=0).to(tl.float32)
    x = tl.where(source >= limit, float("nan"), x)
    tl.store(out_ptr + place * width + column, x.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def combine_kernel(
    x_ptr,
    slots_ptr,
    weights_ptr,
    out_ptr,
    width,
    stride,
    places,
    tiles_across,
    CHOICES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the rows of a token's choices; a dropped one adds 0, one out of range NaN."""
    program = tl.program_id(0)
    token = (program // tiles_across).to(tl.int64)
    column = (program % tiles_across) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in tl.static_range(CHOICES):
        slot = tl.load(slots_ptr + token * CHOICES + choice).to(tl.int64)
        here = (slot >= 0) & (slot < places)
        x = tl.load(x_ptr + slot * stride + column, mask=mask & here, other=0).to(tl.float32)
        if WEIGHTED:
            x *= tl.load(weights_ptr + token * CHOICES + choice).to(tl.float32)
            x = tl.where(here, x, 0)
        sums += tl.where(slot >= places, float("nan"), x)
    tl.store(out_ptr + token * width + column, sums.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def combine_weight_gradient_kernel(
    dy_ptr, x_ptr, slots_ptr, d_weights_ptr, width, dy_stride, x_stride, places, choices, BLOCK: tl.constexpr
):
    """Compute the gradient of one gate (one choice of one token) per program."""
    index = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + index).to(tl.int64)
    here = (slot >= 0) & (slot < places)
    token = index // choices
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        mask = (column < width) & here
        dy = tl.load(dy_ptr + token * dy_stride + column, mask=mask, other=0).to(tl.float32)
        sums += dy * tl.load(x_ptr + slot * x_stride + column, mask=mask, other=0).to(tl.float32)
    total = tl.where(slot >= places, float("nan"), tl.sum(sums, axis=0))
    tl.store(d_weights_ptr + index, total)


def _tiles(width: int) -> tuple[int, dict[str, int]]:
    """Return the number of tiles over ``width`` columns, and a tile's kernel arguments."""
    block = power_of_two(min(width, _COLUMNS), 16)
    return ceil_div(width, block), {"BLOCK": block, "num_warps": 4}


class _TritonPlaces(Places):
    """`Places` that move rows in one pass; ``sources`` and ``slots`` are int32, as the kernels expect."""

    def gather(self, x_tD: Tensor, gates_tk: Tensor | None = None) -> Tensor:
        gates_tk = None if gates_tk is None else gates_tk.contiguous()
        check("gather_rows", x=(x_tD, "tD"), slots=(self.slots_tk, "tk"), gates=(gates_tk, "tk"))
        (tokens, choices), width = self.slots_tk.shape, x_tD.shape[1]
        rows_nD = x_tD.new_empty(self.sources_n.shape[0], width)
        if rows_nD.numel():
            across, tile = _tiles(width)
            tensors = x_tD, self.sources_n, x_tD if gates_tk is None else gates_tk, rows_nD
            sizes = width, x_tD.stride(0), choices, tokens * choices, across
            grid = (rows_nD.shape[0] * across,)
            gather_kernel[grid](*tensors, *sizes, WEIGHTED=gates_tk is not None, **tile)
        return rows_nD

    def combine(self, rows_nD: Tensor, gates_tk: Tensor | None = None) -> Tensor:
        gates_tk = None if gates_tk is None else gates_tk.contiguous()
        self._check(rows_nD)
        check("combine_rows", rows=(rows_nD, "nD"), slots=(self.slots_tk, "tk "), gates=(gates_tk, "tk"))
        (tokens, choices), (places, width) = self.slots_tk.shape, rows_nD.shape
        y_tD = rows_nD.new_empty(tokens, width)
        if y_tD.numel():
            across, tile = _tiles(width)
            tensors = rows_nD, self.slots_tk, rows_nD if gates_tk is None else gates_tk, y_tD
            flags = {"CHOICES": choices, "WEIGHTED": gates_tk is not None}
            sizes = width, rows_nD.stride(0), places, across
            combine_kernel[(tokens * across,)](*tensors, *sizes, **flags, **tile)
        return y_tD

    def gate_gradient(self, dy_tD: Tensor, rows_nD: Tensor) -> Tensor:
        self._check(rows_nD)
        tensors = {"rows": (rows_nD, "nD"), "slots": (self.slots_tk, "tk "), "dy": (dy_tD, "tD")}
        check("gate_gradient", **tensors)
        d_gates_tk = dy_tD.new_empty(self.slots_tk.shape, dtype=torch.float32)
        if d_gates_tk.numel():
            places, width = rows_nD.shape
            sizes = width, dy_tD.stride(0), rows_nD.stride(0), places, self.slots_tk.shape[1]
            combine_weight_gradient_kernel[(self.slots_tk.numel(),)](
                dy_tD, rows_nD, self.slots_tk, d_gates_tk, *sizes, **_tiles(width)[1]
            )
        return d_gates_tk


class _TritonDispatch(Dispatch):
    def places(self, choice_tk: Tensor) -> Places:
        """Return the places of `Dispatch` for the kernels: PyTorch sorts."""
        places = super().places(choice_tk)
        sources_n, slots_tk = places.sources_n.int(), places.slots_tk.int()
        return _TritonPlaces(sources_n=sources_n, slots_tk=slots_tk, complete=places.complete)


class TritonPermute(_TritonDispatch, Permute):
    """`Permute` with one Triton kernel for each direction."""


class TritonUnpermute(_TritonDispatch, Unpermute):
    """`Unpermute` with one Triton kernel for forward and one for each of its two gradients."""
