"""A rank's side of checkpoints: PyTorch Distributed Checkpoint, keyed by global parameter name.

A checkpoint says nothing of the layout that wrote it: every tensor is saved as slices of the global one, so
any other layout can read its own slices. Directories are made, checked and published by the controller
(`braid.actors.controller.manifest`); nothing here is called on files that were not verified.
"""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from braid.actors.stage.guarded_reader import GuardedReader
from braid.actors.stage.mesh import Mesh
from braid.actors.stage.optimizer import Optimizer
from braid.actors.stage.parameters import ParameterSlice, StageParameter

State = dict[str, Tensor]


def save_shards(directory: Path, parameters: list[StageParameter], optimizer: Optimizer, mesh: Mesh) -> None:
    """Write this rank's share of parameters and optimizer moments; every rank of the run calls this."""
    with _quietly():
        dcp.save(
            _global_state(parameters, optimizer, mesh),
            storage_writer=dcp.FileSystemWriter(directory, sync_files=True),
        )


def load_checkpoint(
    directory: Path, parameters: list[StageParameter], optimizer: Optimizer, mesh: Mesh, step: int
) -> None:
    """Read this rank's slices into parameters and moments, in place; ``step`` steps were done.

    `ValueError` if table of contents or weights are refused (`GuardedReader`).
    """
    reader = GuardedReader(directory)
    reader.read_metadata()  # refused here, in plain words: torch would only log it and look elsewhere
    with _quietly():
        dcp.load(_global_state(parameters, optimizer, mesh), storage_reader=reader)
    optimizer.restored(step)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without torch's warnings, and with its failures as ordinary exceptions, which they are not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except CheckpointException as error:
            raise GuardedReader.plain(error) from None


def _global_state(parameters: list[StageParameter], optimizer: Optimizer, mesh: Mesh) -> State:
    """Views of masters and moments as slices of global tensors, by name."""
    tensor_mesh = _tensor_mesh(mesh, parameters[0].tensor.device) if parameters else None
    state: State = {}
    for kind, tensors in optimizer.named_tensors():
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
