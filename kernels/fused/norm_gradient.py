"""Gradients of bias, dropout, residual addition and normalisation; see `braid.kernels.fused.norm`.

The reference is autograd through the references there. Legend: t tokens, D hidden, P partial sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from braid.kernels.fused.columns import add_columns, partial_sums
from braid.kernels.fused.dropout import check_key, keep_mask, threshold
from braid.kernels.fused.launch import ceil_div, check
from braid.kernels.fused.norm import check_width, tile_of


@triton.jit
def backward_kernel(
    dy_ptr,
    z_ptr,
    weight_ptr,
    statistics_ptr,
    skip_ptr,
    key_ptr,
    dz_ptr,
    d_branch_ptr,
    partials_ptr,
    rows,
    width,
    dy_stride,
    z_stride,
    skip_stride,
    tiles_per_program,
    threshold,
    keep_scale,
    NORM: tl.constexpr,
    CENTRED: tl.constexpr,
    SKIP: tl.constexpr,
    DROPOUT: tl.constexpr,
    WANT_INPUT: tl.constexpr,
    WANT_WEIGHT: tl.constexpr,
    WANT_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Partial sums of a program, each of D: weight, shift, bias."""
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    in_columns = column < width
    if NORM and (WANT_INPUT or WANT_BIAS):
        weight = tl.load(weight_ptr + column, mask=in_columns, other=0).to(tl.float32)
    d_weight = tl.zeros((BLOCK,), dtype=tl.float32)
    d_shift = tl.zeros((BLOCK,), dtype=tl.float32)
    d_bias = tl.zeros((BLOCK,), dtype=tl.float32)
    for tile in range(tiles_per_program):
        row = (program.to(tl.int64) * tiles_per_program + tile) * ROWS + tl.arange(0, ROWS)
        in_rows = row < rows
        mask = in_rows[:, None] & in_columns[None, :]
        dy = tl.load(dy_ptr + row[:, None] * dy_stride + column[None, :], mask=mask, other=0).to(tl.float32)
        dz = dy
        if NORM:
            z = tl.load(z_ptr + row[:, None] * z_stride + column[None, :], mask=mask, other=0).to(tl.float32)
            statistics = statistics_ptr
            if CENTRED:
                mean = tl.load(statistics + row, mask=in_rows, other=0)
                z = tl.where(mask, z - mean[:, None], 0)
                statistics += rows
            rstd = tl.load(statistics + row, mask=in_rows, other=0)
            normal = z * rstd[:, None]
            if WANT_WEIGHT:
                d_weight += tl.sum(dy * normal, axis=0)
                if CENTRED:
                    d_shift += tl.sum(dy, axis=0)
            if WANT_INPUT or WANT_BIAS:
                scaled = dy * weight[None, :]
                dz = scaled - normal * (tl.sum(scaled * normal, axis=1) / width)[:, None]
                if CENTRED:
                    dz -= (tl.sum(scaled, axis=1) / width)[:, None]
                dz *= rstd[:, None]
        if WANT_INPUT or WANT_BIAS:
            if SKIP:
                skip_place = row[:, None] * skip_stride + column[None, :]
                dz += tl.load(skip_ptr + skip_place, mask=mask, other=0).to(tl.float32)
            place = row[:, None] * width + column[None, :]
            if WANT_INPUT and NORM:
                tl.store(dz_ptr + place, dz.to(dz_ptr.dtype.element_ty), mask=mask)
            if DROPOUT:
                keep = keep_mask(key_ptr, row, threshold, ROWS, BLOCK)
                dz = tl.where(keep, dz * keep_scale, 0)
                if WANT_INPUT:
                    tl.store(d_branch_ptr + place, dz.to(d_branch_ptr.dtype.element_ty), mask=mask)
            if WANT_BIAS:
                d_bias += tl.sum(tl.where(mask, dz, 0), axis=0)
    partials_ptr += program.to(tl.int64) * 3 * width
    if WANT_WEIGHT:
        tl.store(partials_ptr + column, d_weight, mask=in_columns)
        if CENTRED:
            tl.store(partials_ptr + width + column, d_shift, mask=in_columns)
    if WANT_BIAS:
        tl.store(partials_ptr + 2 * width + column, d_bias, mask=in_columns)


def _check(
    name: str,
    dy: Tensor,
    z: Tensor | None,
    statistics: Tensor | None,
    skip: Tensor | None,
    vectors: dict[str, Tensor | None],
) -> None:
    check_width(name, "dy", dy)
    if z is not None:
        check(name, "z", z, tuple(dy.shape), like=dy, dtypes=(dy.dtype,))
    if statistics is not None:
        size = (None, dy.shape[0])
        check(name, "statistics", statistics, size, like=dy, dtypes=(torch.float32,), contiguous=True)
    if skip is not None:
        check(name, "skip", skip, tuple(dy.shape), like=dy, dtypes=(dy.dtype,))
    for argument, vector in vectors.items():
        if vector is not None:
            check(name, argument, vector, (dy.shape[1],), like=dy)


