"""Where ranks are: which groups of a mesh stay inside a node, and which go between nodes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from braid.scheduling.cluster import Level
from braid.scheduling.mesh import MeshShape
from braid.scheduling.operators import Stream

STREAM_OF: Final = {Level.INTRA: Stream.INTRA, Level.INTER: Stream.INTER}
"""Of what a group exchanges on a cluster that is modelled."""


@dataclass(frozen=True)
class Topology:
    """The host of every rank, by rank; without hosts, all ranks are on one."""

    mesh: MeshShape
    hosts: Sequence[str] = ()

    def between(self, ranks: Iterable[int]) -> Stream:
        """The stream of what these ranks exchange."""
        inside = not self.hosts or len({self.hosts[rank] for rank in ranks}) == 1
        return Stream.INTRA if inside else Stream.INTER

    def spread(self, axis: str) -> list[list[int]]:
        """The groups along an axis that lie over several hosts."""
        return [ranks for ranks in self.mesh.groups((axis,)) if self.between(ranks) is Stream.INTER]

    def streams(self) -> Mapping[str, Stream]:
        """The stream of every axis, as costs are planned with: where one group goes between nodes, all do."""
        busy = [axis for axis, size in self.mesh.factors if size > 1]
        return {axis: Stream.INTER if self.spread(axis) else Stream.INTRA for axis in busy}

    def warnings(self) -> list[str]:
        """What is likely to be slower than it needs to be: tensor parallelism between nodes."""
        groups = self.spread("tp") if self.hosts and "tp" in self.mesh.sizes else []
        if not groups:
            return []
        first = ", ".join(f"rank {rank} on {self.hosts[rank]}" for rank in groups[0])
        return [
            f"{len(groups)} of {len(self.mesh.groups(('tp',)))} tensor-parallel groups lie over several "
            f"nodes ({first}): every layer's collectives go between nodes; lower parallel.tp to what one "
            f"node holds to keep them inside"
        ]
