"""Streams of groups follow from hosts: against a count by hand, on meshes and hosts drawn at random."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from braid.scheduling.analytic import axis_streams
from braid.scheduling.mesh import MeshShape
from braid.scheduling.operators import Stream
from braid.scheduling.spec import ParallelLayout
from braid.scheduling.topology import Topology

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


@given(topologies())
def test_without_hosts_all_ranks_are_on_one(topology: Topology) -> None:
    alone = Topology(topology.mesh)
    assert set(alone.streams().values()) <= {Stream.INTRA}
    assert alone.warnings() == []


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
