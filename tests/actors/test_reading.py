"""Files that a run depends on: what cannot be read is an I/O error with a message; nothing is waited for."""

import os
from pathlib import Path

import pytest

from braid.actors.controller.group import raised
from braid.actors.controller.manifest import CheckpointError, read_manifest
from braid.actors.stage.data import read_index
from braid.actors.stage.digests import damage, damage_in_share
from braid.actors.stage.guarded_reader import GuardedReader
from braid.actors.stage.reading import UnreadableError, open_regular


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    """Opened for reading, it would wait until somebody writes."""
    for name in ("index.json", "manifest.json", ".metadata", "shard"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(OSError, match="it is no regular file"):
        open_regular(tmp_path / "shard")
    with pytest.raises(UnreadableError, match=r"cannot read index.json \(it is no regular file\)"):
        read_index(tmp_path)
    with pytest.raises(UnreadableError, match=r"\.metadata cannot be read: it is no regular file"):
        GuardedReader(tmp_path).read_metadata()
    with pytest.raises(CheckpointError, match="it is no regular file"):
        read_manifest(tmp_path)
    assert damage(tmp_path, {"shard": (5, "")}) == "file shard cannot be read: it is no regular file"
    told = damage_in_share(tmp_path, 0, 1)
    assert told is not None
    assert told.startswith("manifest.json cannot be read")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"files": 3}', "{}"])
def test_a_damaged_manifest_is_damage_and_not_a_rank_s_failure(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    told = damage_in_share(tmp_path, 0, 1)
    assert told is not None
    assert told.startswith("manifest.json cannot be read")


def test_what_ranks_raise() -> None:
    """A ValueError is a message for the user, and so is a file that cannot be read; the rest has a trace."""
    mistake, unreadable = (
        raised(1, ValueError("a key"), "trace"),
        raised(1, UnreadableError("a file"), "trace"),
    )
    assert (mistake.user_error, str(mistake)) == (True, "rank 1: a key")
    assert (unreadable.user_error, str(unreadable)) == (True, "rank 1: a file")
    disk = raised(1, OSError(5, "Input/output error"), "trace")
    assert (disk.user_error, str(disk)) == (False, "rank 1: OSError: [Errno 5] Input/output error")
    assert disk.trace == "trace"
