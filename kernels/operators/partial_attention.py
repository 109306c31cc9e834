"""Attention to some of the keys at a time: torch's kernels, whose parts are merged by their log-sum-exp.

Softmax over a set of keys is the average of softmaxes over its parts, weighted by their sums of exponentials
(Milakov and Gimelshein 2018; blockwise: Liu et al. 2023, "Ring Attention with Blockwise Transformers"). The
gradient of a part needs the merged output and log-sum-exp, and nothing of the other parts. No kernel stores
scores.

Legend: b samples, s queries and r keys of each, n query heads, m key and value heads, d the dimension of a
head.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from braid.kernels.operators.context_blocks import AttentionBlock
from braid.kernels.operators.operator import Saved

_ATEN = torch.ops.aten
_ALIGNED = 32
"""Queries that a log-sum-exp has room for is a multiple of this, in the kernel for fp32 on CUDA."""


class _Kernel(Protocol):
    """Attention of all queries to all keys, or ``causal`` (as many of both).

    Tensors are b x heads x queries or keys x d.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """The output, and the log-sum-exp of every query's scores, b x n x s."""

    def backward(
        self, d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v; ``o``, ``lse``: over all keys that the queries meet, not only these."""


class _CpuAttention:
    """On a CPU, in all dtypes."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        o, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return o, lse

    def backward(
        self, d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            d_o, q, k, v, o, lse.contiguous(), 0.0, causal
        )
        return found[0], found[1], found[2]


class _Flash:
    """On CUDA, in 16 bits."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        o, lse, *_ = _ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        return o, lse

    def backward(
        self, d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        unused = torch.empty(0, dtype=torch.int64, device=q.device)
        found = _ATEN._scaled_dot_product_flash_attention_backward(
            d_o,
            q,
            k,
            v,
            o,
            lse.contiguous(),
            unused,  # offsets of sequences of several lengths: there is one
            unused,
            q.shape[2],
            k.shape[2],
            0.0,
            causal,
            unused,  # state of a dropout: there is none
            unused,
        )
        return found[0], found[1], found[2]


class _Efficient:
    """On CUDA, in fp32: a kernel that wants as many key heads as query heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        k, v = (_repeated(x, q) for x in (k, v))
        o, lse, *_ = _ATEN._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
        return o, lse[..., : q.shape[2]]

    def backward(
        self, d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        room = -(-q.shape[2] // _ALIGNED) * _ALIGNED
        padded = lse.new_full((*lse.shape[:2], room), torch.inf)
        padded[..., : q.shape[2]] = lse
        unused = torch.empty(0, dtype=torch.int64, device=q.device)
        wide_k, wide_v = (_repeated(x, q) for x in (k, v))
        d_q, d_k, d_v, _ = _ATEN._scaled_dot_product_efficient_attention_backward(
            d_o, q, wide_k, wide_v, None, o, padded, unused, unused, 0.0, [True, True, True, False], causal
        )
        return d_q, _summed(d_k, k), _summed(d_v, v)


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _summed(d: Tensor, like: Tensor) -> Tensor:
    """Gradients of repeated heads, as those of the heads."""
    return d.unflatten(1, (like.shape[1], -1)).sum(dim=2)


def _kernel(q: Tensor) -> _Kernel:
    if q.device.type == "cpu":
        return _CpuAttention()
    if q.dtype in (torch.bfloat16, torch.float16):
        return _Flash()
    if q.dtype == torch.float32:
        return _Efficient()
    raise ValueError(
        f"attention to some of the keys at a time (parallel.cp, data.document_mask) has no kernel for "
        f"{q.dtype} on {q.device.type}; use bf16 or fp32"
    )


class Merged(Saved):
    """What queries have attended to so far: output b x s x n x d and log-sum-exp b x n x s, both wide."""

    def __init__(self, like_bsnd: Tensor) -> None:
        b, s, n, _ = like_bsnd.shape
        wide = torch.promote_types(like_bsnd.dtype, torch.float32)
        self.o_bsnd = torch.zeros(like_bsnd.shape, dtype=wide, device=like_bsnd.device)
        self.lse_bns = torch.full((b, n, s), -torch.inf, dtype=wide, device=like_bsnd.device)

    def tensors(self) -> list[Tensor]:
        """Both."""
        return [self.o_bsnd, self.lse_bns]

    def attend(self, q_bsnd: Tensor, k_brmd: Tensor, v_brmd: Tensor, work: Sequence[AttentionBlock]) -> None:
        """Attend to more keys."""
        kernel = _kernel(q_bsnd)
        for block in work:
            q, k, v = _heads_first(block, q_bsnd, k_brmd, v_brmd)
            o, lse = kernel.forward(q, k, v, block.causal)
            rows = slice(*block.queries)
            samples = _samples(block)
            so_far, own = self.lse_bns[samples, :, rows], self.o_bsnd[samples, rows]
            both = torch.logaddexp(so_far, lse)
            kept, added = (_per_head(torch.exp(one - both)) for one in (so_far, lse))
            own.mul_(kept).add_(o.transpose(1, 2) * added)
            so_far.copy_(both)


def gradients(
    d_o_bsnd: Tensor,
    q_bsnd: Tensor,
    k_brmd: Tensor,
    v_brmd: Tensor,
    o_bsnd: Tensor,
    lse_bns: Tensor,
    work: Sequence[AttentionBlock],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v for what some blocks add to the output, in the dtype of q."""
    kernel = _kernel(q_bsnd)
    wide = torch.promote_types(q_bsnd.dtype, torch.float32)
    sums = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q_bsnd, k_brmd, v_brmd)]
    for block in work:
        rows, keys, samples = slice(*block.queries), slice(*block.keys), _samples(block)
        d_o, o = (x[samples, rows].transpose(1, 2) for x in (d_o_bsnd, o_bsnd))
        q, k, v = _heads_first(block, q_bsnd, k_brmd, v_brmd)
        found = kernel.backward(d_o, q, k, v, o, lse_bns[samples, :, rows], block.causal)
        for total, d, where in zip(sums, found, (rows, keys, keys), strict=True):
            total[samples, where].add_(d.transpose(1, 2))
    d_q, d_k, d_v = (total.to(q_bsnd.dtype) for total in sums)
    return d_q, d_k, d_v


def _heads_first(block: AttentionBlock, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, keys, samples = slice(*block.queries), slice(*block.keys), _samples(block)
    return (
        q[samples, rows].transpose(1, 2),
        k[samples, keys].transpose(1, 2),
        v[samples, keys].transpose(1, 2),
    )


def _samples(block: AttentionBlock) -> slice:
    return slice(None) if block.sample is None else slice(block.sample, block.sample + 1)


def _per_head(x_bns: Tensor) -> Tensor:
    """As a factor of b x s x n x d."""
    return x_bns.transpose(1, 2).unsqueeze(-1)
