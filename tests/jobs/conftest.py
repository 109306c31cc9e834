"""Fixtures of several files."""

from pathlib import Path

import pytest

from braid.jobs.data import corpus


@pytest.fixture
def small_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are cut into many items."""
    monkeypatch.setattr(corpus, "_SMALLEST_ITEM_BYTES", 300)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
