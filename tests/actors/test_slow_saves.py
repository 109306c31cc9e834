"""Ranks wait for one that writes slowly, for as long as it gets on; ranks that lose touch have not failed."""

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from braid.actors.stage import checked_files
from braid.actors.stage.checkpoint import Saves, read_tensors, save_group
from braid.actors.stage.digests import damage
from braid.actors.stage.messages import Written
from tests.actors.test_skipped_steps import LAYOUT, Trained, met, port_here
from tests.forking import run_forked

SHORT = timedelta(seconds=2)
SLOW_SECONDS = 2 * SHORT.total_seconds()
"""In which the slow rank writes."""


def slow(write: Callable[..., int], began: float, stream: Any, data: Any) -> int:
    """A disk that takes a piece at a time, and all of them for longer than the others' limit."""
    time.sleep(0.2 if time.monotonic() < began + SLOW_SECONDS else 0.0)
    return write(stream, data)


def watched(saves: Saves, save: Callable[[], Written]) -> tuple[Written, list[int]]:
    """What became of a save, and what the rank told of its progress meanwhile."""
    told: list[int] = []
    over = Event()

    def look() -> None:
        while not over.wait(0.01):
            if (progress := saves.awaited) is not None and (count := progress.read()) is not None:
                told.append(count)

    thread = Thread(target=look)
    thread.start()
    try:
        return save(), told
    finally:
        over.set()
        thread.join()


def saved(saves: Saves, folder: Path, asynchronous: bool) -> Written:
    if not asynchronous:
        return saves.save(folder)
    saves.take(1)
    saves.begin(folder)
    written = saves.finished(wait=True)
    assert written is not None
    return written


def run_rank(rank: int, folder: str, port: int, asynchronous: bool, limited: bool) -> None:
    with met(rank, port):
        trained = Trained(rank)
        trained.train(0, 1)
        dist.barrier()
        group = dist.new_group(backend="gloo", timeout=SHORT) if limited else save_group(SHORT)
        saves = Saves(trained.optimizer, group)
        stream = checked_files._HashedStream
        write = partial(slow, stream.write, time.monotonic()) if rank == 1 else stream.write
        with patch.object(stream, "write", lambda *arguments: write(*arguments)):
            written, told = watched(saves, lambda: saved(saves, Path(folder), asynchronous))
        if limited:
            assert written.failure.startswith("ranks lost touch while they saved: ")
            with pytest.raises(RuntimeError, match="ranks lost touch in the save before"):
                saved(saves, Path(folder), asynchronous)
        else:
            assert written.files
            assert damage(Path(folder), written.files) is None
            size = sum(count for count, _ in written.files.values())
            assert told == sorted(told)
            assert told[-1] <= 2 * size, "written and read back"
            if rank == 1:
                assert len(set(told)) > 5, "it gets on, and that is seen"
        dist.barrier()


@pytest.mark.parametrize(
    ("asynchronous", "limited"), [(True, False), (False, True)], ids=["as ranks save", "with a limit"]
)
def test_a_rank_may_write_for_longer_than_ranks_wait_for_each_other(
    tmp_path: Path, asynchronous: bool, limited: bool
) -> None:
    run_forked(run_rank, (str(tmp_path), port_here(), asynchronous, limited), nprocs=LAYOUT.ranks)
    if not limited:
        assert len(read_tensors(tmp_path)) > 10
