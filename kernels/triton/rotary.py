"""Rotary embedding (Su et al. 2021) of queries and keys in one pass, packed for attention.

Dimension i turns with i + d/2, as in Hugging Face's Llama. One kernel reads queries, keys and values wherever
they lie and writes them side by side: forward it splits what one GEMM made, backward (``back``) it gathers
what attention's gradient left, so that neither needs another copy.

Legend: b samples, s tokens of each, n query heads, k key (and value) heads, d the dimension of a head.
"""

import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from braid.kernels.triton.launch import check, fail, power_of_two, warps_for


@triton.jit
def _turn(
    x_ptr, stride_n, out_ptr, cos, sin, heads, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr
):
    """Turn the heads of one token; ``cos`` and ``sin`` are blocks of d/2."""
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (head < heads) & (column < HALF)
    first = tl.load(x_ptr + head * stride_n + column, mask=mask, other=0).to(tl.float32)
    second = tl.load(x_ptr + head * stride_n + column + HALF, mask=mask, other=0).to(tl.float32)
    place = out_ptr + head * (2 * HALF) + column
    turned = first * cos[None, :] - second * sin[None, :]
    tl.store(place, turned.to(out_ptr.dtype.element_ty), mask=mask)
    turned = second * cos[None, :] + first * sin[None, :]
    tl.store(place + HALF, turned.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rotary_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    sequence,
    q_b,
    q_s,
    q_n,
    k_b,
    k_s,
    k_n,
    v_b,
    v_s,
    v_n,
    heads,
    kv_heads,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    BACK: tl.constexpr,
):
    """One token per program; x_b, x_s, x_n are the strides of sample, token and head."""
    token = tl.program_id(0).to(tl.int64)
    sample, position = token // sequence, token % sequence
    column = tl.arange(0, BLOCK)
    cos = tl.load(cos_ptr + position * HALF + column, mask=column < HALF, other=0).to(tl.float32)
    sin = tl.load(sin_ptr + position * HALF + column, mask=column < HALF, other=0).to(tl.float32)
    if BACK:
        sin = -sin
    out_ptr += token * (heads + 2 * kv_heads) * (2 * HALF)
    q_ptr += sample * q_b + position * q_s
    _turn(q_ptr, q_n, out_ptr, cos, sin, heads, HALF, HEADS, BLOCK)
    out_ptr += heads * (2 * HALF)
    k_ptr += sample * k_b + position * k_s
    _turn(k_ptr, k_n, out_ptr, cos, sin, kv_heads, HALF, KV_HEADS, BLOCK)
    out_ptr += kv_heads * (2 * HALF)
    v_ptr += sample * v_b + position * v_s
    head = tl.arange(0, KV_HEADS)[:, None]
    wide = tl.arange(0, 2 * BLOCK)[None, :]
    mask = (head < kv_heads) & (wide < 2 * HALF)
    value = tl.load(v_ptr + head * v_n + wide, mask=mask)
    tl.store(out_ptr + head * (2 * HALF) + wide, value, mask=mask)


def _check(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> None:
    check("rotary", "q", q, (None, None, None, None))
    samples, tokens, _, width = q.shape
    check("rotary", "k", k, (samples, tokens, None, width), like=q, dtypes=(q.dtype,))
    check("rotary", "v", v, tuple(k.shape), like=q, dtypes=(q.dtype,))
    if width % 2:
        fail("rotary", "q", f"has heads of dimension {width}, which is odd")
    for argument, table in (("cos", cos), ("sin", sin)):
        check("rotary", argument, table, (tokens, width // 2), like=q, contiguous=True)


@custom_op("braid::rotary", mutates_args=())
def rotary(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """Return q and k (b x s x heads x d, any strides but the last), turned (``back``: the other way), and v.

    The result is (b*s) x ((n + 2k) * d), columns q, k, v, each head by head. ``cos`` and ``sin`` are s x d/2.
    """
    _check(q, k, v, cos, sin)
    samples, tokens, heads, width = q.shape
    kv_heads, half = k.shape[2], width // 2
    out = q.new_empty(samples * tokens, (heads + 2 * kv_heads) * width)
    if out.numel():
        block = power_of_two(half, 8)
        rotary_kernel[(samples * tokens,)](
            q,
            k,
            v,
            cos,
            sin,
            out,
            tokens,
            *q.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            heads,
            kv_heads,
            HALF=half,
            HEADS=power_of_two(heads),
            KV_HEADS=power_of_two(kv_heads),
            BLOCK=block,
            BACK=back,
            num_warps=warps_for(2 * power_of_two(heads) * block),
        )
    return out


@rotary.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    _check(q, k, v, cos, sin)
    samples, tokens, heads, width = q.shape
    return q.new_empty(samples * tokens, (heads + 2 * k.shape[2]) * width)
