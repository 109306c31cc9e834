"""Which tiles a product gets: by the table, or as tuned and kept on disk."""

from pathlib import Path

import pytest
import torch
import triton

from braid.kernels.fused import tiles
from braid.kernels.fused.tiles import Tiles, candidates, tiles_for, tune

CARD = torch.device("cuda")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A card of 132 multiprocessors and an empty cache of Triton's."""
    monkeypatch.setattr(tiles, "INTERPRETING", False)
    monkeypatch.setattr(tiles, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    tiles._tuned.cache_clear()


def test_the_largest_tiles_that_fill_the_card() -> None:
    widest, middle, smallest = candidates(BF16)
    assert tiles_for("linear", (8192, 4096, 4096), BF16, CARD) == widest
    assert tiles_for("linear", (2048, 2048, 4096), BF16, CARD) == middle
    assert tiles_for("linear", (128, 128, 4096), BF16, CARD) == smallest
    assert tiles_for("linear", (8192, 4096, 64), BF16, CARD, few_registers=True) == middle
    assert tiles_for("linear", (8192, 4096, 64), BF16, CARD, accumulates=True).k == 32


def test_no_tile_needs_more_shared_memory_than_an_a100_has() -> None:
    for dtype in (BF16, torch.float32):
        for one in (*candidates(dtype), *candidates(dtype, accumulates=True)):
            assert (one.m + one.n) * one.k * dtype.itemsize * one.stages <= 163 * 1024


def test_the_fastest_is_kept_on_disk_for_its_product_alone() -> None:
    sizes = (8192, 4096, 4096)

    def times(one: Tiles) -> int:
        return one.n

    chosen = tune("linear", sizes, BF16, CARD, times)
    assert chosen == min(candidates(BF16), key=times) != candidates(BF16)[0]
    tiles._tuned.cache_clear()  # as in another process
    assert tiles_for("linear", sizes, BF16, CARD) == chosen
    for other in (
        tiles_for("linear_input_gradient", sizes, BF16, CARD),
        tiles_for("linear", (8192, 4096, 4160), BF16, CARD),
        tiles_for("linear", sizes, torch.float16, CARD),
    ):
        assert other == candidates(BF16)[0]
