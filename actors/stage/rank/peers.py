"""What ranks along an axis tell each other once a step: when each issued its collectives, when they ended."""

from dataclasses import dataclass

import torch

from braid.actors.stage.rank.groups import Mesh
from braid.actors.stage.run.streams import Streams
from braid.scheduling.trace.arrays import IntArray


@dataclass(frozen=True)
class Peers:
    """The other ranks, as one rank reaches them."""

    mesh: Mesh
    streams: Streams
    device: torch.device

    def told(self, axis: str, own: IntArray) -> IntArray:
        """What every rank along an axis tells, (ranks, *own.shape); own: (n, ...) of 64-bit integers.

        All ranks along the axis call this with arrays of one shape. Raises what a collective raises.
        """
        launch = self.mesh.shared(axis).all_gather(torch.from_numpy(own).to(self.device))
        transfer = self.streams.start(self.mesh.stream(axis), launch, awaited_next=True)
        self.streams.wait(transfer)
        found: IntArray = transfer.take().view(-1, *own.shape).cpu().numpy()
        return found
