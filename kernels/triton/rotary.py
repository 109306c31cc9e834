"""Rotary embedding of queries and keys in one pass, packed for attention.

Dimension i is rotated with i + d/2. One kernel reads queries, keys and values from separate addresses and
writes them side by side: forward it reads the output of one matrix product, backward (``back``) it reads the
gradients from attention, so that neither direction needs another copy.

Legend: b samples, s tokens of each, n query heads, k key and value heads, d a head's dimension, h = d/2.
"""

import triton
import triton.language as tl
from torch import Tensor

from braid.kernels.operators.attention import Attention
from braid.kernels.triton.launch import check, power_of_two, warps_for


@triton.jit
def _turn(
    x_ptr, stride_n, out_ptr, cos, sin, heads, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr
):
    """Rotate the heads of one token; ``cos`` and ``sin`` are blocks of d/2."""
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
    """Rotate one token per program; x_b, x_s, x_n are the strides of sample, token and head."""
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


def rotary(q: Tensor, k: Tensor, v: Tensor, cos_sh: Tensor, sin_sh: Tensor, *, back: bool) -> Tensor:
    """Rotate q and k (b x s x heads x d, any strides but the last), by negative angles if ``back``; append v.

    The result is (b*s) x ((n + 2k) * d): columns q, k, v, head by head.
    """
    tables = {"cos": (cos_sh, "sh "), "sin": (sin_sh, "sh ")}
    check("rotary", q=(q, "bsnd"), k=(k, "bskd"), v=(v, "bskd"), **tables)
    samples, tokens, heads, width = q.shape
    kv_heads, half = k.shape[2], cos_sh.shape[1]
    out = q.new_empty(samples * tokens, (heads + 2 * kv_heads) * width)
    if out.numel():
        block, room = (
            power_of_two(half, 8),
            {"HEADS": power_of_two(heads), "KV_HEADS": power_of_two(kv_heads)},
        )
        strides = (stride for x in (q, k, v) for stride in x.stride()[:3])
        flags = {"HALF": half, **room, "BLOCK": block, "BACK": back}
        warps = warps_for(2 * room["HEADS"] * block)
        rotary_kernel[(samples * tokens,)](
            q, k, v, cos_sh, sin_sh, out, tokens, *strides, heads, kv_heads, **flags, num_warps=warps
        )
    return out


class TritonAttention(Attention):
    """`Attention` with one Triton kernel that rotates queries and keys and packs them with the values."""

    def _turn_heads(self, qkv_bsnd: Tensor) -> Tensor:
        if self.rotary_base is None:
            return super()._turn_heads(qkv_bsnd)
        q, k, v = self._q_k_v(qkv_bsnd, dim=2)
        return rotary(q, k, v, *self._flat_tables(qkv_bsnd), back=False).view(qkv_bsnd.shape)

    def _turn_back(self, d_q: Tensor, d_k: Tensor, d_v: Tensor) -> Tensor:
        if self.rotary_base is None:
            return super()._turn_back(d_q, d_k, d_v)
        d_q, d_k, d_v = (d if d.stride(-1) == 1 else d.contiguous() for d in (d_q, d_k, d_v))
        return rotary(d_q, d_k, d_v, *self._flat_tables(d_q), back=True)

    def _flat_tables(self, like: Tensor) -> tuple[Tensor, Tensor]:
        cos_s1h, sin_s1h = self._tables(like)
        return cos_s1h.squeeze(1), sin_s1h.squeeze(1)
