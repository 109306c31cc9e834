"""A rank's side of checkpoints: PyTorch Distributed Checkpoint, keyed by global parameter name.

A checkpoint does not depend on the layout that wrote it: every tensor is saved as slices of the global
tensor, so any other layout can read its own slices. The controller makes, checks and publishes directories
(`braid.actors.controller.state.manifest`); this file reads verified files only.
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

from braid.actors.stage.files.checkpoint_files import CheckedWriter, FailedTogetherError, GuardedReader
from braid.actors.stage.files.digests import Digests
from braid.actors.stage.model.model import StageModel
from braid.actors.stage.rank.messages import Rescue, Written
from braid.actors.stage.state.bucket import buckets_of, shards_in_order
from braid.actors.stage.state.copies import Copies, HostState, split, take
from braid.actors.stage.state.global_state import UPDATES, GlobalState, LoadPlanner, SavePlanner, add_state
from braid.actors.stage.state.optimizer import Optimizer, state_slots
from braid.actors.stage.state.parameters import Place
from braid.scheduling.mesh.mesh import MeshShape
from braid.scheduling.schedule.states import ADAMW, OptimizerStates

_NO_LIMIT = timedelta(days=365)
_LOOK_SECONDS = 0.2


class SaveProgress:
    """Progress of a save, which shows which rank writes, however slowly, and which rank waits."""

    def __init__(self) -> None:
        self._bytes = 0
        self._plans = False

    def read(self) -> int | None:
        """Return the bytes written and read back; None while this rank plans. For any thread."""
        return None if self._plans else self._bytes

    def advance(self, count: int) -> None:
        self._bytes += count

    @contextlib.contextmanager
    def planning(self) -> Iterator[None]:
        """Mark a time in which this rank works without other ranks and without a disk."""
        self._plans = True
        try:
            yield
        finally:
            self._plans = False


class _Planner(SavePlanner):
    """Plans a save, and records in ``progress`` when this rank is planning."""

    def __init__(self, progress: SaveProgress) -> None:
        super().__init__()
        self._progress = progress

    def create_local_plan(self) -> Any:
        with self._progress.planning():
            return super().create_local_plan()

    def create_global_plan(self, *arguments: Any) -> Any:
        with self._progress.planning():
            return super().create_global_plan(*arguments)


def save_group(timeout: timedelta) -> dist.ProcessGroup:
    """Return a group of all ranks for `Saves`; ``timeout``: limit for ranks to meet when the group is made.

    In this group a rank waits for as long as another rank writes. The controller watches whether that other
    rank makes progress (`SaveProgress`); a time limit here would fail saves to slow disks.
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
        """``group``: a process group of all ranks that only saves use (`save_group`)."""
        self._optimizer, self._group = optimizer, group
        self._lost_touch = ""
        """Error that made the group unusable; empty while it is usable."""
        self._thread: threading.Thread | None = None
        """The thread of the background save that is under way."""
        self._written: Written | Exception | None = None
        """Result or error of the newest background save, once the save is over."""
        self._state: HostState | None = None
        """State of the newest background save; the next background save reuses its memory."""
        self._progress = SaveProgress()
        self.awaited: SaveProgress | None = None
        """Progress of the save that a call is waiting for; None if no call waits."""

    def save(self, directory: Path) -> Written:
        """Write this rank's share of the state, and wait until all ranks have written."""
        self._check_touch()
        optimizer = self._optimizer
        updates = torch.tensor([optimizer.updates], dtype=optimizer.dtype, device=optimizer.device)
        state = add_state({}, optimizer.entries(), updates)
        self._progress = SaveProgress()
        with self._waiting():
            return self._write(directory, state)

    def take(self, step: int) -> None:
        """Copy the state after ``step`` steps to host memory; `begin` writes this copy."""
        self._join()
        self._state = take(self._optimizer, step, self._state.memory if self._state is not None else None)

    def begin(self, directory: Path) -> None:
        """Begin to write the copied state; training may continue as soon as this returns."""
        self._check_touch()
        self._join()
        assert self._state is not None
        slots = state_slots(self._optimizer.shards, self._optimizer.settings.states)
        slices = add_state({}, split(self._state, slots), self._state.updates)
        self._written, self._progress = None, SaveProgress()
        self._thread = threading.Thread(
            target=self._write_beside, args=(directory, slices), name="save", daemon=True
        )
        self._thread.start()

    def finished(self, *, wait: bool, intact: Callable[[], None] = lambda: None) -> Written | None:
        """Return the result of the newest background save; None while it is under way. ``wait``: wait for its
        end. ``intact`` raises if communication was broken off, which a thread that writes to a slow disk does
        not notice."""
        if self._thread is not None:
            with self._waiting():
                while wait and self._thread.is_alive():
                    self._thread.join(_LOOK_SECONDS)
                    intact()
            if self._thread.is_alive():
                return None
            self._thread = None
        if isinstance(self._written, Exception):
            raise self._written
        return self._written

    def _join(self) -> None:
        """Wait for the thread of a background save that failed on another rank and was abandoned."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write_beside(self, directory: Path, state: GlobalState) -> None:
        try:
            self._written = self._write(directory, state)
        except Exception as error:
            # Drop references to the frames above, and with them to the group and its threads.
            error.add_note(traceback.format_exc())
            error.__traceback__ = error.__context__ = error.__cause__ = None
            self._written = error

    def _write(self, directory: Path, state: GlobalState) -> Written:
        """Write this rank's share of a state and read it back."""
        writer = CheckedWriter(directory, self._progress.advance)
        try:
            with quietly():
                planner = _Planner(self._progress)
                dcp.save(state, storage_writer=writer, planner=planner, process_group=self._group)
            return Written(files=writer.read_back())
        except (FailedTogetherError, OSError) as error:
            return Written(failure=str(error))
        except RuntimeError as error:
            self._lost_touch = str(error)
            return Written(failure=f"ranks lost touch while they saved: {error}")

    def _check_touch(self) -> None:
        if self._lost_touch:
            raise RuntimeError(f"ranks lost touch in the save before: {self._lost_touch}")

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        self.awaited = self._progress
        try:
            yield
        finally:
            self.awaited = None


