"""Files that a run depends on: what cannot be read is an I/O error with a message; nothing is waited for."""

import os
import threading
from pathlib import Path

import pytest

from braid.actors.controller.ranks.group import raised
from braid.actors.controller.state.manifest import CheckpointError, read_manifest
from braid.actors.stage.data.samples import ReadingAhead
from braid.actors.stage.data.token_files import read_index
from braid.actors.stage.files.checkpoint_files import GuardedReader
from braid.actors.stage.files.digests import damage, damage_in_share
from braid.actors.stage.files.reading import UnreadableError, open_regular


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
    for error, users, says in (
        (ValueError("a key"), True, "a key"),
        (UnreadableError("a file"), True, "a file"),
        (OSError(5, "Input/output error"), False, "OSError: [Errno 5] Input/output error"),
    ):
        told = raised(1, error, "trace")
        assert (told.user_error, str(told)) == (users, f"rank 1: {says}")
    assert told.trace == "trace"


# -- the next step's tokens, while this one runs ------------------------------------------------------------


def test_the_next_one_is_read_before_it_is_asked_for_and_errors_come_with_their_step() -> None:
    readers: dict[int, str] = {}
    read = threading.Event()

    def tokens(step: int) -> int:
        readers[step] = threading.current_thread().name
        read.set()
        if step == 2:
            raise OSError("the disk is gone")
        return step * 10

    ahead = ReadingAhead(tokens)
    assert ahead.of(0) == 0
    while 1 not in readers:
        assert read.wait(10.0)
    assert ahead.of(1) == 10
    assert readers[0] == threading.current_thread().name
    assert readers[1].startswith("reading")
    with pytest.raises(OSError, match="the disk is gone"):
        ahead.of(2)
    assert ahead.of(1) == 10, "a step is repeated"
    assert ahead.of(7) == 70, "a run goes on elsewhere"
    ahead.close()
