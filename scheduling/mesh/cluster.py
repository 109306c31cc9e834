"""Describes a cluster for the planner: GPUs, links and nodes, and the rates that they are known to achieve.

Every constant has a name, a unit and a source; presets are in ``presets/clusters.yaml``. Constants belong to
a GPU or a link, never to an experiment.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from braid.scheduling.mesh.mesh import sub_groups
from braid.scheduling.text.records import require_fraction, require_positive


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Fraction of a GPU's peak rate that operators of one class reach, as a function of their FLOPs n.

    ``efficiency(n) = ceiling * n / (n + half_flops)``: large operators reach the ceiling, an operator of
    ``half_flops`` FLOPs reaches half of it (launch, tail and memory effects).
    """

    ceiling: float
    half_flops: float

    def __post_init__(self) -> None:
        require_fraction(self, ("ceiling",))
        require_positive(self, ("half_flops",), zero=True)

    def at(self, flops: float) -> float:
        """Return the fraction of the peak rate (0 to 1) that an operator of ``flops`` FLOPs reaches."""
        return self.ceiling * flops / (flops + self.half_flops)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Rates, memory and overheads of one type of GPU; ``source`` says where the peak figures come from."""

    name: str
    memory_bytes: int
    peak_flops_per_s: float
    """Peak BF16 (or FP16) matrix rate in the data sheet, without sparsity."""
    memory_bytes_per_s: float
    gemm: Efficiency
    attention: Efficiency
    memory_efficiency: float
    """Fraction of the memory bandwidth that pointwise operators and norms reach."""
    launch_ns: int = 4_000
    """Time from the end of a kernel to the start of the next kernel in a full queue."""
    barrier_ns: int = 15_000
    """Time of a device-wide synchronisation and the launches after it, which each barrier between segments
    costs."""
    reserved_bytes: int = 2 * 2**30
    """Bytes that plans must leave free for CUDA context, communication buffers and fragmentation."""
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
    """Rate and latency of the links inside nodes, or between nodes, for one rank when all ranks of its node
    communicate equally."""

    kind: str
    bytes_per_s: float
    """Bandwidth per rank and direction: half of NVLink's printed total, or a rank's share of a network
    card."""
    latency_ns: int
    """Latency in ns of one hop of a ring, or of one message."""
    efficiency: float
    """Fraction of ``bytes_per_s`` that large collectives reach."""
    half_bytes: float = 0.0
    """Message size in bytes at which a hop reaches half of ``efficiency``."""
    all_to_all_share: float = 1.0
    """Fraction of a ring's rate that an all-to-all reaches if the traffic of all pairs of ranks crosses one
    root."""
    source: str = ""

    def __post_init__(self) -> None:
        require_positive(self, ("bytes_per_s",))
        require_positive(self, ("latency_ns", "half_bytes"), zero=True)
        require_fraction(self, ("efficiency", "all_to_all_share"))

    def transfer_ns(self, sent_bytes: float, hops: int) -> float:
        """Return the time in ns to send ``sent_bytes`` in ``hops`` equal messages, one after the other."""
        if hops == 0 or sent_bytes == 0:
            return 0.0
        rate = self.bytes_per_s * self.efficiency
        return hops * self.latency_ns + (sent_bytes + hops * self.half_bytes) / rate * 1e9


@dataclass(frozen=True, kw_only=True)
class Contention:
    """Overlap effectiveness (OEF, DHelix equation 1) of each pair of operator classes that run at the same
    time.

    1: the shorter operator is hidden entirely; 0: overlap gains nothing; below 0: overlap loses time.
    ``intra``, ``inter``: communication inside and between nodes.
    """

    gemm_intra: float
    gemm_inter: float
    attention_intra: float
    attention_inter: float
    memory_intra: float
    """OEF of norms, activations and other memory-bound operators with communication inside the node."""
    memory_inter: float
    intra_inter: float
    source: str = ""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "source" and not (math.isfinite(value) and -1 <= value <= 1):
                raise ValueError(f"{name}={value!r} must be between -1 and 1")


class Stream(StrEnum):
    """A rank's streams: for computation, for transfers inside a node, and for transfers between nodes."""

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
    """Links between nodes; None if there is a single node."""
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
        return self.nodes * self.gpus_per_node

    @property
    def usable_bytes(self) -> int:
        """Bytes of each GPU's memory that a plan may use: all but ``reserved_bytes``."""
        return self.gpu.memory_bytes - self.gpu.reserved_bytes

    def link(self, stream: Stream) -> Link:
        """Return the link that transfers on a stream use; raise `ValueError` if it is a network that a single
        node lacks."""
        if stream is Stream.INTRA:
            return self.intra
        if self.inter is None:
            raise ValueError(f"cluster {self.name} has one node and no network between nodes")
        return self.inter


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """Size of a group of ranks, and how it lies on nodes: ``per_node`` of its ``size`` ranks on each node."""

    size: int
    per_node: int

    def __post_init__(self) -> None:
        assert self.size % self.per_node == 0, f"{self} does not fill its nodes evenly"

    @property
    def stream(self) -> Stream:
        """Stream on which the group's transfers run: INTER if the group spans several nodes."""
        return Stream.INTRA if self.size == self.per_node else Stream.INTER

    @property
    def nodes(self) -> int:
        """Number of nodes on which the group has ranks."""
        return self.size // self.per_node


def group_of(stride: int, size: int, gpus_per_node: int) -> RankGroup:
    """Return the group of ``size`` ranks whose numbers are ``stride`` apart, if ranks fill nodes in order."""
    inside = max(1, gpus_per_node // stride) if stride < gpus_per_node else 1
    per_node = min(size, inside)
    return RankGroup(size=size, per_node=math.gcd(size, per_node))


@cache
def common_stream(mesh: tuple[int, ...], dim: int, per_node: int) -> Stream | None:
    """Return the stream that all sub-groups along ``dim`` of a mesh of ranks use, if ranks fill nodes in
    order.

    Returns None if sub-groups use different streams, or if one uses both kinds of link. ``per_node``: ranks
    per node.
    """
    streams = set()
    for ranks in sub_groups(mesh, dim):
        nodes = len({rank // per_node for rank in ranks})
        if nodes not in (1, len(ranks)):
            return None
        streams.add(Stream.INTRA if nodes == 1 else Stream.INTER)
    return streams.pop() if len(streams) == 1 else None


def dim_group(group: RankGroup, mesh: tuple[int, ...], dim: int) -> RankGroup:
    """Return size and position of the sub-groups of a group along dimension ``dim`` of a mesh of its
    ranks."""
    if len(mesh) == 1:
        return group
    inside = common_stream(mesh, dim, group.per_node) is Stream.INTRA
    return RankGroup(size=mesh[dim], per_node=mesh[dim] if inside else 1)


def node_mesh(group: RankGroup) -> tuple[int, int] | None:
    """Return (nodes, ranks per node) of a group if both are above 1, else None."""
    return (group.nodes, group.per_node) if group.nodes > 1 and group.per_node > 1 else None
