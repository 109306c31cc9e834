"""The router of a mixture of experts: top-k of a softmax, places under a capacity, auxiliary loss.

Of every token the k experts with the largest probability are chosen (the lower number where two are equal).
Their probabilities are the weights of the experts' results, made to sum to 1 if ``normalise``. Tokens take
their places at an expert in the order of their numbers; who comes after ``capacity`` others is dropped. The
auxiliary loss that keeps experts in balance is E * sum_e f_e P_e (Fedus et al. 2021, equation 4) with f_e the
share of all choices that fell on e and P_e its mean probability: 1 if all are alike.

Places are counted by block: every program counts its tokens' choices, and starts from what the programs
before it have counted. So the result is the same on every run.

Legend: T tokens, E experts, k choices, B blocks of tokens.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from braid.kernels.fused.launch import ceil_div, check, check_indices, fail, power_of_two

_MOST_EXPERTS: Final = 1024


@triton.jit
def _probabilities(logits_ptr, row, expert, stride, tokens, experts):
    """Softmax of a tile's rows, 0 beyond the last expert."""
    mask = (row < tokens)[:, None] & (expert < experts)[None, :]
    place = row.to(tl.int64)[:, None] * stride + expert[None, :]
    logit = tl.load(logits_ptr + place, mask=mask, other=float("-inf")).to(tl.float32)
    logit = tl.where((row < tokens)[:, None], logit, 0)
    share = tl.exp(logit - tl.max(logit, axis=1)[:, None])
    share = tl.where((expert < experts)[None, :], share, 0)
    return share / tl.sum(share, axis=1)[:, None]


@triton.jit
def choose_kernel(
    logits_ptr,
    weights_ptr,
    choices_ptr,
    counts_ptr,
    sums_ptr,
    tokens,
    experts,
    stride,
    CHOICES: tl.constexpr,
    NORMALISE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Weights and choices of a block of tokens; for every expert how often it was chosen, and the sum of its
    probabilities."""
    block = tl.program_id(0)
    row = block * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, BLOCK)
    in_rows = row < tokens
    probability = _probabilities(logits_ptr, row, expert, stride, tokens, experts)
    rest = tl.where((expert < experts)[None, :], probability, -1)
    chosen = tl.zeros((ROWS, BLOCK), dtype=tl.int32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    for choice in tl.static_range(CHOICES):
        best = tl.argmax(rest, axis=1)
        weight = tl.max(rest, axis=1)
        hit = expert[None, :] == best[:, None]
        rest = tl.where(hit, -1, rest)
        chosen += (hit & in_rows[:, None]).to(tl.int32)
        total += weight
        place = row.to(tl.int64) * CHOICES + choice
        tl.store(choices_ptr + place, best, mask=in_rows)
        tl.store(weights_ptr + place, weight, mask=in_rows)
    if NORMALISE:
        tl.debug_barrier()
        for choice in tl.static_range(CHOICES):
            place = row.to(tl.int64) * CHOICES + choice
            weight = tl.load(weights_ptr + place, mask=in_rows, other=0)
            tl.store(weights_ptr + place, weight / total, mask=in_rows)
    place = block.to(tl.int64) * experts + expert
    sums = tl.sum(tl.where(in_rows[:, None], probability, 0), axis=0)
    tl.store(counts_ptr + place, tl.sum(chosen, axis=0), mask=expert < experts)
    tl.store(sums_ptr + place, sums, mask=expert < experts)


@triton.jit
def place_kernel(
    choices_ptr,
    before_ptr,
    offsets_ptr,
    slots_ptr,
    sources_ptr,
    tokens,
    experts,
    capacity,
    CHOICES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Where each choice's token goes among the sorted ones (-1: dropped), and what lies there."""
    block = tl.program_id(0)
    row = block * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, BLOCK)
    in_rows, in_experts = row < tokens, expert < experts
    taken = tl.zeros((ROWS, BLOCK), dtype=tl.int32)
    for choice in tl.static_range(CHOICES):
        best = tl.load(choices_ptr + row.to(tl.int64) * CHOICES + choice, mask=in_rows, other=-1)
        taken += (expert[None, :] == best[:, None]).to(tl.int32)
    before = tl.load(before_ptr + block.to(tl.int64) * experts + expert, mask=in_experts, other=0)
    place = tl.cumsum(taken, axis=0) - taken + before[None, :]
    offset = tl.load(offsets_ptr + expert, mask=in_experts, other=0)
    slot = tl.where(place < capacity, place + offset[None, :], -1)
    for choice in tl.static_range(CHOICES):
        index = row.to(tl.int64) * CHOICES + choice
        best = tl.load(choices_ptr + index, mask=in_rows, other=-1)
        mine = tl.sum(tl.where(expert[None, :] == best[:, None], slot, 0), axis=1)
        tl.store(slots_ptr + index, mine, mask=in_rows)
        tl.store(sources_ptr + mine, index.to(tl.int32), mask=in_rows & (mine >= 0))


