"""What survivors of lost ranks hold, in the form of a checkpoint.

Where lost ranks cannot be replaced, a run goes on in another layout, for which states of single ranks are of
no use. The survivors write them, and those of lost ranks whose copies they keep (`copies.py`),
as slices of global tensors like any other checkpoint.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from braid.actors.stage.checked_files import CheckedWriter
from braid.actors.stage.checkpoint import quietly
from braid.actors.stage.copies import Copies
from braid.actors.stage.digests import Digests
from braid.actors.stage.host_state import split
from braid.actors.stage.messages import Rescue
from braid.actors.stage.model import StageModel
from braid.actors.stage.parameters import ParameterSlice
from braid.scheduling.spec import ParallelLayout


class GlobalSlices:
    """Slices of one global tensor, by their place in it."""

    def __init__(self, shape: Sequence[int]) -> None:
        self._shape = torch.Size(shape)
        self._slices: dict[torch.Size, Tensor] = {}

    def add(self, piece: ParameterSlice, local: Tensor) -> None:
        """The part of a rank's local tensor that is a slice of this one; the first of equal ones is kept."""
        place = torch.Size(piece.offset if dim == piece.dim else 0 for dim in range(len(self._shape)))
        self._slices.setdefault(place, piece.of_local(local))

    def at(self, place: torch.Size) -> Tensor:
        """A slice."""
        return self._slices[place]

    def items(self, name: str) -> list[WriteItem]:
        """What is to be written, under a name."""
        return [
            WriteItem(
                index=MetadataIndex(name, place),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=place, sizes=part.size()),
                    properties=TensorProperties.create_from_tensor(part),
                    size=self._shape,
                ),
            )
            for place, part in self._slices.items()
        ]


class _Planner(dcp.DefaultSavePlanner):
    """Plans to write `GlobalSlices`: of a DTensor every rank has one slice, a survivor has several."""

    def create_local_plan(self) -> SavePlan:
        """What this rank has."""
        items = [item for name, slices in self.state_dict.items() for item in slices.items(name)]
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The slice that is written next."""
        slices: GlobalSlices = self.state_dict[index.fqn]
        assert index.offset is not None
        return slices.at(index.offset)


def write_slices(directory: Path, slices: Mapping[str, GlobalSlices]) -> Digests:
    """Write what the ranks of the world have of global tensors; all of them call this."""
    writer = CheckedWriter(directory)
    with quietly():
        dcp.save(dict(slices), storage_writer=writer, planner=_Planner())
    return writer.read_back()


def held_slices(
    copies: Copies, rank: int, plan: Rescue, layout: ParallelLayout, model_of: Callable[..., StageModel]
) -> dict[str, GlobalSlices]:
    """What ``rank`` is to write of all ranks' states: slices of global tensors, by name.

    ``model_of`` makes the model of a place in the mesh, here without memory: which slices its rank holds.
    """
    found: dict[str, GlobalSlices] = {}
    for target, source in enumerate(plan.sources):
        position = layout.coordinate(target)
        if source != rank or position["dp"]:  # another survivor's, or a replica
            continue
        parameters = model_of(position=position, device=torch.device("meta")).parameters
        state = copies.state_of(target, rank, plan.step)
        for kind, tensors in split(state, [parameter.tensor.shape for parameter in parameters]):
            for tensor, parameter in zip(tensors, parameters, strict=True):
                for piece in (piece for piece in parameter.slices if piece.length):
                    name = f"{kind}.{piece.source.name}"
                    found.setdefault(name, GlobalSlices(piece.source.shape)).add(piece, tensor)
    return found
