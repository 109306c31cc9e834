"""Streams of groups follow from hosts: against a count by hand, on meshes and hosts drawn at random."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from braid.scheduling.cost.analytic import axis_streams
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.mesh.mesh import MeshShape
from braid.scheduling.mesh.partition import Factor
from braid.scheduling.mesh.topology import Topology

FACTORS = ("pp", "dp", "tp")


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    mesh = MeshShape(tuple((name, draw(st.integers(1, 3))) for name in FACTORS), cut=("pp", "tp"))
    return Topology(mesh, tuple(draw(st.sampled_from("abc")) for _ in range(mesh.ranks)))


@given(topologies())
def test_an_axis_goes_between_nodes_where_two_of_its_neighbours_do(topology: Topology) -> None:
    sizes, hosts = topology.mesh.sizes, topology.hosts
    for axis in FACTORS:
        others = [name for name in FACTORS if name != axis]
        crossing = 0
        for place in product(*(range(sizes[name]) for name in others)):
            fixed = dict(zip(others, place, strict=True))
            ranks = [topology.mesh.rank_at({**fixed, axis: n}) for n in range(sizes[axis])]
            crossing += len({hosts[rank] for rank in ranks}) > 1
        assert len(topology.spread(axis)) == crossing
        if sizes[axis] > 1:
            assert topology.streams()[axis] is (Stream.INTER if crossing else Stream.INTRA)
        else:
            assert axis not in topology.streams()
        assert bool(topology.warnings()) == bool(topology.spread("tp"))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 2, 4, 8]))
def test_ranks_that_fill_nodes_in_order_lie_where_the_planner_takes_them_to(
    tp: int, dp: int, pp: int, per_node: int
) -> None:
    layout = ParallelLayout(tp=tp, dp=dp, pp=pp)
    hosts = [f"node {rank // per_node}" for rank in range(layout.ranks)]
    planned = axis_streams(layout, per_node)["tp"]
    found = Topology(layout.mesh, hosts).streams().get("tp", Stream.INTRA)
    # A tensor-parallel degree that does not divide a node's GPUs has some groups inside, some over two nodes.
    assert found is planned or per_node % tp


@given(topologies())
def test_factors_divide_ranks_into_nodes_and_ranks_of_each(topology: Topology) -> None:
    """Along the last dim every group is on one host, along the first no two ranks are."""
    hosts, streams = topology.hosts, topology.streams()
    for factor in topology.factors():
        groups = topology.factor_groups(factor)
        assert sorted(rank for group in groups for rank in group) == list(range(topology.mesh.ranks))
        for group in groups:
            assert len(group) == factor.size > 1
            assert len({hosts[rank] for rank in group}) == (1 if factor.inside else len(group))
        assert streams[str(factor)] is (Stream.INTRA if factor.inside else Stream.INTER)
    meshes = {axis: topology.node_mesh(axis) for axis in ("tp", "dp")}
    assert topology.factors() == [
        Factor(axis, mesh, dim) for axis, mesh in meshes.items() if mesh for dim in (0, 1)
    ]


def test_nodes_of_different_numbers_of_ranks_are_no_mesh() -> None:
    mesh = MeshShape((("dp", 4),))
    for hosts, wanted in (
        ("aabb", (2, 2)),
        ("abab", None),
        ("aaab", None),
        ("aaaa", None),
        ("abcd", None),
        ("aabc", None),
    ):
        assert Topology(mesh, tuple(hosts)).node_mesh("dp") == wanted
    two = MeshShape((("dp", 2), ("tp", 4)), cut=("tp",))
    assert Topology(two, tuple("aabbccdd")).node_mesh("tp") == (2, 2)
    assert Topology(two, tuple("aabbcccc")).node_mesh("tp") is None, "groups differ"
    assert Topology(two, ()).factors() == []