def write_slices(directory: Path, state: GlobalState) -> Digests:
    """Write the slices of global tensors that this rank holds; all ranks of the default group call this."""
    writer = CheckedWriter(directory)
    with quietly():
        dcp.save(state, storage_writer=writer, planner=SavePlanner())
    return writer.read_back()


def held_slices(
    copies: Copies,
    rank: int,
    plan: Rescue,
    mesh: MeshShape,
    model_of: Callable[..., StageModel],
    states: OptimizerStates = ADAMW,
) -> GlobalState:
    """Return the slices of global tensors that ``rank`` writes for all ranks whose states it holds.

    Where lost ranks cannot be replaced, a run continues in another layout, which cannot use states of single
    ranks: the survivors write a checkpoint from these states. ``model_of`` makes the model of a place in the
    mesh, here without memory, to find the slices that the rank at this place holds.
    """
    state: GlobalState = {}
    for target, source in enumerate(plan.sources):
        if source == rank:
            place = Place.of(mesh, target)
            model = model_of(place=place, device=torch.device("meta"))
            shards = shards_in_order(buckets_of(model.parameters, place), model.parameters)
            host_state = copies.state_of(target, rank, plan.step)
            add_state(state, split(host_state, state_slots(shards, states)), host_state.updates)
    return state


def load_checkpoint(directory: Path, optimizer: Optimizer, step: int) -> None:
    """Read this rank's masters and moments in place from a checkpoint written after ``step`` steps.

    If the checkpoint does not contain the number of updates, every step counts as an update. Raise
    `ValueError` if the table of contents or the weights are refused (see `GuardedReader`).
    """
    reader = GuardedReader(directory)
    # Read here so that refusal has a clear message: torch would only log the error and look elsewhere.
    stored = reader.read_metadata().state_dict_metadata
    updates = torch.tensor([step], dtype=torch.float64)
    entries = list(optimizer.entries())
    state = add_state({}, entries, updates)
    if UPDATES not in stored:
        del state[UPDATES]
    with quietly():
        dcp.load(state, storage_reader=reader, planner=LoadPlanner())
    optimizer.restored(int(updates), entries)


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Return all tensors of a verified checkpoint, whole, in this process's memory, by name."""
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
    """Suppress torch's warnings, and turn its checkpoint errors into ordinary exceptions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except CheckpointException as error:
            raise GuardedReader.plain(error) from None
