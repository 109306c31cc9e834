"""Buckets and shards: boxes of flat ranges, buckets that are cut over ranks, their memory."""

from dataclasses import replace
from itertools import pairwise, product
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.actors.stage.model.model import StageModel
from braid.actors.stage.state.buckets import RankBuckets
from braid.actors.stage.state.optimizer import Optimizer, OptimizerSettings
from braid.actors.stage.state.parameters import Place
from braid.actors.stage.state.shards import boxes_of_range
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.model.sizes import PartSizes
from braid.scheduling.schedule import buckets
from braid.scheduling.schedule.buckets import ALIGNED, share_elements

SHAPE = ModelShape(
    family="llama", hidden=64, ffn=96, layers=4, heads=4, kv_heads=2, head_dim=16, vocabulary=61, sequence=32
)
SETTINGS: dict[str, Any] = {"lr": 0.01, "min_lr_fraction": 1.0, "warmup_steps": 0, "steps": 10}
SETTINGS |= {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "clip_norm": 0.5}


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), data=st.data())
def test_boxes_are_the_elements_of_a_range_in_order(sizes: list[int], data: st.DataObject) -> None:
    box = torch.arange(prod(sizes)).view(sizes)
    begin = data.draw(st.integers(0, prod(sizes)))
    end = data.draw(st.integers(begin, prod(sizes)))
    found = []
    for offsets, extents in boxes_of_range(sizes, begin, end):
        at = tuple(slice(a, a + n) for a, n in zip(offsets, extents, strict=True))
        assert box[at].shape == extents
        found.append(box[at].reshape(-1))
    assert len(found) <= 2 * len(sizes) + 1
    assert torch.cat([*found, torch.empty(0, dtype=torch.long)]).tolist() == list(range(begin, end))


@given(elements=st.integers(1, 10_000), ways=st.integers(1, 16))
def test_shards_are_equal_and_hold_everything(elements: int, ways: int) -> None:
    share = share_elements(elements, ways)
    assert elements <= ways * share < elements + ways * ALIGNED
    assert ways == 1 or share % ALIGNED == 0


def held(
    layout: ParallelLayout, shape: ModelShape, rank: int, dtype: torch.dtype = torch.float32
) -> StageModel:
    return StageModel(
        shape=shape,
        layout=layout,
        place=Place.of(layout.mesh, rank),
        sizes=PartSizes(shape, layout, 1),
        device=torch.device("cpu"),
        dtype=dtype,
    )


LAYOUTS = [
    ParallelLayout(dp=2),
    ParallelLayout(dp=3, tp=2, zero=1),
    ParallelLayout(dp=2, tp=2, pp=2, zero=2),
    ParallelLayout(dp=4, zero=3, shards=2),
]
MANY = [buckets.LEAST_ELEMENTS, 2048]
"""Parts of one bucket, and of several."""


def held_buckets(model: StageModel, layout: ParallelLayout) -> RankBuckets:
    """As a rank sets them up, without communication."""
    mesh: Any = SimpleNamespace(
        layout=layout, place=model.context.place, position=model.context.place.position, groups=Gathers()
    )
    streams: Any = None
    return RankBuckets(model.parameters, mesh, streams, streams)


class Gathers:
    """Every rank has the same to tell."""

    def gather(self, own: Any) -> list[Any]:
        return [own]


