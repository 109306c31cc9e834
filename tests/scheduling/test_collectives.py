"""Costs of collectives: closed forms, counted messages, and that more bandwidth is never slower."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from braid.scheduling.cluster import ClusterSpec, Group, Level
from braid.scheduling.collectives import bytes_by_level, collective_ns, hops, sent_bytes
from braid.scheduling.operators import Kind
from braid.scheduling.presets.library import cluster_names, cluster_preset

COLLECTIVES = [kind for kind in Kind if kind.communicates]
KINDS = pytest.mark.parametrize("kind", COLLECTIVES)
RINGS = [Kind.ALL_GATHER, Kind.REDUCE_SCATTER]
GROUPS = st.builds(
    lambda per_node, nodes: Group(size=per_node * nodes, per_node=per_node),
    st.integers(1, 8),
    st.integers(1, 8),
)
PAYLOADS = st.floats(1, 1e11)
CLUSTER = cluster_preset("a800")
INTRA = Group(size=8, per_node=8)


def faster(cluster: ClusterSpec, level: Level, by: float) -> ClusterSpec:
    """The cluster with more bandwidth at one level."""
    if level is Level.INTRA:
        return replace(cluster, intra=replace(cluster.intra, bytes_per_s=cluster.intra.bytes_per_s * by))
    assert cluster.inter is not None
    return replace(cluster, inter=replace(cluster.inter, bytes_per_s=cluster.inter.bytes_per_s * by))


# -- volumes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "size", "sent"),
    [
        (Kind.ALL_GATHER, 4, 75),
        (Kind.REDUCE_SCATTER, 4, 75),
        (Kind.ALL_REDUCE, 4, 150),
        (Kind.ALL_TO_ALL, 4, 75),
        (Kind.SEND_RECEIVE, 4, 100),
        (Kind.ALL_GATHER, 2, 50),
        (Kind.ALL_REDUCE, 8, 175),
    ],
)
def test_volumes_of_100_bytes(kind: Kind, size: int, sent: float) -> None:
    assert sent_bytes(kind, 100, size) == sent


@given(st.integers(1, 64), PAYLOADS)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(size: int, payload: float) -> None:
    parts = sum(sent_bytes(kind, payload, size) for kind in RINGS)
    assert sent_bytes(Kind.ALL_REDUCE, payload, size) == pytest.approx(parts)
    assert hops(Kind.ALL_REDUCE, size) == sum(hops(kind, size) for kind in RINGS)


def ring_bytes(group: Group, payload: float) -> tuple[float, float]:
    """Bytes that leave and that stay on nodes when a ring of all ranks passes every part on, per rank."""
    inside = outside = 0.0
    for rank in range(group.size):
        neighbour = (rank + 1) % group.size
        sent = payload / group.size * (group.size - 1)
        if rank // group.per_node == neighbour // group.per_node:
            inside += sent
        else:
            outside += sent
    return inside / group.size, outside / group.size


def pairwise_bytes(group: Group, payload: float) -> tuple[float, float]:
    """The same when every rank sends every other one its part."""
    inside = outside = 0.0
    for rank in range(group.size):
        for other in range(group.size):
            if other != rank and other // group.per_node == rank // group.per_node:
                inside += payload / group.size
            elif other != rank:
                outside += payload / group.size
    return inside / group.size, outside / group.size


@given(GROUPS, PAYLOADS, st.sampled_from([*RINGS, Kind.ALL_TO_ALL, Kind.ALL_REDUCE]))
def test_bytes_over_each_level_are_those_counted(group: Group, payload: float, kind: Kind) -> None:
    if kind is Kind.ALL_TO_ALL:
        inside, outside = pairwise_bytes(group, payload)
    else:
        inside, outside = ring_bytes(group, payload)
        if kind is Kind.ALL_REDUCE:
            inside, outside = 2 * inside, 2 * outside
    volume = bytes_by_level(kind, payload, group)
    assert volume[Level.INTRA] == pytest.approx(inside, abs=1e-6 * payload)
    assert volume[Level.INTER] == pytest.approx(outside, abs=1e-6 * payload)


@given(GROUPS, PAYLOADS, st.sampled_from(COLLECTIVES))
def test_levels_share_what_is_sent(group: Group, payload: float, kind: Kind) -> None:
    volume = bytes_by_level(kind, payload, group)
    assert sum(volume.values()) == pytest.approx(sent_bytes(kind, payload, group.size))
    assert min(volume.values()) >= -1e-6 * payload
    if group.level is Level.INTRA:
        assert volume[Level.INTER] == 0
    if group.per_node == 1 and group.size > 1:
        assert volume[Level.INTRA] == pytest.approx(0, abs=1e-6 * payload)


def test_what_is_no_collective_has_no_volume() -> None:
    with pytest.raises(ValueError, match="gemm is not a collective"):
        sent_bytes(Kind.GEMM, 100, 4)


# -- times ---------------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("name", cluster_names())
def test_one_rank_and_no_bytes_cost_nothing(kind: Kind, name: str) -> None:
    cluster = cluster_preset(name)
    assert collective_ns(cluster, kind, 1e9, Group(size=1, per_node=1)) == 0
    assert collective_ns(cluster, kind, 0, INTRA) == 0
    assert hops(kind, 1) == sent_bytes(kind, 1e9, 1) == 0
    assert collective_ns(cluster, kind, 1, INTRA) > 0


@KINDS
def test_inside_a_node_time_is_latency_and_bytes(kind: Kind) -> None:
    link = replace(CLUSTER.intra, half_bytes=0.0, all_to_all_share=1.0)
    cluster = replace(CLUSTER, intra=link)
    expected = hops(kind, 8) * link.latency_ns
    expected += sent_bytes(kind, 1e8, 8) / (link.bytes_per_s * link.efficiency) * 1e9
    assert collective_ns(cluster, kind, 1e8, INTRA) == round(expected)


@KINDS
@pytest.mark.parametrize("per_node", [1, 2, 8])
def test_between_nodes_the_slower_level_counts(kind: Kind, per_node: int) -> None:
    """A cluster whose network is beyond reach is as fast as the links inside, and the other way round."""
    group = Group(size=4 * per_node, per_node=per_node)
    volume = bytes_by_level(kind, 1e9, group)
    both = collective_ns(CLUSTER, kind, 1e9, group)
    assert CLUSTER.inter is not None
    rate = CLUSTER.inter.bytes_per_s * CLUSTER.inter.efficiency
    assert both >= volume[Level.INTER] / rate * 1e9
    assert both >= volume[Level.INTRA] / (CLUSTER.intra.bytes_per_s * CLUSTER.intra.efficiency) * 1e9
    network = replace(CLUSTER.inter, latency_ns=0, half_bytes=0.0, bytes_per_s=1e18)
    inside = collective_ns(replace(CLUSTER, inter=network), kind, 1e9, group)
    assert inside <= both
    if per_node > 1 and volume[Level.INTRA] > 1:
        assert inside > 0


@given(
    st.sampled_from(COLLECTIVES),
    GROUPS,
    PAYLOADS,
    st.sampled_from(Level),
    st.floats(1, 100),
    st.sampled_from([name for name in cluster_names() if cluster_preset(name).inter]),
)
def test_more_bandwidth_is_never_slower(
    kind: Kind, group: Group, payload: float, level: Level, by: float, name: str
) -> None:
    cluster = cluster_preset(name)
    before = collective_ns(cluster, kind, payload, group)
    assert collective_ns(faster(cluster, level, by), kind, payload, group) <= before


@given(st.sampled_from(COLLECTIVES), GROUPS, PAYLOADS, st.floats(1, 10))
def test_more_bytes_are_never_faster(kind: Kind, group: Group, payload: float, by: float) -> None:
    more = collective_ns(CLUSTER, kind, payload * by, group)
    assert more >= collective_ns(CLUSTER, kind, payload, group)


@given(st.sampled_from(COLLECTIVES), GROUPS, PAYLOADS)
def test_less_latency_is_never_slower(kind: Kind, group: Group, payload: float) -> None:
    assert CLUSTER.inter is not None
    swift = replace(
        CLUSTER, intra=replace(CLUSTER.intra, latency_ns=0), inter=replace(CLUSTER.inter, latency_ns=0)
    )
    assert collective_ns(swift, kind, payload, group) <= collective_ns(CLUSTER, kind, payload, group)


@given(st.sampled_from([*RINGS, Kind.ALL_REDUCE]), st.integers(2, 8), st.floats(1e6, 1e11))
def test_large_rings_over_whole_nodes_share_the_network(kind: Kind, per_node: int, payload: float) -> None:
    """What leaves a node is shared by its ranks, so a fuller node's ring is no slower on the network."""
    assume(per_node > 1)
    alone = bytes_by_level(kind, payload, Group(size=4, per_node=1))
    full = bytes_by_level(kind, payload, Group(size=4 * per_node, per_node=per_node))
    assert full[Level.INTER] < alone[Level.INTER]


def test_a_single_node_has_no_collectives_between_nodes() -> None:
    with pytest.raises(ValueError, match="cluster a100x8 has one node and no network between nodes"):
        collective_ns(cluster_preset("a100x8"), Kind.ALL_GATHER, 1e6, Group(size=4, per_node=2))


@given(st.integers(2, 16), PAYLOADS)
def test_an_all_to_all_may_be_slower_than_a_ring(size: int, payload: float) -> None:
    """By the link's share for it: all pairs cross the same root at a time."""
    group = Group(size=size, per_node=size)
    slow = replace(CLUSTER, intra=replace(CLUSTER.intra, all_to_all_share=0.5, half_bytes=0.0, latency_ns=0))
    fast = replace(slow, intra=replace(slow.intra, all_to_all_share=1.0))
    doubled = 2 * collective_ns(fast, Kind.ALL_TO_ALL, payload, group)
    assert collective_ns(slow, Kind.ALL_TO_ALL, payload, group) == pytest.approx(doubled, abs=1)
    for kind in RINGS:
        assert collective_ns(slow, kind, payload, group) == collective_ns(fast, kind, payload, group)
