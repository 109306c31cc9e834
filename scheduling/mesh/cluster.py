"""The hardware a planner is given: GPUs, links, nodes, and what they are known to achieve.

Every constant has a name, a unit and a source; presets stand in ``presets/clusters.yaml``. Constants belong
to a GPU or a link, never to an experiment.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from braid.scheduling.mesh.mesh import sub_groups
from braid.scheduling.text.records import require_fraction, require_positive


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Share of the peak rate that a class of operators reaches, as a function of its size.

    ``efficiency(n) = ceiling * n / (n + half_flops)``: large operators reach the ceiling, one of
    ``half_flops`` FLOPs (launch, tail and memory effects) half of it.
    """

    ceiling: float
    half_flops: float

    def __post_init__(self) -> None:
        require_fraction(self, ("ceiling",))
        require_positive(self, ("half_flops",), zero=True)

    def at(self, flops: float) -> float:
        """The share of the peak for an operator of so many FLOPs."""
        return self.ceiling * flops / (flops + self.half_flops)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One accelerator. ``source`` says where the peak figures come from."""

    name: str
    memory_bytes: int
    peak_flops_per_s: float
    """Dense BF16 (or FP16) matrix rate of the data sheet, without sparsity."""
    memory_bytes_per_s: float
    gemm: Efficiency
    attention: Efficiency
    memory_efficiency: float
    """Share of the memory bandwidth that pointwise operators and norms reach."""
    launch_ns: int = 4_000
    """From the end of a kernel to the start of the next in a full queue."""
    barrier_ns: int = 15_000
    """A device-wide synchronisation and the launches after it (the price of a barrier between segments)."""
    reserved_bytes: int = 2 * 2**30
    """Context, communication buffers and fragmentation: not the planner's to give away."""
    source: str = ""

    def __post_init__(self) -> None:
        require_positive(self, ("memory_bytes", "peak_flops_per_s", "memory_bytes_per_s"))
        require_positive(self, ("launch_ns", "barrier_ns", "reserved_bytes"), zero=True)
        require_fraction(self, ("memory_efficiency",))
        if self.reserved_bytes >= self.memory_bytes:
            raise ValueError(
                f"reserved_bytes={self.reserved_bytes} leaves nothing of memory_bytes={self.memory_bytes}"
            )


@dataclass(frozen=True, kw_only=True)
class Link:
    """What connects ranks at one level, as one rank sees it when all ranks of its node use it alike."""

    kind: str
    bytes_per_s: float
    """Per rank and direction: of NVLink's printed total half; of a node's network card its share."""
    latency_ns: int
    """Of one hop of a ring, or of one message."""
    efficiency: float
    """Share of ``bytes_per_s`` that large collectives reach."""
    half_bytes: float = 0.0
    """Message size of a hop that reaches half of that share."""
    all_to_all_share: float = 1.0
    """Share of the ring's rate that an all-to-all reaches, where every pair crosses the same root."""
    source: str = ""

    def __post_init__(self) -> None:
        require_positive(self, ("bytes_per_s",))
        require_positive(self, ("latency_ns", "half_bytes"), zero=True)
        require_fraction(self, ("efficiency", "all_to_all_share"))

    def transfer_ns(self, sent_bytes: float, hops: int) -> float:
        """Time to send so many bytes in ``hops`` equal messages, one after the other."""
        if hops == 0 or sent_bytes == 0:
            return 0.0
        rate = self.bytes_per_s * self.efficiency
        return hops * self.latency_ns + (sent_bytes + hops * self.half_bytes) / rate * 1e9


@dataclass(frozen=True, kw_only=True)
class Contention:
    """Overlap effectiveness (OEF, DHelix equation 1) of classes of operators that run at the same time.

    1: the shorter one is hidden entirely; 0: nothing is gained; below 0: they hurt each other.
    """

    gemm_intra: float
    gemm_inter: float
    attention_intra: float
    attention_inter: float
    memory_intra: float
    """Norms, activations and other operators bound by memory, beside communication inside the node."""
    memory_inter: float
    intra_inter: float
    source: str = ""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "source" and not (math.isfinite(value) and -1 <= value <= 1):
                raise ValueError(f"{name}={value!r} must be between -1 and 1")


class Stream(StrEnum):
    """A rank's streams: of computation, of transfers inside a node, of transfers between nodes."""

    COMPUTE = "compute"
    INTRA = "intra"
    INTER = "inter"


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """A homogeneous cluster: ``nodes`` x ``gpus_per_node`` equal GPUs and two levels of links."""

    name: str
    nodes: int
    gpus_per_node: int
    gpu: Gpu
    intra: Link
    contention: Contention
    inter: Link | None = None
    """The network between nodes; None for a single node."""
    source: str = ""

    def __post_init__(self) -> None:
        require_positive(self, ("nodes", "gpus_per_node"))
        if self.nodes > 1 and self.inter is None:
            raise ValueError(
                f"inter is missing, but nodes={self.nodes}: give the bandwidth and latency of the network "
                f"between nodes, or set nodes to 1"
            )

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.nodes * self.gpus_per_node

    @property
    def usable_bytes(self) -> int:
        """Memory of a GPU that a plan may use."""
        return self.gpu.memory_bytes - self.gpu.reserved_bytes

    def link(self, stream: Stream) -> Link:
        """The link of a stream of transfers; `ValueError` where a single node is asked for its network."""
        if stream is Stream.INTRA:
            return self.intra
        if self.inter is None:
            raise ValueError(f"cluster {self.name} has one node and no network between nodes")
        return self.inter


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """A rank group as the topology sees it: ``size`` ranks, ``per_node`` of them on each node it touches."""

    size: int
    per_node: int

    def __post_init__(self) -> None:
        assert self.size % self.per_node == 0, f"{self} does not fill its nodes evenly"

    @property
    def stream(self) -> Stream:
        """The stream of the group's slowest link."""
        return Stream.INTRA if self.size == self.per_node else Stream.INTER

    @property
    def nodes(self) -> int:
        """Number of nodes that the group touches."""
        return self.size // self.per_node


def group_of(stride: int, size: int, gpus_per_node: int) -> RankGroup:
    """The group of ``size`` ranks that lie ``stride`` apart, ranks filling nodes in order."""
    inside = max(1, gpus_per_node // stride) if stride < gpus_per_node else 1
    per_node = min(size, inside)
    return RankGroup(size=size, per_node=math.gcd(size, per_node))


@cache
def common_stream(mesh: tuple[int, ...], dim: int, per_node: int) -> Stream | None:
    """The stream of all sub-groups along a dim of a mesh of ranks; ranks fill nodes in order.

    None where sub-groups differ, or where a sub-group uses both kinds of link.
    """
    found = set()
    for ranks in sub_groups(mesh, dim):
        nodes = len({rank // per_node for rank in ranks})
        if nodes not in (1, len(ranks)):
            return None
        found.add(Stream.INTRA if nodes == 1 else Stream.INTER)
    return found.pop() if len(found) == 1 else None


def dim_group(group: RankGroup, mesh: tuple[int, ...], dim: int) -> RankGroup:
    """The sub-groups of a group along a dim of a mesh of its ranks."""
    if len(mesh) == 1:
        return group
    inside = common_stream(mesh, dim, group.per_node) is Stream.INTRA
    return RankGroup(size=mesh[dim], per_node=mesh[dim] if inside else 1)


def node_mesh(group: RankGroup) -> tuple[int, int] | None:
    """Nodes x ranks of each, of a group that has several of both."""
    return (group.nodes, group.per_node) if group.nodes > 1 and group.per_node > 1 else None
