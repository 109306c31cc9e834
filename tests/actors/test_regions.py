"""Regions of partitions as blocks of tensors, against rows looked up one by one."""

from itertools import product
from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from braid.actors.stage.run.regions import Rows
from braid.scheduling.mesh.mesh import place_in
from braid.scheduling.mesh.partition import WHOLE, DimRanks, Region, Share, bounds

MESHES = st.sampled_from([(2,), (3,), (2, 2), (2, 3), (3, 2), (2, 2, 2)])


def ranks_of(spans: tuple[DimRanks, ...], mesh: tuple[int, ...], own: tuple[int, ...]) -> list[int]:
    """Numbers of the ranks that a region has rows of, in order."""

    def inside(places: tuple[int, ...]) -> bool:
        return all(
            {DimRanks.ALL: True, DimRanks.OWN: a == b, DimRanks.OTHERS: a != b}[span]
            for span, a, b in zip(spans, places, own, strict=True)
        )

    return [rank for rank, places in enumerate(product(*map(range, mesh))) if inside(places)]


def taken(whole: Tensor, region: Region, own: tuple[int, ...], each: int) -> Tensor:
    """The region of a tensor of all ranks' rows, row by row."""
    first, end = bounds(region.rows, each)
    left, right = bounds(region.columns, whole.shape[1])
    rows = [
        rank * each + row for rank in ranks_of(region.spans, region.mesh, own) for row in range(first, end)
    ]
    return whole[rows][:, left:right]


@st.composite
def shares(draw: st.DrawFn) -> Share:
    ways = draw(st.integers(1, 4))
    return draw(st.integers(1, ways)), ways


@given(st.data(), MESHES, st.integers(4, 7), shares(), st.one_of(st.just(WHOLE), shares()))
@settings(max_examples=200, deadline=None)
def test_rows_are_taken_and_put_back(
    data: st.DataObject, mesh: tuple[int, ...], each: int, rows: Share, columns: Share
) -> None:
    own = place_in(mesh, data.draw(st.integers(0, prod(mesh) - 1)))
    wanted = tuple(data.draw(st.sampled_from(list(DimRanks))) for _ in mesh)
    held = tuple(one if data.draw(st.booleans()) else DimRanks.ALL for one in wanted)
    everything = torch.arange(prod(mesh) * each * 5, dtype=torch.float64).view(-1, 5)
    has = Region("tp", mesh, held)
    wants = Region("tp", mesh, wanted, rows, columns)
    given_rows = taken(everything, has, own, each)
    lookup = Rows(has, wants, own)
    part = lookup.take(given_rows)
    assert torch.equal(part, taken(everything, wants, own, each))
    whole = torch.zeros_like(given_rows)
    lookup.place(whole, part)
    assert torch.equal(lookup.take(whole), part)
    assert whole.count_nonzero() == part.count_nonzero(), "nothing else is touched"
