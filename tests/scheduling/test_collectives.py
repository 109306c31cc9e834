"""Costs of collectives: closed forms, counted messages, and that more bandwidth is never slower."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.scheduling.cost.collectives import bytes_by_level, collective_ns, hops, sent_bytes
from braid.scheduling.mesh.cluster import RankGroup, Stream
from braid.scheduling.model.operators import Kind
from braid.scheduling.model.presets.library import cluster_preset

COLLECTIVES = [kind for kind in Kind if kind.communicates]
KINDS = pytest.mark.parametrize("kind", COLLECTIVES)
RINGS = [Kind.ALL_GATHER, Kind.REDUCE_SCATTER]
GROUPS = st.builds(
    lambda per_node, nodes: RankGroup(size=per_node * nodes, per_node=per_node),
    st.integers(1, 8),
    st.integers(1, 8),
)
PAYLOADS = st.floats(1, 1e11)
CLUSTER = cluster_preset("a800")
INTRA = RankGroup(size=8, per_node=8)
BEYOND = {"bytes_per_s": 1e30, "latency_ns": 0}
"""Reach: of a link that costs nothing."""


# -- volumes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "sent", "messages"),
    [
        (Kind.ALL_GATHER, 75, 3),
        (Kind.REDUCE_SCATTER, 75, 3),
        (Kind.ALL_REDUCE, 150, 6),
        (Kind.ALL_TO_ALL, 75, 2),
        (Kind.SEND_RECEIVE, 100, 1),
    ],
)
def test_volumes_of_100_bytes_among_four_ranks(kind: Kind, sent: float, messages: int) -> None:
    assert (sent_bytes(kind, 100, 4), hops(kind, 4)) == (sent, messages)


def counted(group: RankGroup, payload: float, *, pairwise: bool) -> dict[Stream, float]:
    """Bytes of each level, per rank: when a ring of all ranks passes every part on, or each to each."""
    found = dict.fromkeys(Stream, 0.0)
    for rank in range(group.size):
        others = [n for n in range(group.size) if n != rank]
        parts = [(n, 1) for n in others] if pairwise else [((rank + 1) % group.size, len(others))]
        for other, count in parts:
            same = rank // group.per_node == other // group.per_node
            found[Stream.INTRA if same else Stream.INTER] += count * payload / group.size**2
    return found


@given(GROUPS, PAYLOADS, st.sampled_from([*RINGS, Kind.ALL_TO_ALL, Kind.ALL_REDUCE]))
def test_bytes_over_each_level_are_those_counted(group: RankGroup, payload: float, kind: Kind) -> None:
    twice = 1 + (kind is Kind.ALL_REDUCE)
    found = counted(group, payload, pairwise=kind is Kind.ALL_TO_ALL)
    for level, volume in bytes_by_level(kind, payload, group).items():
        assert volume == pytest.approx(twice * found[level], abs=1e-6 * payload)


def test_what_is_no_collective_has_no_volume() -> None:
    with pytest.raises(ValueError, match="gemm is not a collective"):
        sent_bytes(Kind.GEMM, 100, 4)


# -- times ---------------------------------------------------------------------------------------------------


@KINDS
def test_one_rank_and_no_bytes_cost_nothing(kind: Kind) -> None:
    assert collective_ns(CLUSTER, kind, 1e9, RankGroup(size=1, per_node=1)) == 0
    assert collective_ns(CLUSTER, kind, 0, INTRA) == 0
    assert hops(kind, 1) == sent_bytes(kind, 1e9, 1) == 0
    assert collective_ns(CLUSTER, kind, 1, INTRA) > 0


@KINDS
@pytest.mark.parametrize(("per_node", "nodes"), [(8, 1), (1, 4), (2, 4), (8, 32)])
def test_time_is_latency_and_bytes_of_the_slower_level(kind: Kind, per_node: int, nodes: int) -> None:
    """A hop between nodes is counted for every node boundary, there and back, the others inside."""
    group, payload = RankGroup(size=per_node * nodes, per_node=per_node), 1e8
    volume, count = bytes_by_level(kind, payload, group), hops(kind, group.size)
    there_and_back = 2 * nodes * (2 if kind is Kind.ALL_REDUCE else 1)
    levels = {}
    for level, link in ((Stream.INTRA, CLUSTER.intra), (Stream.INTER, CLUSTER.inter)):
        assert link is not None
        link = replace(link, half_bytes=0.0, all_to_all_share=1.0)
        passed = min(count, there_and_back) if level is Stream.INTER else count * (per_node > 1)
        rate = link.bytes_per_s * link.efficiency / 1e9
        levels[level] = link, passed * link.latency_ns + volume[level] / rate if volume[level] else 0.0
    (intra, inside), (inter, between) = levels.values()
    for cluster, expected in (
        (replace(CLUSTER, intra=intra, inter=inter), max(inside, between)),
        (replace(CLUSTER, intra=intra, inter=replace(inter, **BEYOND)), inside),
        (replace(CLUSTER, intra=replace(intra, **BEYOND), inter=inter), between),
    ):
        assert collective_ns(cluster, kind, payload, group) == pytest.approx(expected, abs=1)


@given(st.integers(2, 16), PAYLOADS)
def test_an_all_to_all_may_be_slower_than_a_ring(size: int, payload: float) -> None:
    """By the link's share for it: all pairs cross the same root at a time."""
    group = RankGroup(size=size, per_node=size)
    slow = replace(CLUSTER, intra=replace(CLUSTER.intra, all_to_all_share=0.5, half_bytes=0.0, latency_ns=0))
    fast = replace(slow, intra=replace(slow.intra, all_to_all_share=1.0))
    doubled = 2 * collective_ns(fast, Kind.ALL_TO_ALL, payload, group)
    assert collective_ns(slow, Kind.ALL_TO_ALL, payload, group) == pytest.approx(doubled, abs=1)
    for kind in RINGS:
        assert collective_ns(slow, kind, payload, group) == collective_ns(fast, kind, payload, group)
