"""A rank's state as slices of global tensors, which is how checkpoints hold it.

Which slices a rank has is what the placements of its parameters say; nothing here asks for a layout. A slice
that several ranks have is written by one of them.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from braid.actors.stage.parameters import GlobalParameter, ParameterSlice
from braid.actors.stage.shares import Share


class GlobalSlices:
    """Slices of one global tensor, by their place in it."""

    def __init__(self, shape: Sequence[int]) -> None:
        self._shape = torch.Size(shape)
        self._slices: dict[torch.Size, Tensor] = {}

    def add(self, piece: ParameterSlice, local: Tensor) -> None:
        """The part of a rank's local tensor that is a slice of this one; the first of equal ones is kept."""
        self._slices.setdefault(torch.Size(piece.offsets), piece.of_local(local))

    def at(self, place: torch.Size) -> Tensor:
        return self._slices[place]

    @property
    def chunks(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=at, sizes=part.size()) for at, part in self._slices.items()]

    def items(self, name: str) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self.at(chunk.offsets)),
                    size=self._shape,
                ),
            )
            for chunk in self.chunks
        ]

    def check(self, name: str, stored: object) -> TensorStorageMetadata:
        """What a checkpoint has of the tensor; `ValueError` if that is another one."""
        size = stored.size if isinstance(stored, TensorStorageMetadata) else None
        if not isinstance(stored, TensorStorageMetadata) or size != self._shape:
            there = "nothing" if size is None else f"shape {tuple(size)}"
            raise ValueError(f"checkpoint: {name} has shape {tuple(self._shape)} here, {there} there")
        return stored


GlobalState = dict[str, GlobalSlices]
"""By name: ``parameter.layers.0.qkv.q.weight``, ``exp_avg....``, `UPDATES`."""

UPDATES = "updates"
"""The tensor of one element that tells how many updates led to the state; older checkpoints lack it."""
_COUNT = ParameterSlice(source=GlobalParameter(name=UPDATES, shape=(1,)), offsets=(0,), sizes=(1,))


def global_state(
    shares: Sequence[Share], held: Sequence[tuple[str, list[Tensor]]], updates: Tensor
) -> GlobalState:
    """Views of masters and moments (`Optimizer.named_tensors`) as slices of global tensors.

    ``updates``: one element, the number of updates.
    """
    state: GlobalState = {}
    add_state(state, shares, held, updates)
    return state


def add_state(
    state: GlobalState, shares: Sequence[Share], held: Sequence[tuple[str, list[Tensor]]], updates: Tensor
) -> None:
    """Add what one rank holds. All ranks hold the same number of updates."""
    state.setdefault(UPDATES, GlobalSlices((1,))).add(_COUNT, updates)
    for kind, tensors in held:
        for tensor, share in zip(tensors, shares, strict=True):
            for piece in (piece for piece in share.slices if 0 not in piece.sizes):
                name = f"{kind}.{piece.source.name}"
                state.setdefault(name, GlobalSlices(piece.source.shape)).add(piece, tensor)


class SavePlanner(dcp.DefaultSavePlanner):
    """Plans to write a `GlobalState`."""

    def create_local_plan(self) -> SavePlan:
        items = [item for name, slices in self.state_dict.items() for item in slices.items(name)]
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        slices: GlobalSlices = self.state_dict[index.fqn]
        assert index.offset is not None
        return slices.at(index.offset)


class LoadPlanner(dcp.DefaultLoadPlanner):
    """Plans to read a `GlobalState`, in place."""

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the state as it is: torch would copy what it does not know."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, slices in self.state_dict.items():
            stored = slices.check(name, self.metadata.state_dict_metadata.get(name))
            items += create_read_items_for_chunk_list(name, stored, slices.chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        slices: GlobalSlices = self.state_dict[index.fqn]
        assert index.offset is not None
        return slices.at(index.offset)
