"""Determines from the hosts of ranks which groups of a mesh stay inside a node, and which span several
nodes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.mesh.mesh import MeshShape, sub_groups
from braid.scheduling.mesh.partition import PARTITIONED, Factor


@dataclass(frozen=True)
class Topology:
    """A mesh of ranks, and the host of each rank (``hosts[rank]``); if empty, all ranks are on one host."""

    mesh: MeshShape
    hosts: Sequence[str] = ()

    def between(self, ranks: Iterable[int]) -> Stream:
        """Return the stream of transfers among ``ranks``: INTRA if all of them are on one host, else
        INTER."""
        inside = not self.hosts or len({self.hosts[rank] for rank in ranks}) == 1
        return Stream.INTRA if inside else Stream.INTER

    def groups(self, axis: str) -> list[list[int]]:
        """Return the lists of ranks of all groups along an axis."""
        return self.mesh.groups(self.mesh.factors_of(axis))

    def spread(self, axis: str) -> list[list[int]]:
        """Return those groups of ranks along an axis that span several hosts."""
        return [ranks for ranks in self.groups(axis) if self.between(ranks) is Stream.INTER]

    def node_mesh(self, axis: str) -> tuple[int, int] | None:
        """Return (nodes, ranks per node) of the groups along an axis; None if groups differ, or if one of the
        two numbers is 1."""
        meshes = set()
        for group in self.groups(axis) if self.hosts else ():
            runs = [len(list(same)) for _, same in groupby(self.hosts[rank] for rank in group)]
            several = len(set(runs)) == 1 and len(runs) > 1 and runs[0] > 1
            meshes.add((len(runs), runs[0]) if several else None)
        return meshes.pop() if len(meshes) == 1 else None

    def streams(self) -> Mapping[str, Stream]:
        """Return {name of an axis or factor: stream of its transfers}.

        An axis has the stream INTER if any of its groups spans several hosts.
        """
        streams = {axis: Stream.INTER if self.spread(axis) else Stream.INTRA for axis in self.mesh.axes}
        for factor in self.factors():
            streams[factor] = Stream.INTRA if factor.inside else Stream.INTER
        return streams

    def factors(self) -> list[Factor]:
        """Return the factors over which partitions may split collectives: for each suitable axis, one over
        nodes and one over the ranks of a node."""
        meshes = {axis: self.node_mesh(axis) for axis in PARTITIONED if axis in self.mesh.axes}
        return [Factor(axis, mesh, dim) for axis, mesh in meshes.items() if mesh for dim in range(2)]

    def factor_groups(self, factor: Factor) -> list[list[int]]:
        """Return the lists of ranks of all groups along a factor of an axis."""
        return [
            [ranks[index] for index in indices]
            for ranks in self.groups(factor.axis)
            for indices in sub_groups(factor.mesh, factor.dim)
        ]

    def warnings(self) -> list[str]:
        """Return warning texts if the layout is slow because tensor-parallel groups span nodes; else an empty
        list."""
        groups = self.spread("tp") if self.hosts and "tp" in self.mesh.axes else []
        if not groups:
            return []
        first = ", ".join(f"rank {rank} on {self.hosts[rank]}" for rank in groups[0])
        return [
            f"{len(groups)} of {len(self.groups('tp'))} tensor-parallel groups lie over several "
            f"nodes ({first}): every layer's collectives go between nodes; lower parallel.tp to what one "
            f"node holds to keep them inside"
        ]
