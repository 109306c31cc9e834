"""Shares of parameters: boxes of flat ranges, buckets cut over ranks."""

from dataclasses import replace
from itertools import pairwise, product
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.actors.stage.gradients import GradientBuckets
from braid.actors.stage.model import StageModel
from braid.actors.stage.optimizer import Optimizer, OptimizerSettings
from braid.actors.stage.parameters import Place
from braid.actors.stage.shares import boxes_of_range
from braid.actors.stage.weights import ShardedWeights
from braid.scheduling import buckets
from braid.scheduling.buckets import ALIGNED, share_elements
from braid.scheduling.sizes import part_sizes
from braid.scheduling.spec import ModelShape, ParallelLayout

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
def test_shares_are_equal_and_hold_everything(elements: int, ways: int) -> None:
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
        sizes=part_sizes(shape, layout, 1),
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


def sharded(model: StageModel, rank: int, layout: ParallelLayout) -> tuple[ShardedWeights, GradientBuckets]:
    """As a rank sets them up, without communication."""
    streams: Any = None
    mesh: Any = SimpleNamespace(
        layout=layout, place=model.context.place, position=model.context.place.position, groups=Gathers()
    )
    recorder: Any = None
    gradients = GradientBuckets(model.parameters, mesh, streams, recorder, 1 << 20)
    return ShardedWeights(gradients.plans, mesh, streams, recorder), gradients


class Gathers:
    """Every rank has the same to tell."""

    def gather(self, own: Any) -> list[Any]:
        return [own]


@pytest.mark.parametrize("least", MANY)
def test_a_buckets_gradients_are_one_behind_the_other(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is summed early is the bucket's, also where the model has a shared expert behind the router."""
    monkeypatch.setattr(buckets, "LEAST_ELEMENTS", least)
    layout = ParallelLayout(dp=4, ep=2)
    mixture = replace(SHAPE, family="moe", experts=4, top_k=2, shared_experts=1)
    _, gradients = sharded(held(layout, mixture, 0), 0, layout)
    for bucket in gradients.buckets:
        found = dict.fromkeys(bucket.parts, 0)
        for parameter in bucket.plan.members:
            part, own = bucket.parts[parameter.bucket], parameter.gradient
            assert own is not None
            assert 0 <= own.storage_offset() - part.storage_offset() <= part.numel() - own.numel()
            found[parameter.bucket] += own.numel()
        assert found == {n: part.numel() for n, part in bucket.parts.items()}


@pytest.mark.parametrize(("least", "tied"), zip(MANY, (False, True), strict=True))
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
        weights, gradients = sharded(model, rank, layout)
        shares = gradients.shares
        assert sum(len(plan.members) for plan in gradients.plans) == len(model.parameters)
        assert len(weights.buckets) == sum(plan.ways > 1 for plan in gradients.plans)
        for share in shares:
            assert share.tensor.shape == share.gradient.shape == share.shape
            for piece in share.slices:
                local = piece.of_local(share.tensor)
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
    weights, gradients = sharded(model, 1, layout)
    for bucket in weights.buckets:
        plan, own = bucket.plan, bucket.own.clone()
        assert bucket.passes == (bucket.whole is None) == (zero == 3)
        places = [share.tensor.data_ptr() for share in plan.shares]
        whole = bucket.make()
        assert whole is bucket.make()
        assert (plan.own(whole).data_ptr() == bucket.own.data_ptr()) == (zero < 3), "a share apart"
        for member, (begin, end) in zip(plan.members, pairwise(plan.offsets), strict=True):
            whole[begin:end].copy_(initial[id(member)].view(-1))
            assert torch.equal(member.tensor, initial[id(member)])
            assert member.tensor.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        if zero == 3:
            bucket.release()
            assert bucket.whole is None
            assert all(one.tensor.untyped_storage().nbytes() == 0 for one in plan.members)
        assert [share.tensor.data_ptr() for share in plan.shares] == places
        assert torch.equal(bucket.own, own)
    for sums in gradients.buckets:
        assert sums.lasting == (zero == 1)
        if not sums.lasting:
            assert sums.buffer is None
            assert not sums.share.any()
            sums.allocate()
            for member in sums.plan.members:
                assert member.gradient.shape == member.shape
                member.gradient.add_(1)
            assert sums.whole().sum() == sums.plan.offsets[-1]
            assert not sums.share.any(), "a share is added to when the scatter has ended"
            sums.release()
            assert sums.buffer is None
            with pytest.raises(AssertionError, match="no gradient is kept"):
                _ = sums.plan.members[0].gradient


@pytest.mark.parametrize(("zero", "dtype"), [(1, torch.float32), (3, torch.bfloat16)])
def test_masters_are_in_shares(zero: int, dtype: torch.dtype) -> None:
    """And in the memory that gathers read, where parameters are no narrower."""
    layout = ParallelLayout(dp=2, zero=zero)
    model = held(layout, SHAPE, 0, dtype)
    model.initialise(7)
    weights, gradients = sharded(model, 0, layout)
    optimizer = Optimizer(gradients, OptimizerSettings(**SETTINGS))
    apart = {one.own.untyped_storage().data_ptr() for one in weights.buckets}
    for master, share in zip(optimizer.masters, optimizer.shares, strict=True):
        assert master.shape == share.shape
        assert torch.equal(master, share.tensor.to(torch.float32))
        assert share.tensor.untyped_storage().data_ptr() in apart
        assert (master.data_ptr() == share.tensor.data_ptr()) == (dtype is torch.float32)
        assert master.grad is not None
        assert master.grad.data_ptr() == share.gradient.data_ptr()
    assert sum(one.numel() for one in optimizer.masters) <= sum(one.own.numel() for one in weights.buckets)


@pytest.mark.parametrize("zero", [0, 1])
def test_who_holds_the_same_state(zero: int) -> None:
    layout = ParallelLayout(dp=2, tp=2, pp=2, zero=zero)
    for rank, other in product(range(layout.ranks), repeat=2):
        here, there = (layout.mesh.position(one) for one in (rank, other))
        alike = all(here[axis] == there[axis] for axis in (("pp", "tp", "dp") if zero else ("pp", "tp")))
        assert (other in layout.mesh.holders(rank)) == alike
