"""Self-attention whose keys and values come from several ranks (context parallelism).

`SplitHeads` turns queries and keys by their positions and hands on queries apart from keys and values, so
that only these travel: gathered (`GatheredAttention`), or passed around, attended to step by step
(`RingAttention`; Liu et al. 2023). Grouped heads are sent once per group.

Legend: T tokens on this rank, of b samples with s of them each; R tokens of all cp ranks; Q = query heads
times d, K = key (and value) heads times d on this rank, d the dimension of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from braid.kernels.operators.attention import Scaling, rotary_tables, turn
from braid.kernels.operators.context_blocks import Block, blocks, positions, zigzag
from braid.kernels.operators.operator import ComputeOperator, Saved
from braid.kernels.operators.partial_attention import Merged, gradients


@dataclass(frozen=True)
class Order:
    """Which tokens of every sample a rank has, and what they attend to, sample by sample or for all alike."""

    pieces: tuple[tuple[int, ...], ...]
    """Of every rank."""
    rank: int
    length: int
    """Tokens of a piece."""

    @property
    def own(self) -> list[int]:
        """Places of this rank's tokens in their sample."""
        return positions(self.pieces[self.rank], self.length)

    def gathered(self) -> list[Block]:
        """What this rank's queries do with the keys of all ranks, in the order of the sample."""
        return blocks(self.pieces[self.rank], range(2 * len(self.pieces)), self.length)

    def ring(self, step: int) -> list[Block]:
        """With the keys of the rank that comes ``step`` before."""
        source = self.pieces[(self.rank - step) % len(self.pieces)]
        return blocks(self.pieces[self.rank], source, self.length)

    @property
    def places(self) -> list[int]:
        """Where every piece of a sample stands among those of all ranks, rank after rank."""
        there = [piece for own in self.pieces for piece in own]
        return [there.index(piece) for piece in range(len(there))]


