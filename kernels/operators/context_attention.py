"""Self-attention of this rank's queries to keys and values of several ranks (context parallelism).

`SplitHeads` rotates queries and keys by their positions and separates queries from keys and values, so that
only keys and values are sent: gathered (`GatheredAttention`), or passed around a ring in steps
(`RingAttention`; Liu et al. 2023, "Ring Attention with Blockwise Transformers"). Grouped heads are sent once
per group. If tokens attend only to their own document, all three operators also read `Documents`.

Attention to some of the keys at a time is merged by log-sum-exps: softmax over a set of keys is the average
of softmaxes over its parts, weighted by their sums of exponentials (Milakov and Gimelshein 2018). The
gradient of a part needs the merged output and log-sum-exp, but nothing of the other parts. No kernel stores
scores.

Legend: T tokens on this rank: s of each of b samples; R tokens of all cp ranks; on this rank, Q = query heads
times d, K = key (and value) heads times d, d the dimension of a head. In kernels: s queries and r keys of a
sample, n query heads, m key and value heads.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from braid.kernels.operators.attention import Heads, turn
from braid.kernels.operators.context_blocks import AttentionBlock, Blocks, Documents, TokenOrder
from braid.kernels.operators.operator import ComputeOperator, Home, Saved, wide

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


class _ContextHeads(Heads):
    """Heads of a rank that has some of a sample's tokens. ``order``: the tokens that this rank has."""

    def __init__(self, *, order: TokenOrder, **settings: Any) -> None:
        super().__init__(**settings)
        self.order = order
        self._rows = len(order.pieces[0]) * order.length

    def _split(self, x: Tensor, heads: int) -> Tensor:
        """Return a view of x of shape b x s x heads x d."""
        return x.view(-1, self._rows, heads, self.head_dim)

    def _keys_values(self, kv: Tensor, samples: int) -> tuple[Tensor, Tensor]:
        k, v = kv.view(samples, -1, 2 * self.kv_heads, self.head_dim).split(self.kv_heads, dim=2)
        return k, v


class SplitHeads(_ContextHeads):
    """Separates queries from keys and values, and rotates queries and keys by their positions."""

    _own_tables: tuple[Tensor, Tensor] | None = None

    def forward(self, qkv: Tensor, documents: Documents | None = None) -> tuple[Tensor, Tensor]:
        """Map qkv (T x (Q + 2K)) to q_TQ, rotated, and kv_T2K, of which keys are rotated."""
        q, k, v = self._parts(qkv)
        q_TQ = qkv.new_empty(qkv.shape[0], self.heads * self.head_dim)
        kv_T2K = qkv.new_empty(qkv.shape[0], 2 * self.kv_heads * self.head_dim)
        to_k, to_v = self._keys_values(kv_T2K, q.shape[0])
        tables = self._turning(qkv, documents)
        turn(q, tables, self._split(q_TQ, self.heads))
        turn(k, tables, to_k)
        to_v.copy_(v)
        return q_TQ, kv_T2K

    def input_gradient(
        self, d_q_TQ: Tensor, d_kv_T2K: Tensor, documents: Documents | None = None
    ) -> tuple[Tensor]:
        """Return d_qkv (T x (Q + 2K))."""
        d_qkv = d_q_TQ.new_empty(d_q_TQ.shape[0], self.width)
        to_q, to_k, to_v = self._parts(d_qkv)
        d_k, d_v = self._keys_values(d_kv_T2K, to_q.shape[0])
        tables = self._turning(d_qkv, documents)
        turn(self._split(d_q_TQ, self.heads), tables, to_q, back=True)
        turn(d_k, tables, to_k, back=True)
        to_v.copy_(d_v)
        return (d_qkv,)

    def _parts(self, qkv: Tensor) -> tuple[Tensor, ...]:
        return self._q_k_v(self._split(qkv, self.heads + 2 * self.kv_heads), dim=2)

    def _turning(self, like: Tensor, documents: Documents | None) -> tuple[Tensor, Tensor] | None:
        """Return cos and sin, s x 1 x d/2 or b x s x 1 x d/2; None: no rotation."""
        if self.rotary_base is None:
            return None
        cos, sin = self._tables(like)
        if documents is not None:
            rows = documents.positions.view(-1, self._rows)
            return cos[rows], sin[rows]
        if self._own_tables is None or self._own_tables[0].device != like.device:
            own = torch.tensor(self.order.own, device=like.device)
            self._own_tables = cos[own], sin[own]
        return self._own_tables


@dataclass(frozen=True)
class Attended(Saved):
    """Values of attention that are saved for the backward pass, in addition to queries, keys and values."""

    o_bsnd: Tensor
    lse_bns: Tensor
    ordered_kv: Tensor | None = None
    """R x 2K: keys and values in the order of the sample. None if the input had that order, and in a ring,
    where each step reads its own input again."""

    def tensors(self) -> list[Tensor]:
        held = [self.o_bsnd, self.lse_bns]
        return held if self.ordered_kv is None else [*held, self.ordered_kv]


