"""After a second signal: what the save under way has left is removed, and the newest checkpoint is named."""

from pathlib import Path

import pytest

from braid.actors.controller.locks import FileHold
from braid.jobs import train
from braid.jobs.stopping import SecondSignalError
from braid.jobs.train import _tidied


def left(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def stopped(run: Path) -> str:
    """What the command says."""
    with pytest.raises(SecondSignalError) as caught, _tidied(run):
        raise SecondSignalError
    return str(caught.value)


def test_half_a_checkpoint_is_removed(tmp_path: Path) -> None:
    for name in ("step-4", "step-8.tmp-1", "step-2.tmp-old"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    told = stopped(tmp_path)
    assert told.endswith("without a checkpoint; the newest checkpoint is of step 4; go on with --resume")
    assert left(tmp_path) == ["step-4"]


def test_a_run_that_still_ends_keeps_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "_TIDY_SECONDS", 0.1)
    (tmp_path / "checkpoints" / "step-8.tmp-1").mkdir(parents=True)
    lock = FileHold(tmp_path / ".lock")
    lock.take()
    assert "there is no checkpoint" in stopped(tmp_path)
    assert left(tmp_path) == ["step-8.tmp-1"]
    lock.release()


def test_nothing_else_is_touched(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="of its own"), _tidied(tmp_path):
        raise ValueError("of its own")
    assert "there is no checkpoint" in stopped(tmp_path / "none")
