"""A rank's state as slices of global tensors, the form that checkpoints store.

The placements of a rank's parameters determine its slices; this module needs no layout. A slice that several
ranks hold is written by one of them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from braid.actors.stage.state.parameters import GlobalParameter, ParameterSlice
from braid.actors.stage.state.shards import Shard


@dataclass(frozen=True)
class GlobalSlices:
    """Slices of one global tensor of shape ``shape``, by their offsets in this tensor."""

    shape: tuple[int, ...]
    by_offsets: dict[torch.Size, Tensor] = field(default_factory=dict)

    def add(self, piece: ParameterSlice, local: Tensor) -> None:
        """Add slice ``piece``, a part of a rank's local tensor, unless it is present."""
        self.by_offsets.setdefault(torch.Size(piece.offsets), piece.of_local(local))

    def chunks(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=at, sizes=part.size()) for at, part in self.by_offsets.items()]

    def check(self, name: str, stored: object) -> TensorStorageMetadata:
        """Return the checkpoint's entry; raise `ValueError` if it is missing or of another shape."""
        size = stored.size if isinstance(stored, TensorStorageMetadata) else None
        if not isinstance(stored, TensorStorageMetadata) or size != torch.Size(self.shape):
            stored_shape = "nothing" if size is None else f"shape {tuple(size)}"
            raise ValueError(f"checkpoint: {name} has shape {tuple(self.shape)} here, {stored_shape} there")
        return stored


class StateEntry(NamedTuple):
    """One state of one shard: the master weights, or what the optimizer keeps beside them."""

    kind: str
    """One of `braid.scheduling.schedule.states.STATE_KINDS`."""
    shard: Shard
    tensor: Tensor


GlobalState = dict[str, GlobalSlices]
"""Slices by the names of their tensors: ``parameter.layers.0.qkv.q.weight``, ``exp_avg....``, `UPDATES`."""

UPDATES = "updates"
"""Name of the tensor of one element that counts the updates behind the state; older checkpoints lack it."""
_COUNT = ParameterSlice(source=GlobalParameter(name=UPDATES, shape=(1,)), offsets=(0,), sizes=(1,))


def add_state(state: GlobalState, entries: Iterable[StateEntry], updates: Tensor) -> GlobalState:
    """Add views of a rank's masters and states (`Optimizer.entries`) to ``state``; return ``state``.

    ``updates``: tensor of one element, the number of updates, which is equal on all ranks.
    """
    state.setdefault(UPDATES, GlobalSlices((1,))).add(_COUNT, updates)
    for kind, shard, tensor in entries:
        for piece in (piece for piece in shard.slices if 0 not in piece.sizes):
            name = f"{kind}.{piece.source.name}"
            state.setdefault(name, GlobalSlices(piece.source.shape)).add(piece, tensor)
    return state


def _slice(state: GlobalState, index: MetadataIndex) -> Tensor:
    assert index.offset is not None
    return state[index.fqn].by_offsets[index.offset]


class SavePlanner(dcp.DefaultSavePlanner):
    """Plans how to write a `GlobalState`."""

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(slices.by_offsets[chunk.offsets]),
                    size=torch.Size(slices.shape),
                ),
            )
            for name, slices in self.state_dict.items()
            for chunk in slices.chunks()
        ]
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return _slice(self.state_dict, index)


class LoadPlanner(dcp.DefaultLoadPlanner):
    """Plans how to read into the tensors of a `GlobalState`, in place."""

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Keep the given state itself: torch's planner would copy entries of unknown types."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, slices in self.state_dict.items():
            stored = slices.check(name, self.metadata.state_dict_metadata.get(name))
            items += create_read_items_for_chunk_list(name, stored, slices.chunks())
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return _slice(self.state_dict, index)
