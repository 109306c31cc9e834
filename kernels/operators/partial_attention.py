"""Attention to some of the keys at a time; results of torch's kernels are merged by their log-sum-exp.

Softmax over a set of keys is the average of softmaxes over its parts, weighted by their sums of exponentials
(Milakov and Gimelshein 2018; blockwise: Liu et al. 2023, "Ring Attention with Blockwise Transformers"). The
gradient of a part needs the merged output and log-sum-exp, but nothing of the other parts. No kernel stores
scores.

Legend: b samples, each with s queries and r keys; n query heads, m key and value heads, d the dimension of a
head.
"""

import torch
from torch import Tensor

from braid.kernels.operators.context_blocks import AttentionBlock, Blocks
from braid.kernels.operators.operator import Home, Saved, wide

_ATEN = torch.ops.aten
_ALIGNED = 32
"""CUDA's fp32 kernel needs a log-sum-exp whose number of queries is padded to a multiple of this."""
_HALF = (torch.bfloat16, torch.float16)


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Compute attention of all queries to all keys, or ``causal`` with equally many queries and keys; all
    tensors are b x heads x tokens x d.

    Return the output, and the log-sum-exp of every query's scores, b x n x s.
    """
    if q.device.type == "cpu":
        o, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    elif q.dtype in _HALF:
        o, lse, *_ = _ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    elif q.dtype == torch.float32:  # this kernel wants as many key heads as query heads
        k, v = (_repeated(x, q) for x in (k, v))
        o, lse, *_ = _ATEN._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
        lse = lse[..., : q.shape[2]]
    else:
        raise ValueError(
            f"attention to some of the keys at a time (parallel.cp, data.document_mask) has no kernel for "
            f"{q.dtype} on {q.device.type}; use bf16 or fp32"
        )
    return o, lse


def _backward(
    d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v; ``o``, ``lse``: over all keys, not only k."""
    if q.device.type == "cpu":
        lse = lse.contiguous()
        d_q, d_k, d_v = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            d_o, q, k, v, o, lse, 0.0, causal
        )
        return d_q, d_k, d_v
    none = torch.empty(0, dtype=torch.int64, device=q.device)  # for sequence lengths and the dropout state
    if q.dtype in _HALF:
        lengths = q.shape[2], k.shape[2]
        d_q, d_k, d_v = _ATEN._scaled_dot_product_flash_attention_backward(
            d_o, q, k, v, o, lse.contiguous(), none, none, *lengths, 0.0, causal, none, none
        )
        return d_q, d_k, d_v
    room = -(-q.shape[2] // _ALIGNED) * _ALIGNED
    padded = lse.new_full((*lse.shape[:2], room), torch.inf)
    padded[..., : q.shape[2]] = lse
    wide_k, wide_v = (_repeated(x, q) for x in (k, v))
    d_q, d_k, d_v, _ = _ATEN._scaled_dot_product_efficient_attention_backward(
        d_o, q, wide_k, wide_v, None, o, padded, none, none, 0.0, [True, True, True, False], causal
    )
    d_k, d_v = (d.unflatten(1, (k.shape[1], -1)).sum(dim=2) for d in (d_k, d_v))
    return d_q, d_k, d_v


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


class Merged(Saved):
    """Attention of queries to all keys so far: output b x s x n x d and log-sum-exp b x n x s, both wide."""

    def __init__(self, like_bsnd: Tensor) -> None:
        b, s, n, _ = like_bsnd.shape
        room: Home = {"dtype": wide(like_bsnd.dtype), "device": like_bsnd.device}
        self.o_bsnd = torch.zeros(like_bsnd.shape, **room)
        self.lse_bns = torch.full((b, n, s), -torch.inf, **room)

    def tensors(self) -> list[Tensor]:
        return [self.o_bsnd, self.lse_bns]

    def attend(self, q_bsnd: Tensor, k_brmd: Tensor, v_brmd: Tensor, work: Blocks) -> None:
        """Merge attention to further keys into the result."""
        for block in work:
            o, lse = _forward(*_heads_first(block, q_bsnd, k_brmd, v_brmd), block.causal)
            so_far = self.lse_bns[block.samples, :, block.queries]
            own = self.o_bsnd[block.samples, block.queries]
            both = torch.logaddexp(so_far, lse)
            kept, added = (torch.exp(one - both).transpose(1, 2).unsqueeze(-1) for one in (so_far, lse))
            own.mul_(kept).add_(o.transpose(1, 2) * added)
            so_far.copy_(both)


def gradients(
    d_o_bsnd: Tensor,
    q_bsnd: Tensor,
    k_brmd: Tensor,
    v_brmd: Tensor,
    o_bsnd: Tensor,
    lse_bns: Tensor,
    work: Blocks,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v due to the attention blocks in ``work``, in the dtype of q."""
    sums = [torch.zeros(x.shape, dtype=wide(x.dtype), device=x.device) for x in (q_bsnd, k_brmd, v_brmd)]
    for block in work:
        rows, samples = block.queries, block.samples
        d_o, o = (x[samples, rows].transpose(1, 2) for x in (d_o_bsnd, o_bsnd))
        q, k, v = _heads_first(block, q_bsnd, k_brmd, v_brmd)
        found = _backward(d_o, q, k, v, o, lse_bns[samples, :, rows], block.causal)
        for total, d, where in zip(sums, found, (rows, block.keys, block.keys), strict=True):
            total[samples, where].add_(d.transpose(1, 2))
    d_q, d_k, d_v = (total.to(q_bsnd.dtype) for total in sums)
    return d_q, d_k, d_v


def _heads_first(block: AttentionBlock, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = (q, block.queries), (k, block.keys), (v, block.keys)
    q, k, v = (x[block.samples, which].transpose(1, 2) for x, which in rows)
    return q, k, v
