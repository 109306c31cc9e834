"""Attention over ranks that have some of a sequence's tokens: scores of the whole sequence, by their formula.

All ranks are in this process; what they would send each other is handed on.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from braid.kernels.operators.context_attention import context_attention
from braid.kernels.operators.context_blocks import (
    Documents,
    TokenOrder,
    causal_order,
    document_order,
    documents_of,
)
from tests.kernels.cases import assert_close, attention_by_scores, normal

FP64, HEAD_DIM, BASE = torch.float64, 4, 100.0


def documents_drawn(data: st.DataObject, sequence: int) -> list[int]:
    return sorted({0, *data.draw(st.lists(st.integers(1, sequence - 1), max_size=4))})


class Rank:
    """The operators of one rank and what it has."""

    def __init__(
        self, order: TokenOrder, ring: bool, heads: int, kv_heads: int, own_bs: list[list[int]]
    ) -> None:
        sequence = order.length * sum(map(len, order.pieces))
        sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": HEAD_DIM}
        self.modules = context_attention(**sizes, sequence=sequence, rotary_base=BASE, order=order, ring=ring)
        self.own_bs = torch.tensor(own_bs)

    def rows(self, x_bsX: Tensor) -> Tensor:
        """This rank's tokens, sample by sample."""
        return torch.stack([x[own] for x, own in zip(x_bsX, self.own_bs, strict=True)]).flatten(0, 1)

    def put(self, into_bsX: Tensor, rows_TX: Tensor) -> None:
        for x, own, rows in zip(into_bsX, self.own_bs, rows_TX.view(*self.own_bs.shape, -1), strict=True):
            x[own] = rows


def over_ranks(
    qkv_bsX: Tensor, d_o_bsQ: Tensor, ranks: list[Rank], more: list[tuple[Documents, ...]], ring: bool
) -> tuple[Tensor, Tensor]:
    """Forward and backward: o and d_qkv of the whole samples."""
    cp, o_bsQ, d_qkv_bsX = len(ranks), torch.empty_like(d_o_bsQ), torch.empty_like(qkv_bsX)
    split = [rank.modules["_split"](rank.rows(qkv_bsX), *m) for rank, m in zip(ranks, more, strict=True)]
    saved, d_split = [], []
    for number, (rank, documents) in enumerate(zip(ranks, more, strict=True)):
        q, _ = split[number]
        if ring:
            so_far: tuple = ()
            for step in range(cp):
                module = rank.modules[f"_{step}" if step < cp - 1 else ""]
                so_far = module(q, split[(number - step) % cp][1].clone(), *so_far, *documents)
            o, kept = so_far
        else:
            o, kept = rank.modules[""](q, torch.cat([kv for _, kv in split]), *documents)
        rank.put(o_bsQ, o)
        saved.append(kept)
        d_split.append([torch.zeros_like(q), torch.zeros_like(split[number][1])])
    for number, (rank, documents) in enumerate(zip(ranks, more, strict=True)):
        d_o, q = rank.rows(d_o_bsQ), split[number][0]
        for step in range(cp if ring else 1):
            if ring:
                module, other = rank.modules[f"_{step}" if step < cp - 1 else ""], (number - step) % cp
                d_q, d_kv = module.input_gradient(d_o, saved[number], q, split[other][1], *documents)
                d_split[other][1] += d_kv
            else:
                d_q, d_all = rank.modules[""].input_gradient(d_o, saved[number], q, *documents)
                for one, d_kv in zip(d_split, d_all.chunk(cp), strict=True):
                    one[1] += d_kv
            d_split[number][0] += d_q
    for rank, d, documents in zip(ranks, d_split, more, strict=True):
        rank.put(d_qkv_bsX, rank.modules["_split"].input_gradient(*d, *documents)[0])
    return o_bsQ, d_qkv_bsX


@given(
    data=st.data(),
    cp=st.sampled_from([1, 2, 3, 4]),
    ring=st.booleans(),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3]),
    masked=st.booleans(),
    restart=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=60, deadline=None)
@torch.no_grad()
def test_equals_attention_over_whole_samples(data, cp, ring, kv_heads, group, masked, restart, seed):
    torch.manual_seed(seed)
    sequence, samples, heads = 2 * cp * data.draw(st.integers(1, 4)), 2, kv_heads * group
    begins = [documents_drawn(data, sequence) if masked else [0] for _ in range(samples)]
    ranks, more = [], []
    for number in range(cp):
        order = causal_order(cp, number, sequence)
        orders = [document_order(cp, number, sequence, own, n) for n, own in enumerate(begins)]
        own_bs = [one.own for one in orders] if masked else [order.own] * samples
        ranks.append(Rank(order, ring, heads, kv_heads, own_bs))
        more.append((documents_of(orders, restart=restart),) if masked else ())
    if cp == 1:
        ring = True  # in one step
    place = torch.arange(sequence)
    numbers_bs = torch.stack([torch.bucketize(place, torch.tensor(own), right=True) for own in begins])
    mask_bss = (numbers_bs[:, :, None] == numbers_bs[:, None]) & (place[:, None] >= place)
    numbered = zip(begins, numbers_bs, strict=True)
    firsts_bs = torch.stack([torch.tensor(own)[number - 1] for own, number in numbered])
    positions_bs = place - firsts_bs if masked and restart else place.expand(samples, -1)

    width = (heads + 2 * kv_heads) * HEAD_DIM
    widths = (width, heads * HEAD_DIM)
    qkv_bsX, d_o_bsQ = (normal(samples, sequence, columns, dtype=FP64) for columns in widths)
    o_bsQ, d_qkv_bsX = over_ranks(qkv_bsX, d_o_bsQ, ranks, more, ring)
    with torch.enable_grad():
        leaf = qkv_bsX.clone().requires_grad_()
        expected = attention_by_scores(leaf, heads, kv_heads, BASE, mask_bss, positions_bs)
        (expected_d,) = torch.autograd.grad(expected, leaf, d_o_bsQ)
    assert_close(o_bsQ, expected.detach())
    assert_close(d_qkv_bsX, expected_d)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_work_is_equal_with_one_document_and_nearly_with_many(ranks):
    sequence = 16 * ranks
    for begins, most in (([0], 1.0), ([0, 3, sequence // 3, sequence // 2, sequence - 5], 1.5)):
        work = []
        for rank in range(ranks):
            blocks = document_order(ranks, rank, sequence, begins).gathered
            sizes = [(*(x.stop - x.start for x in (b.queries, b.keys)), b.causal) for b in blocks]
            work.append(sum(q * (q + 1) // 2 if causal else q * k for q, k, causal in sizes))
        assert max(work) <= most * sum(work) / ranks
