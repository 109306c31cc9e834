"""States that are kept: a skipped step is no update in any of them; ranks wait for one that writes slowly."""

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from braid.actors.stage.files import checkpoint_files
from braid.actors.stage.files.digests import damage
from braid.actors.stage.measure.telemetry import Recorder
from braid.actors.stage.rank.groups import build_mesh, make_world
from braid.actors.stage.rank.messages import Rendezvous, Rescue, Written
from braid.actors.stage.run.gloo_streams import HostStreams
from braid.actors.stage.state.buckets import RankBuckets
from braid.actors.stage.state.checkpoint import (
    Saves,
    held_slices,
    load_checkpoint,
    read_tensors,
    save_group,
    write_slices,
)
from braid.actors.stage.state.copies import Copies
from braid.actors.stage.state.global_state import UPDATES, add_state
from braid.actors.stage.state.optimizer import Optimizer, OptimizerSettings
from braid.actors.stage.state.parameters import Place
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.schedule.operations import Reduce
from tests.actors.test_buckets import SETTINGS, SHAPE, held
from tests.forking import run_forked

LAYOUT: Final = ParallelLayout(tp=2)
LIMIT: Final = timedelta(seconds=60)
SKIPPED, SAVED, STEPS = 2, 4, 6
"""The step whose gradients are no numbers; the steps done when the state is kept, and in the end."""


KINDS: Final[dict[str, dict[str, Any]]] = {
    "adamw": {},
    "muon, average": {"optimizer": "muon", "average": 0.9},
    "adamw_8bit": {"optimizer": "adamw_8bit"},
}
"""Settings of optimizers that keep other states."""


class Trained:
    """One rank's optimizer, with gradients drawn at random. ``kind``: a key of `KINDS`."""

    def __init__(self, rank: int, kind: str = "adamw") -> None:
        self.rank = rank
        mesh = build_mesh(LAYOUT, rank, timeout=LIMIT)
        self.model = held(LAYOUT, SHAPE, rank)
        self.model.initialise(7)
        streams = HostStreams()
        recorder = Recorder(streams)
        self.buckets = RankBuckets(self.model.parameters, mesh, streams, recorder)
        self.optimizer = Optimizer(self.buckets, OptimizerSettings(**SETTINGS, **KINDS[kind]))

    def train(self, begin: int, end: int) -> None:
        for step in range(begin, end):
            for n, shard in enumerate(self.buckets.shards):
                generator = torch.Generator().manual_seed(1000 * step + n)
                shard.gradient.copy_(torch.randn(shard.shape, generator=generator))
            if step == SKIPPED and self.rank == 1:
                self.buckets.shards[0].gradient.fill_(float("nan"))
            self.buckets.square()
            self.buckets.start(Reduce(None, "tp"))
            self.buckets.wait(Reduce(None, "tp"))
            self.optimizer.begin(step).step()

    def state(self) -> list[torch.Tensor]:
        return [entry.tensor.detach().clone() for entry in self.optimizer.entries()]

    def spoil(self) -> None:
        for master in self.optimizer.masters:
            master.data.add_(1.0)
        self.optimizer.restored(0)


@contextmanager
def met(rank: int, port: int, ranks: int = LAYOUT.ranks) -> Iterator[None]:
    """As a rank among all."""
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=LIMIT)
    make_world("gloo", dist.PrefixStore("world", store), rank, ranks, LIMIT)
    yield
    dist.destroy_process_group()
    store.set(f"done {rank}", "")
    if rank == 0:
        store.wait([f"done {one}" for one in range(ranks)], LIMIT)


def port_here() -> int:
    """A free one."""
    return int(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port)


def run_rank(rank: int, folder: str, port: int, kind: str) -> None:
    with met(rank, port):
        saved_and_restored(rank, Path(folder), kind)


