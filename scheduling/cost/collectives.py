"""Computes costs of collectives on a cluster: ring and pairwise algorithms over two levels of links.

``payload`` is always the bytes of the whole: all ranks' parts together for an all-gather or a reduce-scatter,
the reduced tensor for an all-reduce, one rank's send buffer for an all-to-all.
"""

from braid.scheduling.mesh.cluster import ClusterSpec, RankGroup, Stream
from braid.scheduling.model.operators import Kind


def sent_bytes(kind: Kind, payload: float, size: int) -> float:
    """Return the bytes that each rank of a group of ``size`` ranks sends in a ring, or a pairwise
    all-to-all."""
    if size == 1:
        return 0.0
    match kind:
        case Kind.ALL_GATHER | Kind.REDUCE_SCATTER | Kind.ALL_TO_ALL:
            return payload * (size - 1) / size
        case Kind.ALL_REDUCE:
            return 2 * payload * (size - 1) / size
        case Kind.SEND_RECEIVE:
            return payload
        case _:
            raise ValueError(f"{kind} is not a collective")


def hops(kind: Kind, size: int) -> int:
    """Return the number of messages whose latencies add up: those that each rank sends one after the
    other."""
    match kind:
        case _ if size == 1:
            return 0
        case Kind.ALL_REDUCE:
            return 2 * (size - 1)
        case Kind.SEND_RECEIVE:
            return 1
        case Kind.ALL_TO_ALL:
            # All partners are served at once: one start-up, and one more for the last.
            return 2
        case _:
            return size - 1


def bytes_by_level(kind: Kind, payload: float, group: RankGroup) -> dict[Stream, float]:
    """Return the bytes that one rank sends over links inside nodes, and over links between nodes.

    A ring with k ranks on each node leaves the node only once, so that between nodes go 1/k of the bytes that
    a rank sends on average. In an all-to-all it is the fraction for partners on other nodes.
    """
    sent = sent_bytes(kind, payload, group.size)
    if group.stream is Stream.INTRA:
        return {Stream.INTRA: sent, Stream.INTER: 0.0}
    if kind is Kind.ALL_TO_ALL:
        inter = payload * (group.size - group.per_node) / group.size
    else:
        inter = sent / group.per_node
    return {Stream.INTRA: sent - inter, Stream.INTER: inter}


def collective_ns(cluster: ClusterSpec, kind: Kind, payload: float, group: RankGroup) -> int:
    """Return the time in ns of a collective, if all ranks of the nodes run one at once, each in its group.

    Links inside and between nodes work at the same time, and the slower ones determine the time. Latency
    counts hops between nodes for the boundaries of nodes, and hops inside nodes for all messages.
    """
    if group.size == 1 or payload == 0:
        return 0
    volume = bytes_by_level(kind, payload, group)
    count = hops(kind, group.size)
    share = cluster.intra.all_to_all_share if kind is Kind.ALL_TO_ALL else 1.0
    intra = cluster.intra.transfer_ns(volume[Stream.INTRA] / share, count if group.per_node > 1 else 0)
    if group.stream is Stream.INTRA:
        return round(intra)
    # NCCL's rings between nodes are as long as the group, its trees are shorter: latency grows with nodes.
    passes = 2 if kind is Kind.ALL_REDUCE else 1
    between = min(count, 2 * passes * group.nodes)
    inter = cluster.link(Stream.INTER).transfer_ns(volume[Stream.INTER], between)
    return round(max(intra, inter))
