"""Where ranks are: which groups of a mesh stay inside a node, and which go between nodes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.mesh.mesh import MeshShape, sub_groups
from braid.scheduling.mesh.partition import PARTITIONED, Factor


@dataclass(frozen=True)
class Topology:
    """The host of every rank, by rank; without hosts, all ranks are on one."""

    mesh: MeshShape
    hosts: Sequence[str] = ()

    def between(self, ranks: Iterable[int]) -> Stream:
        """The stream of what these ranks exchange."""
        inside = not self.hosts or len({self.hosts[rank] for rank in ranks}) == 1
        return Stream.INTRA if inside else Stream.INTER

    def groups(self, axis: str) -> list[list[int]]:
        """The groups of ranks along an axis."""
        return self.mesh.groups(self.mesh.factors_of(axis))

    def spread(self, axis: str) -> list[list[int]]:
        """The groups along an axis that lie over several hosts."""
        return [ranks for ranks in self.groups(axis) if self.between(ranks) is Stream.INTER]

    def node_mesh(self, axis: str) -> tuple[int, int] | None:
        """Nodes x ranks of each, of every group along an axis; None where they have not several of both."""
        found = set()
        for group in self.groups(axis) if self.hosts else ():
            runs = [len(list(same)) for _, same in groupby(self.hosts[rank] for rank in group)]
            several = len(set(runs)) == 1 and len(runs) > 1 and runs[0] > 1
            found.add((len(runs), runs[0]) if several else None)
        return found.pop() if len(found) == 1 else None

    def streams(self) -> Mapping[str, Stream]:
        """The stream of every axis, as costs are planned with: where one group goes between nodes, all do."""
        found = {axis: Stream.INTER if self.spread(axis) else Stream.INTRA for axis in self.mesh.axes}
        for factor in self.factors():
            found[str(factor)] = Stream.INTRA if factor.inside else Stream.INTER
        return found

    def factors(self) -> list[Factor]:
        """Dims of nodes x ranks of each, of the axes whose collectives may be partitioned over these."""
        meshes = {axis: self.node_mesh(axis) for axis in PARTITIONED if axis in self.mesh.axes}
        return [Factor(axis, mesh, dim) for axis, mesh in meshes.items() if mesh for dim in range(2)]

    def factor_groups(self, factor: Factor) -> list[list[int]]:
        """The groups of ranks along a factor."""
        return [
            [ranks[place] for place in places]
            for ranks in self.groups(factor.axis)
            for places in sub_groups(factor.mesh, factor.dim)
        ]

    def warnings(self) -> list[str]:
        """What is likely to be slower than it needs to be: tensor parallelism between nodes."""
        groups = self.spread("tp") if self.hosts and "tp" in self.mesh.axes else []
        if not groups:
            return []
        first = ", ".join(f"rank {rank} on {self.hosts[rank]}" for rank in groups[0])
        return [
            f"{len(groups)} of {len(self.groups('tp'))} tensor-parallel groups lie over several "
            f"nodes ({first}): every layer's collectives go between nodes; lower parallel.tp to what one "
            f"node holds to keep them inside"
        ]