def saved_and_restored(rank: int, home: Path, kind: str) -> None:
    trained, copies = Trained(rank, kind), Copies()
    optimizer = trained.optimizer
    with pytest.raises(ValueError, match=r"checkpoint.copies_mb=1: copies in memory take \d+ MiB"):
        copies.join(optimizer, LAYOUT, LAYOUT.mesh, 1, 1 << 20, LIMIT)
    copies.join(optimizer, LAYOUT, LAYOUT.mesh, 1, None, LIMIT)
    saves = Saves(optimizer, save_group(LIMIT))
    trained.train(0, SAVED)
    assert optimizer.updates == SAVED - 1
    assert not saves.save(home / "saved").failure
    saves.take(SAVED)
    copies.keep(optimizer, SAVED)
    copies.settle()
    older = add_state({}, optimizer.entries(), torch.zeros(1))
    del older[UPDATES]
    write_slices(home / "of before", older)
    trained.train(SAVED, STEPS)
    expected = trained.state()
    saves.begin(home / "in the background")
    written = saves.finished(wait=True)
    assert written is not None
    assert not written.failure

    def rescued() -> None:
        meeting = Rendezvous(address="", port=0, generation=2)
        plan = Rescue(meeting=meeting, survivors=(0, 1), step=SAVED, sources=(1, 0))

        def model_of(place: Place, device: torch.device) -> Any:
            return held(LAYOUT, SHAPE, place.mesh.index(place.position, {"tp"}))

        states = optimizer.settings.states
        slices = held_slices(copies, rank, plan, LAYOUT.mesh, model_of, states)
        write_slices(home / "rescued", slices)
        load_checkpoint(home / "rescued", optimizer, SAVED)

    restores: list[Callable[[], None]] = [
        lambda: load_checkpoint(home / "saved", optimizer, SAVED),
        lambda: load_checkpoint(home / "in the background", optimizer, SAVED),
        rescued,
        lambda: copies.restore(optimizer, SAVED, [1, 0]),  # each from its partner
        lambda: copies.restore(optimizer, SAVED, [0, 1]),
    ]
    for number, restore in enumerate(restores):
        trained.spoil()
        restore()
        trained.train(SAVED, STEPS)
        assert all(map(torch.equal, trained.state(), expected)), f"restore {number}"
    assert read_tensors(home / "saved")[UPDATES].tolist() == [SAVED - 1]
    load_checkpoint(home / "of before", optimizer, SAVED)
    assert optimizer.updates == SAVED, "it does not tell: steps count"
    dist.barrier()


@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_step_stays_skipped_in_every_state_that_is_kept(tmp_path: Path, kind: str) -> None:
    """And training goes on bit for bit, whatever the optimizer keeps."""
    for name in ("saved", "in the background", "of before", "rescued"):
        (tmp_path / name).mkdir()
    run_forked(run_rank, (str(tmp_path), port_here(), kind), nprocs=LAYOUT.ranks)


# -- a rank that writes slowly, and ranks that lose touch ----------------------------------------------------


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


def run_saving_rank(rank: int, folder: str, port: int, asynchronous: bool, limited: bool) -> None:
    with met(rank, port):
        trained = Trained(rank)
        trained.train(0, 1)
        dist.barrier()
        group = dist.new_group(backend="gloo", timeout=SHORT) if limited else save_group(SHORT)
        saves = Saves(trained.optimizer, group)
        stream = checkpoint_files._HashedStream
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
    run_forked(run_saving_rank, (str(tmp_path), port_here(), asynchronous, limited), nprocs=LAYOUT.ranks)
    if not limited:
        assert len(read_tensors(tmp_path)) > 10


# -- saves that fail -----------------------------------------------------------------------------------------


def open_here() -> tuple[int, list[str]]:
    """How many threads this process has, and its open files."""
    return len(os.listdir("/proc/self/task")), sorted(str(file) for file in Path("/proc/self/fd").iterdir())


def test_saves_that_fail_leave_no_threads_and_no_files_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.actors.test_kept_states.LAYOUT", ParallelLayout())
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(checkpoint_files._HashedStream, "write", Mock(side_effect=full))
    held: list[tuple[int, list[str]]] = []
    with met(0, port_here(), 1):
        saves = Saves(Trained(0).optimizer, save_group(LIMIT))
        for asynchronous in (False, True) * 3:
            assert "No space left" in saved(saves, tmp_path, asynchronous).failure
            held.append(open_here())
    assert held[-1] == held[1], "what the first two have begun may stay"
