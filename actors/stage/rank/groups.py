"""A rank's position in the mesh and its process groups: one "line" of ranks for each mesh axis.

Both strands use the same lines, since the order of issue is static and the same on all ranks. On a CPU two
connections would halve each other's rate; on GPUs two communicators on one side stream gain nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch.distributed as dist

from braid.actors.stage.state.parameters import Place
from braid.kernels.collectives.communicator import Communicator, Pairs, TorchGroup
from braid.kernels.collectives.messages import MessageLine
from braid.kernels.collectives.primitives import Channel, Line
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.mesh.mesh import Position, is_tensor
from braid.scheduling.mesh.partition import Factor, whole_axis
from braid.scheduling.mesh.topology import Topology
from braid.scheduling.schedule.operations import Direction

if TYPE_CHECKING:  # tests of GPUs run where pydantic is not installed
    from braid.actors.config.machines import NcclConfig, NcclLimits

LAYER_AXES: Final = ("tp", "cp", "ep")
"""Axes over which layers communicate."""

MessageKind = tuple[Direction, str]
"""Kind of messages between stages: the direction of their pass, and "down" or "up" the pipeline."""


@dataclass(frozen=True)
class Mesh:
    """The process groups ("lines") of this rank, by mesh axis or by `Factor` of an axis; axes of degree 1
    have no line. Ranks of a line are numbered by their position on the axis. "ends" is the line of first and
    last stage, where both hold the table that embedding and head share."""

    layout: ParallelLayout
    rank: int
    place: Place
    topology: Topology
    lines: dict[str, Line]
    channels: dict[MessageKind, Channel]
    groups: "Groups | None" = None

    @property
    def position(self) -> Position:
        """The coordinates of this rank, by mesh axis."""
        return self.place.position

    def line(self, axis: str) -> Line:
        """Return the line of an axis or factor; raise `ValueError` if the ranks' placement on nodes gives no
        such factor."""
        if axis not in self.lines:
            factors = ", ".join(name for name in self.lines if "." in name) or "none"
            raise ValueError(
                f"a partition divides ranks into {axis}, but their nodes give {factors}: use a mesh of "
                f"nodes x ranks of each, or plan anew"
            )
        return self.lines[axis]

    @property
    def neighbours(self) -> Channel:
        """The channel between neighbouring pipeline stages that forward passes use, for measurements."""
        down, up = (self.channels[Direction.FORWARD, way] for way in ("down", "up"))
        if isinstance(down, MessageLine) and isinstance(up, MessageLine):
            return MessageLine(up.group, down.group)
        return up

    def stream(self, axis: str) -> Stream:
        """Return the stream that carries the transfers along an axis (as for `line`)."""
        if axis == "ends":
            return self.stream_to(self.layout.pp - 1 - self.position["pp"])
        if isinstance(axis, Factor):
            return Stream.INTRA if axis.inside else Stream.INTER
        return self.topology.between(self.place.mesh.members(self.position, self.place.mesh.factors_of(axis)))

    def warm_up(self) -> None:
        """Use every line once, in the same order on all ranks.

        NCCL makes communicators and connections at their first use, and the host waits there for the peer;
        during a step the peer may be waiting for something else.
        """
        used: list[Channel] = [*self.lines.values(), *self.channels.values()]
        for channel in {id(channel): channel for channel in used}.values():
            channel.warm_up()

    def peer(self, stage: int) -> int:
        """Return the rank at this rank's position on another pipeline stage."""
        return self.layout.rank_at({**self.position, "pp": stage})

    def stream_to(self, stage: int) -> Stream:
        """Return the stream of messages to and from another pipeline stage."""
        return self.topology.between((self.rank, self.peer(stage)))


def make_world(backend: str, store: dist.Store, rank: int, ranks: int, timeout: timedelta) -> None:
    """Make the group of all ranks; after a failure this may be called again, with another store.

    The group is not bound to a device: torch would then create its communicator at once and split each new
    group off this one, a collective call of all ranks, members or not. `Mesh.warm_up` creates communicators.
    """
    # torch names groups by a count. It resets the count when groups are destroyed, but not if making the
    # first group failed: this rank and a new rank would look for each other under different names for ever.
    dist.distributed_c10d._world.group_count = 0
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)