def _backward(
    dy: Tensor,
    z: Tensor | None,
    statistics: Tensor | None,
    weight: Tensor | None,
    skip: Tensor | None,
    key: Tensor | None,
    probability: float,
    *,
    want_input: bool,
    d_weight: Tensor | None = None,
    d_shift: Tensor | None = None,
    d_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """dz and the branch's gradient, empty where they are not wanted or the same as another; adds the rest."""
    rows, width = dy.shape
    norm, dropout = statistics is not None, probability > 0
    dz = dy.new_empty(dy.shape if want_input and norm else (0,))
    d_branch = dy.new_empty(dy.shape if want_input and dropout else (0,))
    if not rows:
        return dz, d_branch
    tile_rows, block, warps = tile_of(width)
    summed = d_weight is not None or d_bias is not None
    programs, each = partial_sums(rows, tile_rows) if summed else (ceil_div(rows, tile_rows), 1)
    partials = dy.new_empty((programs, 3, width) if summed else (0,), dtype=torch.float32)
    backward_kernel[(programs,)](
        dy,
        dy if z is None else z,
        dy if weight is None else weight,
        dy if statistics is None else statistics,
        dy if skip is None else skip,
        dy if key is None else key,
        dz,
        d_branch,
        partials,
        rows,
        width,
        dy.stride(0),
        0 if z is None else z.stride(0),
        0 if skip is None else skip.stride(0),
        each,
        threshold("norm", probability),
        1 / (1 - probability),
        NORM=norm,
        CENTRED=statistics is not None and statistics.shape[0] == 2,
        SKIP=skip is not None,
        DROPOUT=dropout,
        WANT_INPUT=want_input,
        WANT_WEIGHT=d_weight is not None,
        WANT_BIAS=d_bias is not None,
        ROWS=tile_rows,
        BLOCK=block,
        num_warps=warps,
    )
    for place, total in enumerate((d_weight, d_shift, d_bias)):
        if total is not None:
            add_columns(partials[:, place], total)
    return dz, d_branch


@custom_op("braid::norm_input_gradient", mutates_args=())
def norm_input_gradient(
    dy: Tensor, z: Tensor, statistics: Tensor, weight: Tensor, skip: Tensor | None
) -> Tensor:
    """Return dz (t x D), plus ``skip`` if given (the gradient that reaches z around the norm)."""
    _check("norm_input_gradient", dy, z, statistics, skip, {"weight": weight})
    return _backward(dy, z, statistics, weight, skip, None, 0.0, want_input=True)[0]


@norm_input_gradient.register_fake
def _(dy: Tensor, z: Tensor, statistics: Tensor, weight: Tensor, skip: Tensor | None) -> Tensor:
    _check("norm_input_gradient", dy, z, statistics, skip, {"weight": weight})
    return dy.new_empty(dy.shape)


@custom_op("braid::norm_weight_gradient", mutates_args=("d_weight", "d_shift"))
def norm_weight_gradient(
    dy: Tensor, z: Tensor, statistics: Tensor, d_weight: Tensor, d_shift: Tensor | None
) -> None:
    """Add the gradients of weight and, of a LayerNorm, shift to their main gradients (D)."""
    _check("norm_weight_gradient", dy, z, statistics, None, {"d_weight": d_weight, "d_shift": d_shift})
    _backward(dy, z, statistics, None, None, None, 0.0, want_input=False, d_weight=d_weight, d_shift=d_shift)


@norm_weight_gradient.register_fake
def _(dy: Tensor, z: Tensor, statistics: Tensor, d_weight: Tensor, d_shift: Tensor | None) -> None:
    _check("norm_weight_gradient", dy, z, statistics, None, {"d_weight": d_weight, "d_shift": d_shift})


@custom_op("braid::add_norm_gradient", mutates_args=("d_weight", "d_shift", "d_bias"))
def add_norm_gradient(
    dy: Tensor,
    z: Tensor,
    statistics: Tensor,
    weight: Tensor,
    skip: Tensor | None,
    key: Tensor | None,
    probability: float,
    d_weight: Tensor,
    d_shift: Tensor | None,
    d_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """All gradients of `add_norm` in one pass: return those of x and of the branch (each t x D).

    Without dropout they are equal, and the second is empty. Parameters' gradients are added to ``d_...`` (D).
    """
    vectors = {"weight": weight, "d_weight": d_weight, "d_shift": d_shift, "d_bias": d_bias}
    _check("add_norm_gradient", dy, z, statistics, skip, vectors)
    check_key("add_norm_gradient", key, probability, dy)
    return _backward(
        dy,
        z,
        statistics,
        weight,
        skip,
        key,
        probability,
        want_input=True,
        d_weight=d_weight,
        d_shift=d_shift,
        d_bias=d_bias,
    )


@add_norm_gradient.register_fake
def _(
    dy: Tensor,
    z: Tensor,
    statistics: Tensor,
    weight: Tensor,
    skip: Tensor | None,
    key: Tensor | None,
    probability: float,
    d_weight: Tensor,
    d_shift: Tensor | None,
    d_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    vectors = {"weight": weight, "d_weight": d_weight, "d_shift": d_shift, "d_bias": d_bias}
    _check("add_norm_gradient", dy, z, statistics, skip, vectors)
    check_key("add_norm_gradient", key, probability, dy)
    return dy.new_empty(dy.shape), dy.new_empty(dy.shape if probability else (0,))


@custom_op("braid::bias_dropout_add_gradient", mutates_args=("d_bias",))
def bias_dropout_add_gradient(
    dy: Tensor, key: Tensor | None, probability: float, d_bias: Tensor | None
) -> Tensor:
    """Return the branch's gradient (t x D; empty without dropout, where it is dy) and add the bias's (D)."""
    _check("bias_dropout_add_gradient", dy, None, None, None, {"d_bias": d_bias})
    check_key("bias_dropout_add_gradient", key, probability, dy)
    want_input = probability > 0
    if not (want_input or d_bias is not None):
        return dy.new_empty(0)
    return _backward(dy, None, None, None, None, key, probability, want_input=want_input, d_bias=d_bias)[1]


@bias_dropout_add_gradient.register_fake
def _(dy: Tensor, key: Tensor | None, probability: float, d_bias: Tensor | None) -> Tensor:
    _check("bias_dropout_add_gradient", dy, None, None, None, {"d_bias": d_bias})
    check_key("bias_dropout_add_gradient", key, probability, dy)
    return dy.new_empty(dy.shape if probability else (0,))
