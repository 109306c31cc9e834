"""Exchange between the ranks along an axis, once a step, of the times at which their collectives began and
ended.
"""

from dataclasses import dataclass

import torch

from braid.actors.stage.rank.groups import Mesh
from braid.actors.stage.run.streams import Streams
from braid.scheduling.trace.arrays import IntArray


@dataclass(frozen=True)
class Peers:
    """Exchanges integers between this rank and the other ranks along an axis."""

    mesh: Mesh
    streams: Streams
    device: torch.device

    def told(self, axis: str, values: IntArray) -> IntArray:
        """Gather 64-bit integers (n, ...) of every rank along an axis; return an array (ranks,
        *values.shape).

        All ranks along the axis call this with arrays of one shape. Errors of the collective are raised.
        """
        launch = self.mesh.shared(axis).all_gather(torch.from_numpy(values).to(self.device))
        transfer = self.streams.start(self.mesh.stream(axis), launch, awaited_next=True)
        self.streams.wait(transfer)
        gathered: IntArray = transfer.take().view(-1, *values.shape).cpu().numpy()
        return gathered
