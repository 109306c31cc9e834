"""Which layers a chunk holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.scheduling.spec import ParallelLayout, Placement


def counts(layout: ParallelLayout, layers: int) -> list[int]:
    """Layers of every chunk of the first copy."""
    return [len(layout.layers_of(chunk, layers)) for chunk in range(layout.chunks)]


@given(
    pp=st.integers(1, 8),
    layers=st.integers(40, 90),
    placement=st.sampled_from(Placement),
    head=st.integers(0, 1),
    late=st.integers(0, 1),
)
def test_every_layer_is_held_once_in_order(
    pp: int, layers: int, placement: Placement, head: int, late: int
) -> None:
    late *= placement is Placement.FOLDED
    layout = ParallelLayout(pp=pp, placement=placement, head_layers=head, late_layers=late)
    held = [layer for chunk in range(layout.chunks) for layer in layout.layers_of(chunk, layers)]
    assert held == list(range(layers))
    found = counts(layout, layers)
    found[0] += late
    found[-1] += head - late
    assert max(found) - min(found) <= 1


@pytest.mark.parametrize(
    ("layers", "late", "expected"),
    [
        (8, 0, [2, 2, 2, 2]),
        (9, 0, [2, 2, 3, 2]),
        (10, 0, [2, 3, 3, 2]),
        (11, 0, [2, 3, 3, 3]),
        (8, 1, [1, 2, 2, 3]),
        (11, 1, [1, 3, 3, 4]),
    ],
)
def test_later_chunks_of_the_folded_model_hold_more(layers: int, late: int, expected: list[int]) -> None:
    assert counts(ParallelLayout(pp=2, placement=Placement.FOLDED, late_layers=late), layers) == expected


def test_the_first_stage_of_a_linear_pipeline_holds_more_than_that_of_the_head() -> None:
    assert counts(ParallelLayout(pp=4), 11) == [3, 3, 3, 2]


@pytest.mark.parametrize(
    ("key", "layout"),
    [
        ("late_layers=2 leaves the first", ParallelLayout(pp=2, placement=Placement.FOLDED, late_layers=2)),
        ("head_layers=3 leaves the last", ParallelLayout(pp=2, placement=Placement.FOLDED, head_layers=3)),
    ],
)
def test_no_end_is_left_without_layers(key: str, layout: ParallelLayout) -> None:
    with pytest.raises(ValueError, match=f"parallel.{key} of 4 chunks of 8 layers without a layer; lower it"):
        layout.layers_of(0, 8)


@pytest.mark.parametrize("placement", [p for p in Placement if p is not Placement.FOLDED])
def test_late_layers_need_both_ends_on_one_stage(placement: Placement) -> None:
    with pytest.raises(
        ValueError, match=rf"parallel\.late_layers=1 .* set it to 0 for a {placement} pipeline"
    ):
        ParallelLayout(pp=2, placement=placement, late_layers=1)


def test_late_layers_are_no_fewer_than_none() -> None:
    with pytest.raises(ValueError, match=r"parallel\.late_layers=-1 must be 0 or more"):
        ParallelLayout(pp=2, placement=Placement.FOLDED, late_layers=-1)
