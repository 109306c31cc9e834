"""Shares of parameters: boxes of flat ranges, buckets cut over ranks."""

from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.actors.stage.model import StageModel
from braid.actors.stage.parameters import Place
from braid.actors.stage.shares import boxes_of_range, bucket_plans, updated_by
from braid.scheduling.memory import ALIGNED, share_elements
from braid.scheduling.sizes import part_sizes
from braid.scheduling.spec import ModelShape, ParallelLayout

SHAPE = ModelShape(
    family="llama",
    hidden=64,
    ffn=96,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocabulary=61,
    sequence=32,
)


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


def held(layout: ParallelLayout, shape: ModelShape, rank: int) -> StageModel:
    return StageModel(
        shape=shape,
        layout=layout,
        place=Place.of(layout.mesh, rank),
        sizes=part_sizes(shape, layout, 1),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


LAYOUTS = [
    ParallelLayout(dp=2, zero=1),
    ParallelLayout(dp=3, tp=2, zero=1),
    ParallelLayout(dp=2, tp=2, pp=2, zero=1),
    ParallelLayout(dp=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=ParallelLayout.describe)
@pytest.mark.parametrize("tied", [False, True])
def test_ranks_update_every_element_of_the_model_once(layout: ParallelLayout, tied: bool) -> None:
    """Ranks that hold the same count as one. What they update is what the model begins with."""
    shape = ModelShape(**{**vars(SHAPE), "tied_head": tied})
    counts: dict[str, torch.Tensor] = {}
    seen: set[tuple[str, tuple[int, ...], tuple[int, ...]]] = set()
    for rank in range(layout.ranks):
        model = held(layout, shape, rank)
        model.initialise(7)
        plans = bucket_plans(model.parameters, model.context.place, layout.copies, 1 << 20)
        shares = updated_by(plans, model.parameters)
        assert sum(len(plan.members) for plan in plans) == len(model.parameters)
        for share in shares:
            assert share.tensor.shape == share.shape
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


@pytest.mark.parametrize("zero", [0, 1])
def test_who_holds_the_same_state(zero: int) -> None:
    layout = ParallelLayout(dp=2, tp=2, pp=2, zero=zero)
    for rank, other in product(range(layout.ranks), repeat=2):
        here, there = (layout.mesh.position(one) for one in (rank, other))
        alike = all(here[axis] == there[axis] for axis in (("pp", "tp", "dp") if zero else ("pp", "tp")))
        assert (other in layout.mesh.holders(rank)) == alike
