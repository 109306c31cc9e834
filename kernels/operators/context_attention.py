"""Self-attention whose keys and values come from several ranks, or to some documents of several.

`SplitHeads` turns queries and keys by their positions and hands on queries apart from keys and values, so
that only these travel: gathered (`GatheredAttention`), or passed around, attended to step by step
(`RingAttention`; Liu et al. 2023). Grouped heads are sent once per group. Where tokens meet their own
document's only, all three read `Documents` too.

Legend: T tokens on this rank, of b samples with s of them each; R tokens of all cp ranks; Q = query heads
times d, K = key (and value) heads times d on this rank, d the dimension of a head.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from braid.kernels.operators.attention import Scaling, rotary_tables, turn
from braid.kernels.operators.context_blocks import AttentionBlock, Documents, TokenOrder
from braid.kernels.operators.operator import ComputeOperator, Saved
from braid.kernels.operators.partial_attention import Merged, gradients


class SplitHeads(ComputeOperator):
    """Queries apart from keys and values, the former and the keys turned by their positions."""

    def __init__(
        self,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        sequence: int,
        rotary_base: float | None,
        rotary_scaling: Scaling | None,
        own: Sequence[int],
    ) -> None:
        """``own``: places in a sample of ``sequence`` tokens of this rank's tokens."""
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.sequence, self.own = sequence, tuple(own)
        self.rotary_base, self.rotary_scaling = rotary_base, rotary_scaling
        self._own_tables: tuple[Tensor, Tensor] | None = None

    def forward(self, qkv: Tensor, documents: Documents | None = None) -> tuple[Tensor, Tensor]:
        """Map qkv (T x (Q + 2K), columns q, k, v, each head by head) to q_TQ and kv_T2K."""
        q, k, v = self._parts(qkv)
        q_TQ = qkv.new_empty(qkv.shape[0], self.heads * self.head_dim)
        kv_T2K = qkv.new_empty(qkv.shape[0], 2 * self.kv_heads * self.head_dim)
        to_k, to_v = self._keys_values(kv_T2K)
        tables = self._tables(qkv, documents)
        _turn(q, self._split(q_TQ, self.heads), tables)
        _turn(k, to_k, tables)
        to_v.copy_(v)
        return q_TQ, kv_T2K

    def input_gradient(
        self, d_q_TQ: Tensor, d_kv_T2K: Tensor, documents: Documents | None = None
    ) -> tuple[Tensor]:
        """Return d_qkv."""
        tokens = d_q_TQ.shape[0]
        d_qkv = d_q_TQ.new_empty(tokens, (self.heads + 2 * self.kv_heads) * self.head_dim)
        to_q, to_k, to_v = self._parts(d_qkv)
        d_k, d_v = self._keys_values(d_kv_T2K)
        tables = self._tables(d_qkv, documents)
        _turn(self._split(d_q_TQ, self.heads), to_q, tables, back=True)
        _turn(d_k, to_k, tables, back=True)
        to_v.copy_(d_v)
        return (d_qkv,)

    def _tables(self, like: Tensor, documents: Documents | None) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines by position: s x 1 x d/2 of all samples alike, or b x s x 1 x d/2."""
        if self.rotary_base is None:
            return None
        place = like.device, like.dtype
        cos, sin = rotary_tables(self.sequence, self.head_dim, self.rotary_base, *place, self.rotary_scaling)
        if documents is not None:
            rows = documents.positions.view(-1, len(self.own))
            return cos[rows], sin[rows]
        if self._own_tables is None or self._own_tables[0].device != like.device:
            own = torch.tensor(self.own, device=like.device)
            self._own_tables = cos[own], sin[own]
        return self._own_tables

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(-1, len(self.own), heads, self.head_dim)

    def _parts(self, qkv: Tensor) -> Sequence[Tensor]:
        groups = [self.heads, self.kv_heads, self.kv_heads]
        return torch.split(self._split(qkv, sum(groups)), groups, dim=2)

    def _keys_values(self, kv_T2K: Tensor) -> Sequence[Tensor]:
        return torch.split(self._split(kv_T2K, 2 * self.kv_heads), self.kv_heads, dim=2)


def _turn(
    x_bsnd: Tensor, out_bsnd: Tensor, tables: tuple[Tensor, Tensor] | None, *, back: bool = False
) -> None:
    if tables is None:
        out_bsnd.copy_(x_bsnd)
    else:
        turn(x_bsnd, *tables, out_bsnd, back=back)


@dataclass(frozen=True)
class Attended(Saved):
    """What the backward pass needs of attention beside queries, keys and values."""

    o_bsnd: Tensor
    lse_bns: Tensor
    ordered_kv: Tensor | None = None
    """R x 2K: keys and values in the order of the sample, where they have come in another one."""

    def tensors(self) -> list[Tensor]:
        """For accounts of memory."""
        held = [self.o_bsnd, self.lse_bns]
        return held if self.ordered_kv is None else [*held, self.ordered_kv]


class _ContextAttention(ComputeOperator):
    def __init__(self, *, heads: int, kv_heads: int, head_dim: int, order: TokenOrder) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.order = heads, kv_heads, head_dim, order
        self._rows = len(order.pieces[0]) * order.length

    def _queries(self, q_TQ: Tensor) -> Tensor:
        return q_TQ.view(-1, self._rows, self.heads, self.head_dim)

    def _keys_values(self, kv: Tensor, samples: int) -> tuple[Tensor, Tensor]:
        k, v = kv.view(samples, -1, 2 * self.kv_heads, self.head_dim).split(self.kv_heads, dim=2)
        return k, v

    def _gradients(
        self, d_o_TQ: Tensor, saved: Attended, q_TQ: Tensor, kv: Tensor, work: Sequence[AttentionBlock]
    ) -> tuple[Tensor, Tensor]:
        """d_q_TQ and d_kv, of the shape of ``kv``."""
        q = self._queries(q_TQ)
        k, v = self._keys_values(kv, q.shape[0])
        d_q, d_k, d_v = gradients(self._queries(d_o_TQ), q, k, v, saved.o_bsnd, saved.lse_bns, work)
        return d_q.view(q_TQ.shape), torch.cat((d_k, d_v), dim=2).view(kv.shape)


class GatheredAttention(_ContextAttention):
    """Causal attention of this rank's queries to the keys of all ranks, which were gathered."""

    def forward(
        self, q_TQ: Tensor, kv_R2K: Tensor, documents: Documents | None = None
    ) -> tuple[Tensor, Attended]:
        """Map q and all ranks' kv, rank after rank, to o_TQ and what the backward pass needs."""
        q, work = self._queries(q_TQ), (documents or self.order).gathered
        ordered = self._in_order(kv_R2K, q.shape[0], documents)
        merged = Merged(q)
        merged.attend(q, *self._keys_values(ordered, q.shape[0]), work)
        o = merged.o_bsnd.to(q.dtype)
        return o.view(q_TQ.shape), Attended(o, merged.lse_bns, ordered)

    def input_gradient(
        self, d_o_TQ: Tensor, saved: Attended, q_TQ: Tensor, documents: Documents | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return d_q_TQ, and d_kv_R2K: this rank's part of the sum over the ranks, rank after rank."""
        assert saved.ordered_kv is not None
        work = (documents or self.order).gathered
        d_q, d_kv = self._gradients(d_o_TQ, saved, q_TQ, saved.ordered_kv, work)
        by_rank = torch.empty_like(d_kv)
        for there, here in self._pieces(by_rank, d_kv, saved.o_bsnd.shape[0], documents):
            there.copy_(here)
        return d_q, by_rank

    def _in_order(self, kv_R2K: Tensor, samples: int, documents: Documents | None) -> Tensor:
        """Rows of all ranks in the order of each sample."""
        ordered = torch.empty_like(kv_R2K)
        for there, here in self._pieces(kv_R2K, ordered, samples, documents):
            here.copy_(there)
        return ordered

    def _pieces(
        self, by_rank: Tensor, ordered: Tensor, samples: int, documents: Documents | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Every piece where it stands by rank, and in the order of the sample."""
        ranks, each = len(self.order.pieces), len(self.order.pieces[0])
        by_rank_rbpl = by_rank.view(ranks, samples, each, self.order.length, -1)
        ordered_bpl = ordered.view(samples, ranks * each, self.order.length, -1)
        for order in [self.order] if documents is None else documents.orders:
            of = slice(None) if order.sample is None else slice(order.sample, order.sample + 1)
            for piece, place in enumerate(order.places):
                yield by_rank_rbpl[place // each, of, place % each], ordered_bpl[of, piece]


class RingAttention(_ContextAttention):
    """A step of causal attention: to the keys of the rank that comes so many before."""

    def __init__(self, *, heads: int, kv_heads: int, head_dim: int, order: TokenOrder, step: int) -> None:
        super().__init__(heads=heads, kv_heads=kv_heads, head_dim=head_dim, order=order)
        self._step, self._last = step, step == len(order.pieces) - 1

    def forward(
        self, q_TQ: Tensor, kv_T2K: Tensor, *more: Merged | Documents
    ) -> tuple[Merged] | tuple[Tensor, Attended]:
        """Add to what was attended to so far, in place; the last step returns o_TQ and what is saved.

        ``more``: behind the first step what was attended to so far; the documents, where there are some.
        """
        q = self._queries(q_TQ)
        so_far = next((one for one in more if isinstance(one, Merged)), None)
        documents = next((one for one in more if isinstance(one, Documents)), None)
        merged = so_far or Merged(q)
        work = (documents or self.order).ring(self._step)
        merged.attend(q, *self._keys_values(kv_T2K, q.shape[0]), work)
        if not self._last:
            return (merged,)
        # What was added up dies now, and with it both its tensors; of one step they go on.
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
        """Return what this step's keys add to d_q_TQ, and d_kv_T2K."""
        work = (documents or self.order).ring(self._step)
        return self._gradients(d_o_TQ, saved, q_TQ, kv_T2K, work)


def context_attention(
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    sequence: int,
    rotary_base: float | None,
    rotary_scaling: Scaling | None = None,
    order: TokenOrder,
    ring: bool,
) -> dict[str, ComputeOperator]:
    """The operators that attention is made of, by what their names add to its own.

    ``ring``: keys and values are passed around, else gathered. One rank attends to its own, in one step.
    """
    ranks = len(order.pieces)
    split = SplitHeads(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        sequence=sequence,
        rotary_base=rotary_base,
        rotary_scaling=rotary_scaling,
        own=order.own,
    )
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    if not ring and ranks > 1:
        return {"_split": split, "": GatheredAttention(**sizes, order=order)}
    steps = {f"_{step}": RingAttention(**sizes, order=order, step=step) for step in range(ranks - 1)}
    return {"_split": split, **steps, "": RingAttention(**sizes, order=order, step=ranks - 1)}