class _ContextAttention(_ContextHeads):
    def _attend(self, merged: Merged, q: Tensor, kv: Tensor, work: Blocks) -> Merged:
        merged.attend(q, *self._keys_values(kv, q.shape[0]), work)
        return merged

    def _gradients(
        self, d_o_TQ: Tensor, saved: Attended, q_TQ: Tensor, kv: Tensor, work: Blocks
    ) -> tuple[Tensor, Tensor]:
        """Return d_q_TQ, and d_kv in the shape of ``kv``."""
        d_o, q = (self._split(x, self.heads) for x in (d_o_TQ, q_TQ))
        k, v = self._keys_values(kv, q.shape[0])
        d_q, d_k, d_v = gradients(d_o, q, k, v, saved.o_bsnd, saved.lse_bns, work)
        return d_q.view(q_TQ.shape), torch.cat((d_k, d_v), dim=2).view(kv.shape)


class GatheredAttention(_ContextAttention):
    """Causal attention of this rank's queries to the keys of all ranks, which were gathered."""

    def forward(
        self, q_TQ: Tensor, kv_R2K: Tensor, documents: Documents | None = None
    ) -> tuple[Tensor, Attended]:
        """Map q and all ranks' kv, rank after rank, to o_TQ and the values saved for the backward pass."""
        q, ordered = self._split(q_TQ, self.heads), torch.empty_like(kv_R2K)
        for there, here in self._pieces(kv_R2K, ordered, q.shape[0], documents):
            here.copy_(there)
        merged = self._attend(Merged(q), q, ordered, (documents or self.order).gathered)
        o = merged.o_bsnd.to(q.dtype)
        return o.view(q_TQ.shape), Attended(o, merged.lse_bns, ordered)

    def input_gradient(
        self, d_o_TQ: Tensor, saved: Attended, q_TQ: Tensor, documents: Documents | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return d_q_TQ and d_kv_R2K, rank after rank: this rank's term of a sum over the ranks."""
        assert saved.ordered_kv is not None
        work = (documents or self.order).gathered
        d_q, d_kv = self._gradients(d_o_TQ, saved, q_TQ, saved.ordered_kv, work)
        by_rank = torch.empty_like(d_kv)
        for there, here in self._pieces(by_rank, d_kv, saved.o_bsnd.shape[0], documents):
            there.copy_(here)
        return d_q, by_rank

    def _pieces(
        self, by_rank: Tensor, ordered: Tensor, samples: int, documents: Documents | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield two views of every piece: in the tensor ordered by rank, and in the sample's order."""
        ranks, each = len(self.order.pieces), len(self.order.pieces[0])
        by_rank_rbpl = by_rank.view(ranks, samples, each, self.order.length, -1)
        ordered_bpl = ordered.view(samples, ranks * each, self.order.length, -1)
        for order in (self.order,) if documents is None else documents.orders:
            for piece, place in enumerate(order.places):
                yield (
                    by_rank_rbpl[place // each, order.samples, place % each],
                    ordered_bpl[order.samples, piece],
                )


class RingAttention(_ContextAttention):
    """One step of causal ring attention: to the keys of the rank ``step`` positions before this rank."""

    def __init__(self, *, step: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._step, self._last = step, step == len(self.order.pieces) - 1

    def forward(
        self, q_TQ: Tensor, kv_T2K: Tensor, *more: Merged | Documents
    ) -> tuple[Merged] | tuple[Tensor, Attended]:
        """Merge attention to this step's keys into the result so far, in place; the last step returns o_TQ
        and the values saved for the backward pass.

        ``more``: from the second step on, the result of the previous step; and `Documents`, if the batch has
        them.
        """
        q = self._split(q_TQ, self.heads)
        so_far = next((one for one in more if isinstance(one, Merged)), None)
        documents = next((one for one in more if isinstance(one, Documents)), None)
        merged = self._attend(so_far or Merged(q), q, kv_T2K, (documents or self.order).ring[self._step])
        if not self._last:
            return (merged,)
        # After the last of several steps the executor frees the memory of its input `merged`, so
        # results are copies. The only step of a ring of one rank made `merged` itself, and passes it on.
        o = merged.o_bsnd.to(q.dtype, copy=self._step > 0)
        lse = merged.lse_bns.clone() if self._step else merged.lse_bns
        return o.view(q_TQ.shape), Attended(o, lse)

    def input_gradient(
        self,
        d_o_TQ: Tensor,
        saved: Attended,
        q_TQ: Tensor,
        kv_T2K: Tensor,
        documents: Documents | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return this step's contribution to d_q_TQ, and d_kv_T2K."""
        return self._gradients(d_o_TQ, saved, q_TQ, kv_T2K, (documents or self.order).ring[self._step])


def context_attention(*, order: TokenOrder, ring: bool, **settings: Any) -> dict[str, ComputeOperator]:
    """Return the operators that form attention, by the suffix that each adds to attention's name.

    ``settings``: arguments of `Heads`. ``ring``: keys and values are passed around a ring; otherwise they are
    gathered. A single rank attends to its own keys, in one step.
    """
    ranks, settings = len(order.pieces), {**settings, "order": order}
    split = SplitHeads(**settings)
    if not ring and ranks > 1:
        return {"_split": split, "": GatheredAttention(**settings)}
    steps = {f"_{step}": RingAttention(**settings, step=step) for step in range(ranks - 1)}
    return {"_split": split, **steps, "": RingAttention(**settings, step=ranks - 1)}