class Groups(Protocol):
    """Makes groups of ranks, and exchanges values between ranks before training.

    All calls are collective: every rank passes the same lists, in the same order.
    """

    def line(self, axis: str, lines: Sequence[Sequence[int]]) -> Line | None:
        """Make a line for each list of ranks along an axis; return the line of this rank."""

    def channel(self, lines: Sequence[Sequence[int]]) -> Channel:
        """Make a channel for each list of ranks (pipeline stages in order); return this rank's channel."""

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order."""


def build_mesh(
    layout: ParallelLayout,
    rank: int,
    *,
    tied_ends: bool = False,
    timeout: timedelta,
    hosts: Sequence[str] = (),
    groups: Groups | None = None,
) -> Mesh:
    """Create all process groups. Making a group is a collective call: every rank passes the same arguments.

    ``hosts``: host of each rank; empty if they share one host. ``groups``: torch's process groups by default.
    """
    place = Place.of(layout.mesh, rank)
    groups = groups or TorchGroups(rank, timeout)

    lines: dict[str, Line] = {}
    for axis, factors in place.mesh.axes.items():
        line = groups.line(axis, place.mesh.groups(factors))
        assert line is not None
        lines[axis] = line
    topology = Topology(place.mesh, hosts)
    for factor in topology.factors():
        line = groups.line(factor, topology.factor_groups(factor))
        assert line is not None
        lines[factor] = line
    channels: dict[MessageKind, Channel] = {}
    if layout.pp > 1:
        for direction, way in product(Direction, ("down", "up")):
            channels[direction, way] = groups.channel(place.mesh.groups(("pp",)))
    if layout.pp > 1 and tied_ends:
        ends = groups.line("ends", [[line[0], line[-1]] for line in place.mesh.groups(("pp",))])
        if ends is not None:
            lines["ends"] = ends
    return Mesh(layout, rank, place, topology, lines, channels, groups)


@dataclass(frozen=True)
class TorchGroups:
    """Makes torch's process groups: NCCL groups on GPUs, gloo groups that exchange messages elsewhere.

    Only its members make a group: a thousand ranks have more than a thousand lines.
    """

    rank: int
    timeout: timedelta
    nccl: "NcclConfig | None" = None

    def line(self, axis: str, lines: Sequence[Sequence[int]]) -> Line | None:
        """Make this rank's line; on a CPU, collectives of layers get one connection for each direction."""
        members = next((ranks for ranks in lines if self.rank in ranks), None)
        if members is None:
            return None
        if self._on_gpus:
            return Communicator(TorchGroup(self._group(members, axis)))
        both = is_tensor(whole_axis(axis)) or whole_axis(axis) in LAYER_AXES
        return MessageLine(self._group(members), self._group(members) if both else None)

    def channel(self, lines: Sequence[Sequence[int]]) -> Channel:
        """Make this rank's channel; on GPUs, a communicator with each neighbour in the ring of stages."""
        (members,) = (ranks for ranks in lines if self.rank in ranks)
        if not self._on_gpus:
            return MessageLine(self._group(members))
        return pairs_of(members, self.rank, lambda pair: Communicator(TorchGroup(self._group(pair, "pp"))))

    @property
    def _on_gpus(self) -> bool:
        return "nccl" in dist.get_backend_config()

    def _group(self, ranks: Sequence[int], axis: str = "") -> dist.ProcessGroup:
        """Make a group; ``axis``: mesh axis whose limits NCCL gets, empty for a gloo group."""
        group = dist.new_group(
            list(ranks),
            timeout=self.timeout,
            use_local_synchronization=True,
            backend="nccl" if axis else None,  # None would add a gloo group to each NCCL group
            pg_options=nccl_options(self._limits(axis), self.timeout) if axis else None,
        )
        assert group is not None
        return group

    def _limits(self, axis: str) -> "NcclLimits | None":
        limits_axis = "tp" if is_tensor(whole_axis(axis)) else whole_axis(axis)
        return None if self.nccl is None else getattr(self.nccl, limits_axis, self.nccl.dp)

    def gather(self, value: Any) -> list[Any]:
        """Gather pickled values over the default group."""
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values


def nccl_options(limits: "NcclLimits | None", timeout: timedelta) -> Any:
    """Return torch's options for an NCCL communicator: the limits, and a high-priority stream."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    if limits is not None and limits.max_ctas is not None:
        options.config.max_ctas = limits.max_ctas
    return options


def pairs_of(ranks: Sequence[int], rank: int, make: Callable[[Sequence[int]], Communicator]) -> Pairs:
    """Make the communicators of a rank with its neighbours in the ring of pipeline stages ``ranks``."""
    stages = len(ranks)
    neighbours = {tuple(sorted((stage, (stage + 1) % stages))) for stage in range(stages)}
    stage_of_rank = ranks.index(rank)
    pairs = {
        (first if first != stage_of_rank else second): make([ranks[first], ranks[second]])
        for first, second in sorted(neighbours)
        if stage_of_rank in (first, second)
    }
    return Pairs(stage_of_rank, pairs)
