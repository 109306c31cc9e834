"""Fixtures of several files."""

import pytest

from braid.jobs.data import corpus


@pytest.fixture
def small_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are cut into many items."""
    monkeypatch.setattr(corpus, "_SMALLEST_ITEM_BYTES", 300)
