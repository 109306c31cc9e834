"""Moving tokens to their experts' places and back; every move is a gather, so no sum depends on chance.

`braid.kernels.operators.permute` says which choice lies in which place (``sources``), and the other way round
(``slots``).

    permute        out[s] = x[token of s]                           `gather_rows`
    its gradient   dx[t] = sum over choices of d_out[slot]          `combine_rows` without weights
    unpermute      y[t] = sum over choices of weight * out[slot]    `combine_rows`
    its gradient   d_out[s] = weight of s * dy[token of s]          `gather_rows` with weights
                   d_weight[t, choice] = dy[t] . out[slot]          `combine_weight_gradient`

Legend: T tokens, k choices of each, S places, D hidden. Sums are in fp32.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from braid.kernels.triton.launch import ceil_div, check, fail, is_fake, power_of_two

_COLUMNS: Final = 1024
_INT32: Final = (torch.int32,)


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
    """A place without a token gets zeros, one whose source is beyond all choices NaN."""
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
    """A choice that was dropped adds nothing, one beyond all places NaN."""
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
    dy_ptr,
    x_ptr,
    slots_ptr,
    d_weights_ptr,
    width,
    dy_stride,
    x_stride,
    places,
    choices,
    BLOCK: tl.constexpr,
):
    """One choice of one token per program."""
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


def _check_places(name: str, argument: str, index: Tensor, limit: int) -> None:
    """Indices from -1 on; their values are checked on the CPU only."""
    if index.device.type == "cpu" and index.numel() and not is_fake(index):
        low, high = (int(bound) for bound in torch.aminmax(index))
        if low < -1 or high >= limit:
            fail(name, argument, f"holds places in [{low}, {high}], outside [-1, {limit})")


def _check_gather(x: Tensor, sources: Tensor, choices: int, weights: Tensor | None) -> None:
    name = "gather_rows"
    check(name, "x", x, (None, None))
    check(name, "sources", sources, (None,), like=x, dtypes=_INT32)
    if choices < 1:
        fail(name, "choices", f"is {choices}, not at least 1")
    if weights is not None:
        check(name, "weights", weights, (x.shape[0], choices), like=x, contiguous=True)
    _check_places(name, "sources", sources, x.shape[0] * choices)


@custom_op("braid::gather_rows", mutates_args=())
def gather_rows(x: Tensor, sources: Tensor, choices: int, weights: Tensor | None) -> Tensor:
    """Return S x D: for every place the row of x (T x D) of its token, times its weight (T x k) if given.

    ``sources`` (S, int32) are token * choices + choice, or -1: zeros.
    """
    _check_gather(x, sources, choices, weights)
    tokens, width = x.shape
    out = x.new_empty(sources.shape[0], width)
    if out.numel():
        block = power_of_two(min(width, _COLUMNS), 16)
        across = ceil_div(width, block)
        gather_kernel[(out.shape[0] * across,)](
            x,
            sources,
            x if weights is None else weights,
            out,
            width,
            x.stride(0),
            choices,
            tokens * choices,
            across,
            WEIGHTED=weights is not None,
            BLOCK=block,
            num_warps=4,
        )
    return out


@gather_rows.register_fake
def _(x: Tensor, sources: Tensor, choices: int, weights: Tensor | None) -> Tensor:
    _check_gather(x, sources, choices, weights)
    return x.new_empty(sources.shape[0], x.shape[1])


def _check_combine(name: str, x: Tensor, slots: Tensor, weights: Tensor | None) -> None:
    check(name, "x", x, (None, None))
    check(name, "slots", slots, (None, None), like=x, dtypes=_INT32, contiguous=True)
    if weights is not None:
        check(name, "weights", weights, tuple(slots.shape), like=x, contiguous=True)
    _check_places(name, "slots", slots, x.shape[0])


@custom_op("braid::combine_rows", mutates_args=())
def combine_rows(x: Tensor, slots: Tensor, weights: Tensor | None) -> Tensor:
    """Return T x D: for every token the sum of the rows of x (S x D) at its slots (T x k, int32; -1: none).

    With ``weights`` (T x k) the rows are multiplied by them first.
    """
    _check_combine("combine_rows", x, slots, weights)
    (tokens, choices), width = slots.shape, x.shape[1]
    out = x.new_empty(tokens, width)
    if out.numel():
        block = power_of_two(min(width, _COLUMNS), 16)
        across = ceil_div(width, block)
        combine_kernel[(tokens * across,)](
            x,
            slots,
            x if weights is None else weights,
            out,
            width,
            x.stride(0),
            x.shape[0],
            across,
            CHOICES=choices,
            WEIGHTED=weights is not None,
            BLOCK=block,
            num_warps=4,
        )
    return out


@combine_rows.register_fake
def _(x: Tensor, slots: Tensor, weights: Tensor | None) -> Tensor:
    _check_combine("combine_rows", x, slots, weights)
    return x.new_empty(slots.shape[0], x.shape[1])


def _check_weight_gradient(dy: Tensor, x: Tensor, slots: Tensor) -> None:
    name = "combine_weight_gradient"
    _check_combine(name, x, slots, None)
    check(name, "dy", dy, (slots.shape[0], x.shape[1]), like=x)


@custom_op("braid::combine_weight_gradient", mutates_args=())
def combine_weight_gradient(dy: Tensor, x: Tensor, slots: Tensor) -> Tensor:
    """Return the gradient of `combine_rows`'s weights (T x k, fp32); 0 for a choice that was dropped."""
    _check_weight_gradient(dy, x, slots)
    d_weights = dy.new_empty(slots.shape, dtype=torch.float32)
    if d_weights.numel():
        combine_weight_gradient_kernel[(slots.numel(),)](
            dy,
            x,
            slots,
            d_weights,
            x.shape[1],
            dy.stride(0),
            x.stride(0),
            x.shape[0],
            slots.shape[1],
            BLOCK=power_of_two(min(x.shape[1], _COLUMNS), 16),
            num_warps=4,
        )
    return d_weights


@combine_weight_gradient.register_fake
def _(dy: Tensor, x: Tensor, slots: Tensor) -> Tensor:
    _check_weight_gradient(dy, x, slots)
    return dy.new_empty(slots.shape, dtype=torch.float32)
