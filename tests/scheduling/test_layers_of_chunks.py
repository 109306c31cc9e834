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
)
def test_every_layer_is_held_once_in_order(pp: int, layers: int, placement: Placement, head: int) -> None:
    layout = ParallelLayout(pp=pp, placement=placement, head_layers=head)
    held = [layer for chunk in range(layout.chunks) for layer in layout.layers_of(chunk, layers)]
    assert held == list(range(layers))
    found = counts(layout, layers)
    found[-1] += head
    assert max(found) - min(found) <= 1


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (8, [2, 2, 2, 2]),
        (9, [2, 2, 3, 2]),
        (10, [2, 3, 3, 2]),
        (11, [2, 3, 3, 3]),
    ],
)
def test_later_chunks_of_the_folded_model_hold_more(layers: int, expected: list[int]) -> None:
    assert counts(ParallelLayout(pp=2, placement=Placement.FOLDED), layers) == expected


def test_the_first_stage_of_a_linear_pipeline_holds_more_than_that_of_the_head() -> None:
    assert counts(ParallelLayout(pp=4), 11) == [3, 3, 3, 2]


def test_no_end_is_left_without_layers() -> None:
    layout = ParallelLayout(pp=2, placement=Placement.FOLDED, head_layers=3)
    with pytest.raises(ValueError, match=r"model.layers=8 .* last of 4 chunks without a layer; lower"):
        layout.layers_of(0, 8)
