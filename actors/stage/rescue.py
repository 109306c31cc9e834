"""What survivors of lost ranks hold, in the form of a checkpoint.

Where lost ranks cannot be replaced, a run goes on in another layout, for which states of single ranks are of
no use. The survivors write them, and those of lost ranks whose copies they keep (`copies.py`),
as slices of global tensors like any other checkpoint.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from braid.actors.stage.bucket import buckets_of, shards_in_order
from braid.actors.stage.checked_files import CheckedWriter
from braid.actors.stage.checkpoint import quietly
from braid.actors.stage.copies import Copies
from braid.actors.stage.digests import Digests
from braid.actors.stage.global_state import GlobalState, SavePlanner, add_state
from braid.actors.stage.host_state import split
from braid.actors.stage.messages import Rescue
from braid.actors.stage.model import StageModel
from braid.actors.stage.parameters import Place
from braid.scheduling.mesh import MeshShape


def write_slices(directory: Path, state: GlobalState) -> Digests:
    """Write what the ranks of the world have of global tensors; all of them call this."""
    writer = CheckedWriter(directory)
    with quietly():
        dcp.save(state, storage_writer=writer, planner=SavePlanner())
    return writer.read_back()


def held_slices(
    copies: Copies, rank: int, plan: Rescue, mesh: MeshShape, model_of: Callable[..., StageModel]
) -> GlobalState:
    """What ``rank`` is to write of all ranks' states: slices of global tensors.

    ``model_of`` makes the model of a place in the mesh, here without memory: which slices its rank holds.
    """
    found: GlobalState = {}
    for target, source in enumerate(plan.sources):
        if source == rank:
            place = Place.of(mesh, target)
            model = model_of(place=place, device=torch.device("meta"))
            shards = shards_in_order(buckets_of(model.parameters, place), model.parameters)
            state = copies.state_of(target, rank, plan.step)
            add_state(found, shards, split(state, [shard.shape for shard in shards]), state.updates)
    return found
