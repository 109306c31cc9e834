"""This rank's place in the mesh and its process groups: a line of ranks per mesh axis and strand.

On CUDA every strand has groups of its own, since NCCL runs what one group was given in the order of issue. On
CPU the strands share them: their exchanges then queue on one connection and the first to be issued arrives
first, where two connections would halve the rate of both. The order of issue is static and the same on all
ranks, so sharing is safe. Opposite directions do have connections of their own there, as `Line` says.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import product

import torch.distributed as dist

from braid.actors.stage.parameters import Place
from braid.kernels.collectives.primitives import Line
from braid.scheduling.mesh import MeshShape, Position
from braid.scheduling.operators import Stream
from braid.scheduling.schedule import Direction, Strand
from braid.scheduling.spec import ParallelLayout
from braid.scheduling.topology import Topology

Channel = tuple[Direction, str]
"""A kind of message between stages: the pass it belongs to, and "down" or "up" the pipeline."""


@dataclass(frozen=True)
class Mesh:
    """Lines are looked up by axis and strand; an axis of degree one has none."""

    layout: ParallelLayout
    rank: int
    place: Place
    topology: Topology
    lines: dict[tuple[str, Strand], Line]
    channels: dict[Channel, dist.ProcessGroup]
    ends: dist.ProcessGroup | None
    """This stage and the one as far from the other end, where both hold some parameters: the first and the
    last one a table that embedding and head share, or all of them two copies of the model."""

    def shared(self, axis: str) -> dist.ProcessGroup:
        """The group of the ranks that share parameters along an axis (`gradient_axes`)."""
        if axis in ("ends", "copies"):
            assert self.ends is not None
            return self.ends
        return self.group(axis)

    @property
    def position(self) -> Position:
        """This rank's coordinates."""
        return self.place.position

    def group(self, axis: str, strand: Strand = Strand.ALPHA) -> dist.ProcessGroup:
        """The group of this rank's peers along an axis, for a strand."""
        return self.lines[axis, strand].group

    def stream(self, axis: str) -> Stream:
        """What this rank's group along an axis (`shared`) exchanges goes over."""
        if axis in ("ends", "copies"):
            return self.stream_to(self.layout.pp - 1 - self.position["pp"])
        return self.topology.between(self.place.mesh.members(self.position, (axis,)))

    def peer(self, stage: int) -> int:
        """The rank at this rank's place on another pipeline stage."""
        return self.layout.rank_at({**self.position, "pp": stage})

    def stream_to(self, stage: int) -> Stream:
        """What messages to and from another pipeline stage go over."""
        return self.topology.between((self.rank, self.peer(stage)))


def make_world(backend: str, store: dist.Store, rank: int, ranks: int, timeout: timedelta) -> None:
    """Make the group of all ranks; after a failure it may be called again, with another store."""
    # Groups are named by a count. torch resets it when they are destroyed, but not where making the first one
    # failed: this rank and a new one would look for each other under different names, in every attempt.
    dist.distributed_c10d._world.group_count = 0
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)


def build_mesh(
    layout: ParallelLayout,
    rank: int,
    *,
    strands: Iterable[Strand] = (Strand.ALPHA,),
    tied_ends: bool = False,
    timeout: timedelta,
    shape: MeshShape | None = None,
    hosts: Sequence[str] = (),
) -> Mesh:
    """Create all groups. Making a group is a collective call: every rank passes the same arguments.

    ``shape``: factors other than those of the layout. ``hosts``: of all ranks; by default they share one.
    """
    place = Place.of(shape or layout.mesh, rank)
    lines: dict[tuple[str, Strand], Line] = {}
    gloo = dist.is_initialized() and dist.get_backend() == "gloo"
    for axis in (name for name, size in place.mesh.factors if size > 1):
        own: Line | None = None
        for strand in strands:
            if own is None or not gloo:
                group = _line_group(place, axis, timeout)
                upward = _line_group(place, axis, timeout) if gloo and axis == "tp" else None
                own = Line(group, upward)
            lines[axis, strand] = own
    channels: dict[Channel, dist.ProcessGroup] = {}
    if layout.pp > 1:
        for direction, way in product(Direction, ("down", "up")):
            channels[direction, way] = _line_group(place, "pp", timeout)
    ends = None
    if layout.pp > 1 and (tied_ends or layout.copies > 1):
        stages = range(layout.pp // 2 if layout.copies > 1 else 1)
        pairs = [[line[n], line[-1 - n]] for line in place.mesh.groups(("pp",)) for n in stages]
        ends = _my_group(pairs, rank, timeout)
    topology = Topology(place.mesh, hosts)
    return Mesh(layout, rank, place, topology, lines, channels, ends)


def _line_group(place: Place, axis: str, timeout: timedelta) -> dist.ProcessGroup:
    """The group along ``axis`` that a rank is in."""
    group = _my_group(place.mesh.groups((axis,)), place.mesh.rank_at(place.position), timeout)
    assert group is not None
    return group


def _my_group(lines: list[list[int]], rank: int, timeout: timedelta) -> dist.ProcessGroup | None:
    """Create a group for each list of ranks; returns the one this rank is in, if any."""
    mine = None
    for ranks in lines:
        group = dist.new_group(ranks, timeout=timeout)
        if rank in ranks:
            mine = group
    return mine
