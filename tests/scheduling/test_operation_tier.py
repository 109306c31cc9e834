"""Operation tier: algorithm 1 branch by branch, static orders, and the best scheme by brute force."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.scheduling.cluster import Group
from braid.scheduling.collectives import collective_ns
from braid.scheduling.operators import Kind, Stream
from braid.scheduling.planner.chain import Dim, chain_ns, matmul, pointwise
from braid.scheduling.planner.operation import (
    OperationDecision,
    Overlap,
    Task,
    algorithm_1,
    makespan_ns,
    reversed_in_time,
    run_in_order,
    schedule_operation,
    scheduled_ns,
    scheme_tasks,
)
from braid.scheduling.planner.partition import Collective, partition_space
from braid.scheduling.records import from_mapping, to_mapping
from tests.scheduling.test_partition import centauri_cluster

CLUSTER = centauri_cluster()
LAUNCH = CLUSTER.gpu.launch_ns
TWO_NODES = Group(size=16, per_node=8)


def rule(**changes: float) -> tuple[float, ...]:
    """Two nodes of eight; a unit of cost is whatever."""
    values = {
        "comp_cost": 100,
        "comm_cost": 80,
        "cost_inter": 60,
        "inter_size": 2,
        "intra_size": 8,
        "in_cost": 0,
        "is_group_partitioned": True,
    }
    return algorithm_1(**(values | changes))  # type: ignore[arg-type]


def test_algorithm_1_leaves_hidden_communication_whole() -> None:
    assert rule(in_cost=80) == rule(in_cost=200) == (1.0,)
    assert rule(in_cost=80, is_group_partitioned=False) == (1.0,)


def test_algorithm_1_cuts_evenly_without_groups() -> None:
    assert rule(is_group_partitioned=False) == (1 / 8,) * 8
    assert rule(is_group_partitioned=False, max_pieces=4) == (1 / 4,) * 4
    assert rule(is_group_partitioned=False, in_cost=40) == (1 / 2,) * 2
    assert rule(is_group_partitioned=False, in_cost=30) == (1 / 3,) * 3
    assert rule(is_group_partitioned=False, in_cost=1) == (1 / 8,) * 8


def test_algorithm_1_launches_between_nodes_first_if_independent_work_hides_it() -> None:
    assert rule(in_cost=61) == (2 / 16, 14 / 16)
    assert rule(in_cost=60) != (2 / 16, 14 / 16)


def test_algorithm_1_launches_inside_nodes_first_otherwise() -> None:
    assert rule(comp_cost=961) == (8 / 16, 8 / 16)
    assert rule(comp_cost=960) == (8 / 16, 1 / 16, 7 / 16)
    assert rule(inter_size=4, comp_cost=1) == (8 / 32, 3 / 32, 21 / 32)


@given(
    st.floats(0, 1e3),
    st.floats(1, 1e3),
    st.floats(0, 1e3),
    st.integers(2, 8),
    st.integers(2, 8),
    st.booleans(),
)
def test_algorithm_1_shares_out_everything(
    in_cost: float, comm: float, inter: float, nodes: int, inside: int, groups: bool
) -> None:
    granularity = rule(
        in_cost=in_cost,
        comm_cost=comm,
        cost_inter=inter,
        inter_size=nodes,
        intra_size=inside,
        is_group_partitioned=groups,
    )
    assert sum(granularity) == pytest.approx(1)
    assert all(share > 0 for share in granularity)


def test_streams_serve_in_order() -> None:
    tasks = (
        Task(name="gather", stream=Stream.INTER, ns=5),
        Task(name="own", stream=Stream.COMPUTE, ns=3),
        Task(name="product", stream=Stream.COMPUTE, ns=4, after=("gather",)),
        Task(name="next", stream=Stream.INTER, ns=2),
    )
    times = run_in_order(tasks)
    assert times == {"gather": (0, 5), "own": (0, 3), "product": (5, 9), "next": (5, 7)}
    assert makespan_ns(run_in_order(reversed_in_time(tasks))) == makespan_ns(times) == 9


def test_orders_that_lock_each_other_are_named() -> None:
    tasks = (
        Task(name="a", stream=Stream.COMPUTE, ns=1, after=("b",)),
        Task(name="b", stream=Stream.INTER, ns=1, after=("c",)),
        Task(name="c", stream=Stream.COMPUTE, ns=1),
    )
    with pytest.raises(ValueError, match="a for b; b for c; put what is waited for first"):
        run_in_order(tasks)


def case(kind: Kind, hidden: int, tokens: int, independent_ns: int, group: Group = TWO_NODES) -> Overlap:
    """A weight of a large layer that is gathered for, or scattered after, a product and an activation."""
    rows, inner, outer = (
        Dim(name="tokens", size=tokens),
        Dim(name="in", size=hidden),
        Dim(name="out", size=4 * hidden),
    )
    chain = (matmul("product", rows, inner, outer), pointwise("activation", rows, outer))
    payload = 2 * hidden * 4 * hidden
    collective = Collective(kind=kind, payload_bytes=payload, dims=("in", "out"))
    return Overlap(collective=collective, group=group, chain=chain, independent_ns=independent_ns)


KINDS = st.sampled_from((Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE))
CASES = st.builds(
    case,
    KINDS,
    st.sampled_from((256, 1024, 4096)),
    st.sampled_from((512, 8192)),
    st.integers(0, 20_000_000),
    st.sampled_from((TWO_NODES, Group(size=8, per_node=8), Group(size=4, per_node=1))),
)


@settings(max_examples=20, deadline=None)
@given(CASES)
def test_choice_is_the_best_of_all_schemes(overlap: Overlap) -> None:
    decision = schedule_operation(overlap, CLUSTER)
    space = partition_space(overlap.collective, overlap.group, CLUSTER, overlap.chain)
    costs = {scheme: scheduled_ns(overlap, scheme, CLUSTER) for scheme in space.schemes}
    costs[decision.algorithm_1] = scheduled_ns(overlap, decision.algorithm_1, CLUSTER)
    assert decision.ns == costs[decision.scheme] == min(costs.values())
    rest = [ns for scheme, ns in costs.items() if scheme != decision.scheme]
    assert decision.runner_up_ns == costs[decision.runner_up] == min(rest)
    assert decision.searched == len(costs)
    assert decision.ns <= decision.unpartitioned_ns == costs[space.schemes[0]]
    assert decision.algorithm_1_ns == costs[decision.algorithm_1]
    assert ("more than the best" in decision.note) == (decision.algorithm_1_ns > decision.ns)
    assert from_mapping(OperationDecision, to_mapping(decision), "operation") == decision


@settings(max_examples=20, deadline=None)
@given(CASES)
def test_no_scheme_beats_its_longest_path(overlap: Overlap) -> None:
    for scheme in partition_space(overlap.collective, overlap.group, CLUSTER, overlap.chain).schemes:
        tasks = scheme_tasks(overlap, scheme, CLUSTER)
        times = run_in_order(tasks)
        for stream in Stream:
            mine = sorted(times[task.name] for task in tasks if task.stream is stream)
            assert all(a[1] <= b[0] for a, b in pairwise(mine))
            assert sum(task.ns for task in tasks if task.stream is stream) <= makespan_ns(times)
        for task in tasks:
            assert all(times[name][1] <= times[task.name][0] for name in task.after)
        compute = sum(task.ns for task in tasks if task.stream is Stream.COMPUTE)
        # Cutting never makes computation cheaper.
        assert compute >= overlap.independent_ns + chain_ns(CLUSTER.gpu, overlap.chain)


def test_unpartitioned_is_gather_then_chain() -> None:
    overlap = case(Kind.ALL_GATHER, 4096, 8192, 0)
    decision = schedule_operation(overlap, CLUSTER)
    gather = collective_ns(CLUSTER, Kind.ALL_GATHER, overlap.collective.payload_bytes, TWO_NODES)
    assert decision.unpartitioned_ns == LAUNCH + gather + chain_ns(CLUSTER.gpu, overlap.chain)


def test_chain_comes_before_a_reduce_scatter() -> None:
    overlap = case(Kind.REDUCE_SCATTER, 4096, 8192, 1_000)
    decision = schedule_operation(overlap, CLUSTER)
    tasks = scheme_tasks(overlap, decision.scheme, CLUSTER)
    times = run_in_order(tasks)
    first = next(task.name for task in tasks if task.stream is not Stream.COMPUTE)
    last = max(times, key=lambda name: times[name][1])
    assert times[first][0] >= min(times[name][1] for name in times if name.startswith("chain"))
    assert last.startswith("stage")
    levels = [task.stream for task in tasks if task.name in ("stage0.0", "stage1.0")]
    # Inside the node first: it leaves an eighth to be sent between nodes.
    assert levels == [Stream.INTRA, Stream.INTER]


def test_large_gathers_are_cut_and_small_ones_are_not() -> None:
    large = schedule_operation(case(Kind.ALL_GATHER, 4096, 8192, 0), CLUSTER)
    assert large.scheme.pieces > 1 or large.scheme.uneven
    assert large.ns < 0.8 * large.unpartitioned_ns
    hidden = case(Kind.ALL_GATHER, 256, 512, 50_000_000)
    small = schedule_operation(hidden, CLUSTER)
    assert small.ns == small.unpartitioned_ns
    assert small.granularity == (1.0,)
    assert small.scheme == small.algorithm_1


def test_rule_follows_the_granularity_with_groups() -> None:
    idle = schedule_operation(case(Kind.ALL_GATHER, 4096, 8192, 0), CLUSTER)
    assert [stage.mesh_dim for stage in idle.algorithm_1.stages] == [1, 0, 1]
    assert idle.algorithm_1.uneven
    assert [stage.share for stage in idle.algorithm_1.stages] == pytest.approx(list(idle.granularity))
    direct = collective_ns(CLUSTER, Kind.ALL_GATHER, 2 * 4096 * 4 * 4096, TWO_NODES)
    busy = schedule_operation(case(Kind.ALL_GATHER, 4096, 8192, direct - 1), CLUSTER)
    assert [stage.mesh_dim for stage in busy.algorithm_1.stages] == [0, 1]
    assert [stage.share for stage in busy.algorithm_1.stages] == pytest.approx(list(busy.granularity))


def test_rule_cuts_other_collectives_evenly() -> None:
    decision = schedule_operation(case(Kind.REDUCE_SCATTER, 4096, 8192, 0), CLUSTER)
    assert decision.granularity == (1 / 8,) * 8
    assert decision.algorithm_1.pieces == 8
    assert decision.algorithm_1.operators == 2
