"""Buckets and shards: boxes of flat ranges, buckets that are cut over ranks, their memory."""

from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.actors.stage.model.model import StageModel
from braid.actors.stage.state.buckets import RankBuckets
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
