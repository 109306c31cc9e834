"""Initial values: the same in every layout, whatever part of a tensor a rank draws."""

import hashlib
import random

import pytest
import torch

from braid.actors.stage.state.parameters import GlobalParameter

SHAPES = [(1 << 21,), (1000, 1500), (1024, 1024), (700, 3000), (5, 600, 700), (70, 3, 90, 80)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_box_is_that_of_the_whole(shape: tuple[int, ...]) -> None:
    draw = random.Random()
    source = GlobalParameter(name="w", shape=shape, deviation=0.02)
    whole = source.initial(7)
    assert whole.shape == shape
    for _ in range(5):
        offsets = [draw.randrange(extent) for extent in shape]
        sizes = [draw.randint(1, extent - at) for extent, at in zip(shape, offsets, strict=True)]
        box = source.initial_box(7, offsets, sizes)
        expected = whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
        assert torch.equal(box, expected), (offsets, sizes)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_are_normal_and_differ(shape: tuple[int, ...]) -> None:
    source = GlobalParameter(name="w", shape=shape, deviation=0.02)
    whole = source.initial(7)
    assert float(whole.std()) == pytest.approx(0.02, rel=0.01)
    assert float(whole.mean()) == pytest.approx(0.0, abs=2e-4)
    assert whole.unique().numel() > 0.9 * min(whole.numel(), 1 << 22)
    assert not torch.equal(whole, source.initial(8))


def test_small_tensors_are_drawn_whole_as_they_always_were() -> None:
    """Curves of small models stay what they were."""
    digest = hashlib.sha256(b"3/layers.0.w").digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    found = GlobalParameter(name="layers.0.w", shape=(64, 96), deviation=0.5).initial_box(3, (8, 0), (16, 96))
    assert torch.equal(found, torch.randn(64, 96, generator=generator)[8:24] * 0.5)
