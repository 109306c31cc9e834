"""A rank's side of checkpoints: PyTorch Distributed Checkpoint, keyed by global parameter name.

A checkpoint says nothing of the layout that wrote it: every tensor is saved as slices of the global one, so
any other layout can read its own slices. Directories are made, checked and published by the controller
(`braid.actors.controller.manifest`); nothing here is called on files that were not verified.
"""

import contextlib
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from braid.actors.stage.checked_files import CheckedWriter
from braid.actors.stage.global_state import UPDATES, GlobalState, LoadPlanner, SavePlanner, global_state
from braid.actors.stage.guarded_reader import FailedTogetherError, GuardedReader
from braid.actors.stage.host_state import HostState, split, take
from braid.actors.stage.messages import Written
from braid.actors.stage.optimizer import Optimizer


class SaveProgress:
    """How a save gets on, to tell a rank that writes, however slowly, from one that waits for others."""

    def __init__(self) -> None:
        self._bytes = 0
        self._plans = False

    def read(self) -> int | None:
        """Bytes written and read back so far; None while this rank plans. For another thread."""
        return None if self._plans else self._bytes

    def advance(self, count: int) -> None:
        self._bytes += count

    @contextlib.contextmanager
    def planning(self) -> Iterator[None]:
        """Something that needs neither another rank nor a disk."""
        self._plans = True
        try:
            yield
        finally:
            self._plans = False


class _Planner(SavePlanner):
    """Tells when this rank plans."""

    def __init__(self, progress: SaveProgress) -> None:
        super().__init__()
        self._progress = progress

    def create_local_plan(self) -> Any:
        with self._progress.planning():
            return super().create_local_plan()

    def create_global_plan(self, *arguments: Any) -> Any:
        with self._progress.planning():
            return super().create_global_plan(*arguments)


def _write(directory: Path, state: GlobalState, group: dist.ProcessGroup, progress: SaveProgress) -> Written:
    """Write this rank's share and read it back; raises what is not the files' fault, but the ranks'."""
    writer = CheckedWriter(directory, progress.advance)
    try:
        with quietly():
            dcp.save(state, storage_writer=writer, planner=_Planner(progress), process_group=group)
        return Written(files=writer.read_back())
    except (FailedTogetherError, OSError) as error:
        return Written(failure=str(error))


class _BackgroundSave:
    """A save that a thread writes while training goes on; every rank begins one."""

    def __init__(self, directory: Path, shards: GlobalState, group: dist.ProcessGroup) -> None:
        self.progress = SaveProgress()
        self._written: Written | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(
            target=self._run, args=(directory, shards, group), name="save", daemon=True
        )
        self._thread.start()

    def _run(self, directory: Path, shards: GlobalState, group: dist.ProcessGroup) -> None:
        try:
            self._written = _write(directory, shards, group, self.progress)
        except Exception as error:
            # Without what holds on to the frames above, and with them to the group and its threads.
            error.add_note(traceback.format_exc())
            error.__traceback__ = error.__context__ = error.__cause__ = None
            self._error = error

    def finished(self, *, wait: bool, intact: Callable[[], None] = lambda: None) -> bool:
        """Whether it is over, well or not. ``intact`` raises once nobody waits for it any more."""
        while wait and self._thread.is_alive():
            self._thread.join(_LOOK_SECONDS)
            intact()
        return not self._thread.is_alive()

    def written(self) -> Written:
        """What became of it; raises what went wrong with the ranks."""
        if self._error is not None:
            raise self._error
        assert self._written is not None
        return self._written


_NO_LIMIT = timedelta(days=365)
_LOOK_SECONDS = 0.2


def save_group(timeout: timedelta) -> dist.ProcessGroup:
    """A group of all ranks for `Saves`; ``timeout``: for ranks to meet.

    In this group a rank waits for as long as another rank writes. The controller watches whether that rank
    makes progress (`SaveProgress`); a time limit here would fail saves to slow disks.
    """
    group = dist.new_group(backend="gloo", timeout=timeout)
    dist.distributed_c10d._set_pg_timeout(_NO_LIMIT, group)
    return group


