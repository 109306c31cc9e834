"""Dropout whose mask is recomputed instead of stored.

The mask is a pure function of (seed, step, site, token, column), by the counter-based generator Philox4x32-10
(Salmon et al. 2011), so that forward and backward pass, and any layout, draw the same one. A *key* is an
int64 tensor of 4 numbers on the device: seed, step, site (which dropout of the model), and the number of the
first token. It lives in memory so that a captured CUDA graph can be replayed with the next step's key.

Legend: t tokens, D columns, R rows of a tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from braid.kernels.fused.launch import check, fail

_ROUNDS = ((0xD2511F53, 0x9E3779B9), (0xCD9E8D57, 0xBB67AE85))
"""Multiplier and Weyl increment for each half of the state (Salmon et al. 2011, section 4)."""


def dropout_key(*, seed: int, step: int, site: int, first_token: int, device: torch.device) -> Tensor:
    """The key of one dropout in one step; ``first_token`` is the number of this rank's first token."""
    return torch.tensor([seed, step, site, first_token], dtype=torch.int64, device=device)


def threshold(operator: str, probability: float) -> int:
    """What a 31-bit random number must reach for an element to be kept."""
    if not 0 <= probability < 1:
        fail(operator, "probability", f"is {probability}, not in [0, 1)")
    return int(probability * 2**31)


def check_key(operator: str, key: Tensor | None, probability: float, like: Tensor) -> None:
    """ValueError for a key that is missing or wrong."""
    if key is None:
        if probability:
            fail(operator, "key", "is missing, but there is dropout")
    else:
        check(operator, "key", key, (4,), like=like, dtypes=(torch.int64,))


@triton.jit
def keep_mask(key_ptr, row, threshold, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Which elements of columns 0 ... BLOCK of the rows (R of them, counted from the first token) are kept.

    One draw gives the numbers of four neighbouring columns.
    """
    seed = tl.load(key_ptr)
    step = tl.load(key_ptr + 1).to(tl.int32)
    site = tl.load(key_ptr + 2).to(tl.int32)
    token = (tl.load(key_ptr + 3) + row).to(tl.int32)
    zero = tl.zeros((ROWS, BLOCK // 4), dtype=tl.int32)
    group = zero + tl.arange(0, BLOCK // 4)[None, :]
    r0, r1, r2, r3 = tl.philox(seed, group, zero + token[:, None], zero + step, zero + site)
    random = tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3))
    return (random >> 1).to(tl.int32) >= threshold


def reference_keep_mask(key: Tensor, rows: int, width: int, probability: float) -> Tensor:
    """The mask (t x D, bool) that the kernels use, by PyTorch's 64-bit integers."""
    seed, step, site, first_token = (int(number) for number in key)
    groups = -(-width // 4)
    tokens = torch.arange(first_token, first_token + rows, device=key.device).bitwise_and_(0xFFFFFFFF)
    columns = torch.arange(groups, device=key.device)
    size = (rows, groups)
    c = [
        columns.expand(size),
        tokens.unsqueeze(1).expand(size),
        torch.full(size, step & 0xFFFFFFFF, device=key.device),
        torch.full(size, site & 0xFFFFFFFF, device=key.device),
    ]
    keys = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    for _ in range(10):
        (high_a, low_a), (high_b, low_b) = (
            _wide_product(c[place], multiplier)
            for place, (multiplier, _) in zip((0, 2), _ROUNDS, strict=True)
        )
        c = [high_b ^ c[1] ^ keys[0], low_b, high_a ^ c[3] ^ keys[1], low_a]
        keys = [(key + weyl) & 0xFFFFFFFF for key, (_, weyl) in zip(keys, _ROUNDS, strict=True)]
    random = torch.stack(c, dim=-1).view(rows, 4 * groups)[:, :width]
    return (random >> 1) >= int(probability * 2**31)


def _wide_product(x: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """High and low half of the product of 32-bit numbers; int64 wraps, its bits are right."""
    product = x * by
    return (product >> 32).bitwise_and(0xFFFFFFFF), product.bitwise_and(0xFFFFFFFF)