@pytest.mark.parametrize("least", MANY)
@pytest.mark.parametrize("zero", [0, 1])
def test_a_buckets_gradients_are_one_behind_the_other(
    least: int, zero: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the model has a shared expert behind the router."""
    monkeypatch.setattr(buckets, "LEAST_ELEMENTS", least)
    layout = ParallelLayout(dp=4, ep=2, zero=zero)
    mixture = replace(SHAPE, family="moe", experts=4, top_k=2, shared_experts=1)
    for bucket in held_buckets(held(layout, mixture, 0), layout).buckets:
        whole = bucket.gradients.make()
        for member, begin in zip(bucket.members, bucket.offsets, strict=False):
            assert (member.chunk, member.bucket) == bucket.key
            assert member.gradient.data_ptr() == whole[begin:].data_ptr()
        assert 0 <= whole.numel() - bucket.offsets[-1] < bucket.ways * ALIGNED


@pytest.mark.parametrize(("least", "tied"), [(MANY[0], False), (MANY[1], True)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=ParallelLayout.describe)
def test_ranks_update_every_element_of_the_model_once(
    layout: ParallelLayout, tied: bool, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that hold the same count as one. What they update is what the model begins with."""
    monkeypatch.setattr(buckets, "LEAST_ELEMENTS", least)
    shape = replace(SHAPE, tied_head=tied)
    counts: dict[str, torch.Tensor] = {}
    seen: set[tuple[str, tuple[int, ...], tuple[int, ...]]] = set()
    for rank in range(layout.ranks):
        model = held(layout, shape, rank)
        model.initialise(7)
        rank_buckets = held_buckets(model, layout)
        assert sum(len(bucket.members) for bucket in rank_buckets.buckets) == len(model.parameters)
        for shard in rank_buckets.shards:
            assert shard.tensor.shape == shard.gradient.shape == shard.shape
            for piece in shard.slices:
                local = piece.of_local(shard.tensor)
                assert torch.equal(local, piece.of_global(piece.source.initial(7)))
                if (key := (piece.source.name, piece.offsets, piece.sizes)) not in seen:
                    seen.add(key)
                    count = counts.setdefault(piece.source.name, torch.zeros(piece.source.shape))
                    piece.of_global(count).add_(1)
    assert sum(count.numel() for count in counts.values()) == shape.parameters()
    for name, count in counts.items():
        assert bool((count == 1).all()), name


@pytest.mark.parametrize(("zero", "least"), [(1, MANY[0]), (2, MANY[1]), (3, MANY[1])])
def test_whole_buckets_are_there_between_start_and_release(
    zero: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters are views of them then, and of nothing else; what is updated stays where it is."""
    monkeypatch.setattr(buckets, "LEAST_ELEMENTS", least)
    layout = ParallelLayout(dp=2, zero=zero)
    model = held(layout, SHAPE, 1)
    model.initialise(7)
    initial = {id(one): one.tensor.detach().clone() for one in model.parameters}
    for bucket in held_buckets(model, layout).buckets:
        parameters, gradients = bucket.parameters, bucket.gradients
        assert parameters is not None
        shard = parameters.shard.clone()
        assert parameters.lasting == (parameters.whole is not None) == (zero < 3)
        places = [one.tensor.data_ptr() for one in bucket.shards]
        whole = parameters.make()
        assert whole is parameters.make()
        assert (bucket.part_of_rank(whole).data_ptr() == parameters.shard.data_ptr()) == (zero < 3)
        for member, (begin, end) in zip(bucket.members, pairwise(bucket.offsets), strict=True):
            whole[begin:end].copy_(initial[id(member)].view(-1))
            assert torch.equal(member.tensor, initial[id(member)])
            assert member.tensor.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        assert bucket.passing == ([] if zero < 3 else [whole])
        if zero == 3:
            parameters.release()
            assert bucket.passing == []
            assert all(one.tensor.untyped_storage().nbytes() == 0 for one in bucket.members)
        assert [one.tensor.data_ptr() for one in bucket.shards] == places
        assert torch.equal(parameters.shard, shard)
        assert gradients.lasting == (gradients.whole is not None) == (zero == 1)
        if not gradients.lasting:
            added = gradients.make(zeros=True)
            for member in bucket.members:
                assert member.gradient.shape == member.shape
                member.gradient.add_(1)
            assert added.sum() == bucket.offsets[-1]
            assert not gradients.shard.any(), "a shard is added to when the sum has arrived"
            bucket.keep_sums()
            assert torch.equal(gradients.shard, bucket.part_of_rank(added))
            assert gradients.whole is None
            with pytest.raises(AssertionError, match="no gradient is kept"):
                _ = bucket.members[0].gradient
        bucket.clear()
        assert not gradients.shard.any()


@pytest.mark.parametrize(("zero", "dtype"), [(1, torch.float32), (3, torch.bfloat16)])
def test_masters_are_shards(zero: int, dtype: torch.dtype) -> None:
    """And in the memory that gathers read, where parameters are no narrower."""
    layout = ParallelLayout(dp=2, zero=zero)
    model = held(layout, SHAPE, 0, dtype)
    model.initialise(7)
    rank_buckets = held_buckets(model, layout)
    optimizer = Optimizer(rank_buckets, OptimizerSettings(**SETTINGS))
    memories = [bucket.parameters.shard for bucket in rank_buckets.buckets if bucket.parameters is not None]
    storages = {memory.untyped_storage().data_ptr() for memory in memories}
    for master, shard in zip(optimizer.masters, optimizer.shards, strict=True):
        assert master.shape == shard.shape
        assert torch.equal(master, shard.tensor.to(torch.float32))
        assert shard.tensor.untyped_storage().data_ptr() in storages
        assert (master.data_ptr() == shard.tensor.data_ptr()) == (dtype is torch.float32)
        assert master.grad is not None
        assert master.grad.data_ptr() == shard.gradient.data_ptr()
    assert sum(one.numel() for one in optimizer.masters) <= sum(memory.numel() for memory in memories)


@pytest.mark.parametrize("zero", [0, 1])
def test_who_holds_the_same_state(zero: int) -> None:
    layout = ParallelLayout(dp=2, tp=2, pp=2, zero=zero)
    for rank, other in product(range(layout.ranks), repeat=2):
        here, there = (layout.mesh.position(one) for one in (rank, other))
        alike = all(here[axis] == there[axis] for axis in (("pp", "tp", "dp") if zero else ("pp", "tp")))
        assert (other in layout.mesh.holders(rank)) == alike
