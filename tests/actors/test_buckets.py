"""Buckets that are cut over ranks: every element of the model is updated once."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from braid.actors.stage.model.model import StageModel
from braid.actors.stage.state.buckets import RankBuckets
from braid.actors.stage.state.parameters import Place
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.model.sizes import PartSizes
from braid.scheduling.schedule import buckets

SHAPE = ModelShape(
    family="llama", hidden=64, ffn=96, layers=4, heads=4, kv_heads=2, head_dim=16, vocabulary=61, sequence=32
)
SETTINGS: dict[str, Any] = {"lr": 0.01, "min_lr_fraction": 1.0, "warmup_steps": 0, "steps": 10}
SETTINGS |= {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "clip_norm": 0.5}


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


@pytest.mark.parametrize("zero", [0, 1])
def test_who_holds_the_same_state(zero: int) -> None:
    layout = ParallelLayout(dp=2, tp=2, pp=2, zero=zero)
    for rank, other in product(range(layout.ranks), repeat=2):
        here, there = (layout.mesh.position(one) for one in (rank, other))
        alike = all(here[axis] == there[axis] for axis in (("pp", "tp", "dp") if zero else ("pp", "tp")))
        assert (other in layout.mesh.holders(rank)) == alike