class Saves:
    """The saves of one rank, at most one at a time; every rank of the run makes the same calls.

    If communication breaks during a save, the save has failed, but no rank counts as failed: the process and
    the pulse of a rank show whether it is lost. The group is unusable afterwards, so the next save raises.
    """

    def __init__(self, optimizer: Optimizer, group: dist.ProcessGroup) -> None:
        """``group``: of all ranks, for saves alone (`save_group`)."""
        self._optimizer, self._group = optimizer, group
        self._lost_touch = ""
        """Why the group is unusable; empty while it is usable."""
        self._under_way: _BackgroundSave | None = None
        self._written: Written | None = None
        """What became of the newest background save, once it is over."""
        self._state: HostState | None = None
        """Of the background save that was begun last; the next one takes its memory."""
        self.awaited: SaveProgress | None = None
        """Of the save that a call waits for at present."""

    def save(self, directory: Path) -> Written:
        """Write this rank's share of parameters and optimizer moments."""
        self._in_touch()
        with self._waiting(SaveProgress()) as progress:
            updates = self._optimizer.masters[0].new_tensor([self._optimizer.updates])
            shards = global_state(self._optimizer.shares, self._optimizer.named_tensors(), updates)
            return self._outcome(lambda: _write(directory, shards, self._group, progress))

    def take(self, step: int) -> None:
        """Copy the state after ``step`` steps to the host, for `begin`."""
        if self._under_way is not None:  # one that failed on another rank, and was given up
            self._under_way.finished(wait=True)
        self._state = take(self._optimizer, step, self._state.memory if self._state is not None else None)

    def begin(self, directory: Path) -> None:
        """Begin to write what was taken; training may go on as soon as this returns."""
        self._in_touch()
        if self._under_way is not None:
            self._under_way.finished(wait=True)
        assert self._state is not None
        shares = self._optimizer.shares
        taken = split(self._state, [share.shape for share in shares])
        shards = global_state(shares, taken, self._state.updates)
        self._written = None
        self._under_way = _BackgroundSave(directory, shards, self._group)

    def finished(self, *, wait: bool, intact: Callable[[], None] = lambda: None) -> Written | None:
        """What became of the save that was begun; None while it is under way. ``intact`` raises once
        communication was broken off: a thread that writes to a slow disk does not notice that."""
        if self._under_way is None:  # said so before, when other ranks were not done
            return self._written
        with self._waiting(self._under_way.progress):
            if not self._under_way.finished(wait=wait, intact=intact):
                return None
        over, self._under_way = self._under_way, None
        self._written = self._outcome(over.written)
        return self._written

    def _outcome(self, written: Callable[[], Written]) -> Written:
        try:
            return written()
        except RuntimeError as error:
            self._lost_touch = str(error)
            return Written(failure=f"ranks lost touch while they saved: {error}")

    def _in_touch(self) -> None:
        if self._lost_touch:
            raise RuntimeError(f"ranks lost touch in the save before: {self._lost_touch}")

    @contextlib.contextmanager
    def _waiting(self, progress: SaveProgress) -> Iterator[SaveProgress]:
        self.awaited = progress
        try:
            yield progress
        finally:
            self.awaited = None


def load_checkpoint(directory: Path, optimizer: Optimizer, step: int) -> None:
    """Read what this rank updates into masters and moments, in place; ``step`` steps were done.

    If the checkpoint does not contain the number of updates, every step counts as an update.

    `ValueError` if table of contents or weights are refused (`GuardedReader`).
    """
    reader = GuardedReader(directory)
    # Refused here, in plain words: torch would only log it and look elsewhere.
    stored = reader.read_metadata().state_dict_metadata
    updates = torch.tensor([step], dtype=torch.float64)
    shards = global_state(optimizer.shares, optimizer.named_tensors(), updates)
    if UPDATES not in stored:
        del shards[UPDATES]
    with quietly():
        dcp.load(shards, storage_reader=reader, planner=LoadPlanner())
    optimizer.restored(int(updates))


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of a verified checkpoint, whole, in this process's memory."""
    reader = GuardedReader(directory)
    entries = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with quietly():
        dcp.load(state, storage_reader=reader, no_dist=True)
    return state


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without torch's warnings, and with its failures as ordinary exceptions, which they are not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except CheckpointException as error:
            raise GuardedReader.plain(error) from None