def causal_order(ranks: int, rank: int, sequence: int) -> Order:
    """That of samples of one document; of one rank, all of it."""
    pieces = zigzag(ranks) if ranks > 1 else ((0,),)
    return Order(pieces, rank, sequence // sum(map(len, pieces)))


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
        self._tables: tuple[Tensor, Tensor] | None = None

    def forward(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Map qkv (T x (Q + 2K), columns q, k, v, each head by head) to q_TQ and kv_T2K."""
        q, k, v = self._parts(qkv)
        q_TQ = qkv.new_empty(qkv.shape[0], self.heads * self.head_dim)
        kv_T2K = qkv.new_empty(qkv.shape[0], 2 * self.kv_heads * self.head_dim)
        to_k, to_v = self._keys_values(kv_T2K)
        self._turn(q, self._split(q_TQ, self.heads))
        self._turn(k, to_k)
        to_v.copy_(v)
        return q_TQ, kv_T2K

    def input_gradient(self, d_q_TQ: Tensor, d_kv_T2K: Tensor) -> tuple[Tensor]:
        """Return d_qkv."""
        tokens = d_q_TQ.shape[0]
        d_qkv = d_q_TQ.new_empty(tokens, (self.heads + 2 * self.kv_heads) * self.head_dim)
        to_q, to_k, to_v = self._parts(d_qkv)
        d_k, d_v = self._keys_values(d_kv_T2K)
        self._turn(self._split(d_q_TQ, self.heads), to_q, back=True)
        self._turn(d_k, to_k, back=True)
        to_v.copy_(d_v)
        return (d_qkv,)

    def _turn(self, x_bsnd: Tensor, out_bsnd: Tensor, *, back: bool = False) -> None:
        if self.rotary_base is None:
            out_bsnd.copy_(x_bsnd)
            return
        if self._tables is None or self._tables[0].device != x_bsnd.device:
            place = x_bsnd.device, x_bsnd.dtype
            tables = rotary_tables(
                self.sequence, self.head_dim, self.rotary_base, *place, self.rotary_scaling
            )
            own = torch.tensor(self.own, device=x_bsnd.device)
            self._tables = tables[0][own], tables[1][own]
        turn(x_bsnd, *self._tables, out_bsnd, back=back)

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(-1, len(self.own), heads, self.head_dim)

    def _parts(self, qkv: Tensor) -> Sequence[Tensor]:
        groups = [self.heads, self.kv_heads, self.kv_heads]
        return torch.split(self._split(qkv, sum(groups)), groups, dim=2)

    def _keys_values(self, kv_T2K: Tensor) -> Sequence[Tensor]:
        return torch.split(self._split(kv_T2K, 2 * self.kv_heads), self.kv_heads, dim=2)


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
    def __init__(self, *, heads: int, kv_heads: int, head_dim: int, order: Order) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.order = heads, kv_heads, head_dim, order
        self._rows = 2 * order.length

    def _queries(self, q_TQ: Tensor) -> Tensor:
        return q_TQ.view(-1, self._rows, self.heads, self.head_dim)

    def _keys_values(self, kv: Tensor, samples: int) -> tuple[Tensor, Tensor]:
        k, v = kv.view(samples, -1, 2 * self.kv_heads, self.head_dim).split(self.kv_heads, dim=2)
        return k, v

    def _gradients(
        self, d_o_TQ: Tensor, saved: Attended, q_TQ: Tensor, kv: Tensor, work: Sequence[Block]
    ) -> tuple[Tensor, Tensor]:
        """d_q_TQ and d_kv, of the shape of ``kv``."""
        q = self._queries(q_TQ)
        k, v = self._keys_values(kv, q.shape[0])
        d_q, d_k, d_v = gradients(self._queries(d_o_TQ), q, k, v, saved.o_bsnd, saved.lse_bns, work)
        return d_q.view(q_TQ.shape), torch.cat((d_k, d_v), dim=2).view(kv.shape)


class GatheredAttention(_ContextAttention):
    """Causal attention of this rank's queries to the keys of all ranks, which were gathered."""

    def __init__(self, *, heads: int, kv_heads: int, head_dim: int, order: Order) -> None:
        super().__init__(heads=heads, kv_heads=kv_heads, head_dim=head_dim, order=order)
        self._work = order.gathered()

    def forward(self, q_TQ: Tensor, kv_R2K: Tensor) -> tuple[Tensor, Attended]:
        """Map q and all ranks' kv, rank after rank, to o_TQ and what the backward pass needs."""
        q = self._queries(q_TQ)
        ordered = self._in_order(kv_R2K, q.shape[0])
        merged = Merged(q)
        merged.attend(q, *self._keys_values(ordered, q.shape[0]), self._work)
        o = merged.o_bsnd.to(q.dtype)
        return o.view(q_TQ.shape), Attended(o, merged.lse_bns, ordered)

    def input_gradient(self, d_o_TQ: Tensor, saved: Attended, q_TQ: Tensor) -> tuple[Tensor, Tensor]:
        """Return d_q_TQ, and d_kv_R2K: this rank's part of the sum over the ranks, rank after rank."""
        assert saved.ordered_kv is not None
        d_q, d_kv = self._gradients(d_o_TQ, saved, q_TQ, saved.ordered_kv, self._work)
        return d_q, self._by_rank(d_kv, saved.o_bsnd.shape[0])

    def _in_order(self, kv_R2K: Tensor, samples: int) -> Tensor:
        """Rows of all ranks in the order of each sample."""
        ranks, length = len(self.order.pieces), self.order.length
        by_rank = kv_R2K.view(ranks, samples, 2, length, -1)
        ordered = kv_R2K.new_empty(samples, 2 * ranks, length, kv_R2K.shape[1])
        for piece, place in enumerate(self.order.places):
            ordered[:, piece] = by_rank[place // 2, :, place % 2]
        return ordered.view(kv_R2K.shape)

    def _by_rank(self, d_kv: Tensor, samples: int) -> Tensor:
        """The inverse of `_in_order`."""
        ranks, length = len(self.order.pieces), self.order.length
        ordered = d_kv.view(samples, 2 * ranks, length, -1)
        by_rank = d_kv.new_empty(ranks, samples, 2, length, d_kv.shape[1])
        for piece, place in enumerate(self.order.places):
            by_rank[place // 2, :, place % 2] = ordered[:, piece]
        return by_rank.view(d_kv.shape)


class RingAttention(_ContextAttention):
    """A step of causal attention: to the keys of the rank that comes so many before."""

    def __init__(self, *, heads: int, kv_heads: int, head_dim: int, order: Order, step: int) -> None:
        super().__init__(heads=heads, kv_heads=kv_heads, head_dim=head_dim, order=order)
        self._work = order.ring(step)
        self._last = step == len(order.pieces) - 1

    def forward(
        self, q_TQ: Tensor, kv_T2K: Tensor, so_far: Merged | None = None
    ) -> tuple[Merged] | tuple[Tensor, Attended]:
        """Add to what was attended to so far, in place; the last step returns o_TQ and what is saved."""
        q = self._queries(q_TQ)
        merged = so_far or Merged(q)
        merged.attend(q, *self._keys_values(kv_T2K, q.shape[0]), self._work)
        if not self._last:
            return (merged,)
        o = merged.o_bsnd.to(q.dtype, copy=True)  # what was added up dies now, and with it both its tensors
        return o.view(q_TQ.shape), Attended(o, merged.lse_bns.clone())

    def input_gradient(
        self, d_o_TQ: Tensor, saved: Attended, q_TQ: Tensor, kv_T2K: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return what this step's keys add to d_q_TQ, and d_kv_T2K."""
        return self._gradients(d_o_TQ, saved, q_TQ, kv_T2K, self._work)


def context_attention(
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    sequence: int,
    rotary_base: float | None,
    rotary_scaling: Scaling | None = None,
    order: Order,
    ring: bool,
) -> dict[str, ComputeOperator]:
    """The operators that attention is made of, by what their names add to its own.

    ``ring``: keys and values are passed around, else gathered.
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
    if not ring:
        return {"_split": split, "": GatheredAttention(**sizes, order=order)}
    steps = {f"_{step}": RingAttention(**sizes, order=order, step=step) for step in range(ranks - 1)}
    return {"_split": split, **steps, "": RingAttention(**sizes, order=order, step=ranks - 1)}
