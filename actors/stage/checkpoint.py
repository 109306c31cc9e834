"""A rank's side of checkpoints: PyTorch Distributed Checkpoint, keyed by global parameter name.

A checkpoint says nothing of the layout that wrote it: every tensor is saved as slices of the global one, so
any other layout can read its own slices. Directories are made, checked and published by the controller
(`braid.actors.controller.manifest`); nothing here is called on files that were not verified.
"""

import contextlib
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from braid.actors.stage.guarded_reader import GuardedReader
from braid.actors.stage.host_state import HostState, split
from braid.actors.stage.mesh import Mesh
from braid.actors.stage.optimizer import Optimizer
from braid.actors.stage.parameters import ParameterSlice, StageParameter

State = dict[str, Tensor]


def save_shards(directory: Path, parameters: list[StageParameter], optimizer: Optimizer, mesh: Mesh) -> None:
    """Write this rank's share of parameters and optimizer moments; every rank of the run calls this."""
    _write(directory, _global_state(parameters, optimizer.named_tensors(), mesh), None)


def _write(directory: Path, state: State, group: dist.ProcessGroup | None) -> None:
    with _quietly():
        writer = dcp.FileSystemWriter(directory, sync_files=True)
        dcp.save(state, storage_writer=writer, process_group=group)


class BackgroundSave:
    """A save that a thread writes from a state on the host, while training goes on; every rank begins one."""

    def __init__(
        self,
        directory: Path,
        state: HostState,
        parameters: list[StageParameter],
        optimizer: Optimizer,
        mesh: Mesh,
        group: dist.ProcessGroup,
    ) -> None:
        """``group``: of all ranks, for this alone."""
        self._error: Exception | None = None
        shards = _global_state(parameters, split(state, optimizer), mesh)
        self._thread = threading.Thread(
            target=self._run, args=(directory, shards, group), name="save", daemon=True
        )
        self._thread.start()

    def _run(self, directory: Path, shards: State, group: dist.ProcessGroup) -> None:
        try:
            _write(directory, shards, group)
        except Exception as error:
            self._error = error

    def finished(self, *, wait: bool) -> bool:
        """Whether it is over, well or not."""
        if wait:
            self._thread.join()
        return not self._thread.is_alive()

    def check(self) -> None:
        """Raise what went wrong."""
        if self._error is not None:
            raise self._error


def load_checkpoint(
    directory: Path, parameters: list[StageParameter], optimizer: Optimizer, mesh: Mesh, step: int
) -> None:
    """Read this rank's slices into parameters and moments, in place; ``step`` steps were done.

    `ValueError` if table of contents or weights are refused (`GuardedReader`).
    """
    reader = GuardedReader(directory)
    reader.read_metadata()  # refused here, in plain words: torch would only log it and look elsewhere
    with _quietly():
        shards = _global_state(parameters, optimizer.named_tensors(), mesh)
        dcp.load(shards, storage_reader=reader)
    optimizer.restored(step)


def read_tensors(directory: Path) -> State:
    """All tensors of a verified checkpoint, whole, in this process's memory."""
    reader = GuardedReader(directory)
    entries = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with _quietly():
        dcp.load(state, storage_reader=reader, no_dist=True)
    return state


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without torch's warnings, and with its failures as ordinary exceptions, which they are not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except CheckpointException as error:
            raise GuardedReader.plain(error) from None


def _global_state(
    parameters: list[StageParameter], held: list[tuple[str, list[Tensor]]], mesh: Mesh
) -> State:
    """Views of masters and moments (`Optimizer.named_tensors`) as slices of global tensors, by name."""
    tensor_mesh = _tensor_mesh(mesh, held[0][1][0].device) if parameters else None
    state: State = {}
    for kind, tensors in held:
        for tensor, parameter in zip(tensors, parameters, strict=True):
            for piece in parameter.slices:
                state[f"{kind}.{piece.source.name}"] = _as_global(tensor, piece, tensor_mesh)
    return state


def _as_global(local: Tensor, piece: ParameterSlice, tensor_mesh: DeviceMesh | None) -> Tensor:
    view = piece.of_local(local)
    if tensor_mesh is None:
        return view
    shape = torch.Size(piece.source.shape)
    whole = piece.length == shape[piece.dim]
    return DTensor.from_local(
        view,
        tensor_mesh,
        [Replicate() if whole else Shard(piece.dim)],
        run_check=False,
        shape=shape,
        stride=_contiguous_stride(shape),
    )


def _contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    def strides() -> Iterator[int]:
        size = 1
        for extent in reversed(shape):
            yield size
            size *= extent

    return tuple(reversed(list(strides())))


def _tensor_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh | None:
    if mesh.layout.tp == 1:
        return None
    return DeviceMesh.from_group(mesh.group("tp"), device.type)