@triton.jit
def route_gradient_kernel(
    d_weights_ptr,
    weights_ptr,
    choices_ptr,
    logits_ptr,
    d_means_ptr,
    d_logits_ptr,
    tokens,
    experts,
    stride,
    CHOICES: tl.constexpr,
    NORMALISE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``d_means`` (E): the loss's gradient by the mean probabilities, divided by the tokens.

    A token with a choice that is no expert gets NaN.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, BLOCK)
    in_rows = row < tokens
    probability = _probabilities(logits_ptr, row, expert, stride, tokens, experts)
    d = tl.load(d_means_ptr + expert, mask=expert < experts, other=0)[None, :]
    d += tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    mean = tl.zeros((ROWS,), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    for choice in tl.static_range(CHOICES):
        place = row.to(tl.int64) * CHOICES + choice
        best = tl.load(choices_ptr + place, mask=in_rows, other=-1)
        d_weight = tl.load(d_weights_ptr + place, mask=in_rows, other=0).to(tl.float32)
        d_weight = tl.where((best < 0) | (best >= experts), float("nan"), d_weight)
        mean += d_weight * tl.load(weights_ptr + place, mask=in_rows, other=0)
        total += tl.sum(tl.where(expert[None, :] == best[:, None], probability, 0), axis=1)
    for choice in tl.static_range(CHOICES):
        place = row.to(tl.int64) * CHOICES + choice
        best = tl.load(choices_ptr + place, mask=in_rows, other=-1)
        d_weight = tl.load(d_weights_ptr + place, mask=in_rows, other=0).to(tl.float32)
        if NORMALISE:
            d_weight = (d_weight - mean) / tl.where(in_rows, total, 1)
        d += tl.where(expert[None, :] == best[:, None], d_weight[:, None], 0)
    d_logit = probability * (d - tl.sum(d * probability, axis=1)[:, None])
    d_logit = tl.where((mean == mean)[:, None], d_logit, float("nan"))
    mask = in_rows[:, None] & (expert < experts)[None, :]
    place = row.to(tl.int64)[:, None] * experts + expert[None, :]
    tl.store(d_logits_ptr + place, d_logit.to(d_logits_ptr.dtype.element_ty), mask=mask)


def tile_of(experts: int) -> tuple[int, int]:
    """Rows and columns of a tile."""
    block = power_of_two(experts, 16)
    return max(16, min(128, 4096 // block)), block


# -- operators ---------------------------------------------------------------------------------------------


def _check(name: str, logits: Tensor, choices: int, capacity: int) -> None:
    check(name, "logits", logits, (None, None))
    experts = logits.shape[1]
    if not 1 <= experts <= _MOST_EXPERTS:
        fail(name, "logits", f"has {experts} columns (experts), not 1 to {_MOST_EXPERTS}")
    if not 1 <= choices <= experts:
        fail(name, "choices", f"is {choices}, not 1 to {experts}, the number of experts")
    if capacity < 1:
        fail(name, "capacity", f"is {capacity}, not at least 1")


def _places(logits: Tensor, choices: int, capacity: int) -> int:
    tokens, experts = logits.shape
    return min(tokens * choices, experts * min(capacity, max(tokens, 1)))


@custom_op("braid::route", mutates_args=())
def route(
    logits: Tensor, choices: int, capacity: int, normalise: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Route T tokens by their logits (T x E), ``choices`` experts each.

    Returns weights (T x k, fp32), experts (T x k, int32), slots (T x k, int32: the choice's place among the
    tokens sorted by expert, -1 where it was dropped), sources (S, int32: the choice, token * k + number, that
    lies in a place, -1 in places after the last), offsets (E + 1, int32: the first place of every expert),
    the auxiliary loss (0-dim, fp32), and each expert's share of the choices, f (E, fp32).
    """
    _check("route", logits, choices, capacity)
    tokens, experts = logits.shape
    device = logits.device
    weights = logits.new_empty(tokens, choices, dtype=torch.float32)
    chosen = torch.empty(tokens, choices, dtype=torch.int32, device=device)
    slots = torch.empty(tokens, choices, dtype=torch.int32, device=device)
    sources = torch.full((_places(logits, choices, capacity),), -1, dtype=torch.int32, device=device)
    offsets = torch.zeros(experts + 1, dtype=torch.int32, device=device)
    if not tokens:
        nothing = logits.new_zeros(experts, dtype=torch.float32)
        return weights, chosen, slots, sources, offsets, nothing.sum(), nothing
    rows, block = tile_of(experts)
    blocks = ceil_div(tokens, rows)
    counts = torch.empty(blocks, experts, dtype=torch.int32, device=device)
    sums = logits.new_empty(blocks, experts, dtype=torch.float32)
    choose_kernel[(blocks,)](
        logits,
        weights,
        chosen,
        counts,
        sums,
        tokens,
        experts,
        logits.stride(0),
        CHOICES=choices,
        NORMALISE=normalise,
        ROWS=rows,
        BLOCK=block,
        num_warps=4,
    )
    upto = counts.cumsum(0, dtype=torch.int32)
    torch.cumsum(upto[-1].clamp(max=capacity), 0, dtype=torch.int32, out=offsets[1:])
    place_kernel[(blocks,)](
        chosen,
        upto - counts,
        offsets,
        slots,
        sources,
        tokens,
        experts,
        capacity,
        CHOICES=choices,
        ROWS=rows,
        BLOCK=block,
        num_warps=4,
    )
    share = upto[-1] / (tokens * choices)
    loss = experts * (share * (sums.sum(0) / tokens)).sum()
    return weights, chosen, slots, sources, offsets, loss, share


@route.register_fake
def _(
    logits: Tensor, choices: int, capacity: int, normalise: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    _check("route", logits, choices, capacity)
    tokens, experts = logits.shape
    weights = logits.new_empty(tokens, choices, dtype=torch.float32)
    chosen = logits.new_empty(tokens, choices, dtype=torch.int32)
    sources = logits.new_empty(_places(logits, choices, capacity), dtype=torch.int32)
    offsets = logits.new_empty(experts + 1, dtype=torch.int32)
    share = logits.new_empty(experts, dtype=torch.float32)
    return weights, chosen, torch.empty_like(chosen), sources, offsets, share.new_empty(()), share


def _check_gradient(
    d_weights: Tensor, weights: Tensor, experts: Tensor, logits: Tensor, share: Tensor
) -> None:
    name, float32 = "route_gradient", (torch.float32,)
    check(name, "logits", logits, (None, None))
    size = (logits.shape[0], weights.shape[-1])
    check(name, "weights", weights, size, like=logits, dtypes=float32, contiguous=True)
    check(name, "d_weights", d_weights, size, like=logits, contiguous=True)
    check(name, "experts", experts, size, like=logits, dtypes=(torch.int32,), contiguous=True)
    check(name, "share", share, (logits.shape[1],), like=logits, dtypes=float32)
    check_indices(name, "experts", experts, logits.shape[1])


@custom_op("braid::route_gradient", mutates_args=())
def route_gradient(
    d_weights: Tensor,
    weights: Tensor,
    experts: Tensor,
    logits: Tensor,
    share: Tensor,
    d_loss: float,
    normalise: bool,
) -> Tensor:
    """Return the gradient of the logits (T x E) from that of the weights (T x k) and of the auxiliary loss.

    The choices themselves, and with them ``share``, have no gradient.
    """
    _check_gradient(d_weights, weights, experts, logits, share)
    tokens, count = logits.shape
    d_logits = logits.new_empty(logits.shape)
    if d_logits.numel():
        rows, block = tile_of(count)
        route_gradient_kernel[(ceil_div(tokens, rows),)](
            d_weights,
            weights,
            experts,
            logits,
            share * (d_loss * count / tokens),
            d_logits,
            tokens,
            count,
            logits.stride(0),
            CHOICES=weights.shape[1],
            NORMALISE=normalise,
            ROWS=rows,
            BLOCK=block,
            num_warps=4,
        )
    return d_logits


@route_gradient.register_fake
def _(
    d_weights: Tensor,
    weights: Tensor,
    experts: Tensor,
    logits: Tensor,
    share: Tensor,
    d_loss: float,
    normalise: bool,
) -> Tensor:
    _check_gradient(d_weights, weights, experts, logits, share)
    return logits.new_empty(logits.shape)
