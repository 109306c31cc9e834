"""Centauri's operation tier in a run: in which ways a collective can be cut, and that the best is taken."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.jobs.bench.overlap import WithoutTier
from braid.scheduling.cost.profile import Profile, with_piece_costs
from braid.scheduling.generate.partition_checks import operators_beside
from braid.scheduling.generate.partitions import with_partitions
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.mesh.partition import ABOUT_OWN, Partition, Target
from braid.scheduling.model.operators import Graph, Kind, Operator, Part
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.model.units import chunk_parameters
from braid.scheduling.plan.decide import measured, modelled, simulate_setting
from braid.scheduling.plan.orders import CostedSetting
from braid.scheduling.plan.tiers import (
    cuts,
    operation_tier,
    points,
    sharing_partitions,
    stages_ns,
)
from braid.scheduling.schedule.schedule import Block
from tests.scheduling.cases import GPT, LLAMA
from tests.scheduling.partition_cases import collectives_of
from tests.scheduling.plans import SMALL, cluster, setting

BESIDE = {
    "attention_gather": 1,
    "attention_scatter": 1,
    "mlp_gather": 2,
    "mlp_scatter": 2,
    "mlp_scatter.grad": 1,
    "mlp_gather.grad": 1,
    "attention_scatter.grad": 1,
    "attention_gather.grad": 1,
}
"""Operators beside every collective of a layer that can be cut: a GEMM, and perhaps the activation."""


@cache
def bench_of(
    intra: float = 2e10,
    inter: float = 5e9,
    nodes: int = 2,
    model: ModelShape = SMALL,
    recompute: str = "none",
) -> CostedSetting:
    """Four tensor-parallel ranks."""
    spec = cluster(nodes=nodes, gpus=4 // nodes, intra=intra, inter=inter)
    return modelled(spec)(setting("braid", tp=4, model=model, recompute=recompute))


def kinds_of(bench: CostedSetting) -> Iterator[tuple[Part, Graph, Operator]]:
    """Every collective of the layer, that of its recomputation too."""
    part = bench.members["layer"]
    for graph, op in collectives_of(part):
        yield part, graph, op


# -- points --------------------------------------------------------------------------------------------------


def expected_points(op: Operator, *, several_nodes: bool) -> set[Partition]:
    """All that there is, written down: meshes and orders, then pieces, then what is cut with them."""
    gathers = op.kind is Kind.ALL_GATHER
    divided: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    if several_nodes:
        divided += [((2, 2), order) for order in [(0, 1), (1, 0), *([ABOUT_OWN] if gathers else [])]]
    found = set()
    for mesh, order in divided:
        own = {"what": Target("layer", op.name), "mesh": mesh, "order": order}
        for pieces in (1, 2, 4, 8):
            if mesh or pieces > 1:
                found.add(Partition(**own, pieces=pieces))
            if pieces == 1:
                continue
            for count in range(1, BESIDE[op.name] + 1):
                found.add(Partition(**own, pieces=pieces, dim="tokens", operators=count))
            if order != ABOUT_OWN:
                found.add(Partition(**own, pieces=pieces, dim="width", operators=1))
        for count in range(1, BESIDE[op.name] + 1) if mesh and gathers else ():
            found.add(Partition(**own, dim="tokens", operators=count, delivered=True))
    return found


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("shape", ["llama", "gpt"])
def test_points_are_those_of_the_partition_space(nodes: int, shape: str) -> None:
    """None twice, and every one of them can be carried out."""
    model = replace(SMALL, family=shape, kv_heads=16 if shape == "gpt" else 8)
    bench = bench_of(nodes=nodes, model=model)
    seen = set()
    for part, graph, op in kinds_of(bench):
        found = list(points(part, graph, op, bench.profile))
        assert len(found) == len(set(found))
        assert set(found) == expected_points(op, several_nodes=nodes > 1)
        seen.add(op.name)
        for one in found:
            assert with_partitions({"layer": part}, (one,), bench.setting.layout)["layer"] != part
    assert seen == BESIDE.keys()


def test_nodes_are_those_that_the_profile_has_transfers_along() -> None:
    assert bench_of().profile.meshes.get("tp") == (2, 2)
    assert bench_of(nodes=1).profile.meshes.get("tp") is None
    assert bench_of().profile.meshes.get("dp") is None


# -- the best of them ----------------------------------------------------------------------------------------


def span_of(graph: Graph, names: set[str], profile: Profile) -> float:
    """From the first start to the last end of some operators, or of their pieces, on a rank.

    A rank issues in the order of the graph, waits for what the next operator needs, and is busy with the
    begin and with the end of every piece of a collective.
    """
    rank = 0.0
    links = dict.fromkeys(Stream, 0.0)
    made: dict[str, list[str]] = {}
    ready: dict[str, float] = {}
    moving: dict[str, tuple[float, float]] = {}
    """When a transfer ends, and what the rank does then."""
    pieces: dict[str, list[str]] = {}

    def wait(name: str) -> float:
        nonlocal rank
        if name in moving:
            end, take = moving.pop(name)
            rank = ready[name] = max(rank, end) + take
        return ready[name]

    for op in graph.operators:
        whole = op.piece.whole if op.piece else op.name
        if whole not in names:
            continue
        needed = dict.fromkeys(name for value in op.reads for name in made.get(value, ()))
        begin = max([0.0, *(wait(name) for name in needed)])
        ns = profile.solo(op.key)
        if not op.kind.communicates:
            rank = ready[op.name] = max(rank, begin) + ns
        elif op.piece is None:
            links[op.stream] = ready[op.name] = max(links[op.stream], begin) + ns
        else:
            issue, take = profile.issue_ns.get(op.key, 0), profile.take_ns.get(op.key, 0)
            rank = max(rank, begin) + issue
            links[op.stream] = max(links[op.stream], rank) + max(0, ns - issue - take)
            moving[op.name] = links[op.stream], take
        pieces.setdefault(whole, []).append(op.name)
        for value in op.writes:
            made[value] = [*pieces[whole]] if op.completes and value == op.writes[-1] else [op.name]
    for name in [*moving]:
        wait(name)
    return max(ready.values())


def spans(bench: CostedSetting, part: Part, graph: Graph, op: Operator) -> dict[Partition | None, float]:
    """Of the whole collective, and of every point."""
    beside = {op.name, *(one.name for one in operators_beside(graph, op, 2))}
    found: dict[Partition | None, float] = {None: span_of(graph, beside, bench.profile)}
    for one in points(part, graph, op, bench.profile):
        cut = with_partitions({"layer": part}, (one,), bench.setting.layout)["layer"]
        after = cut.forward if graph is part.forward else cut.backward
        found[one] = span_of(after, beside, with_piece_costs(bench.profile, [cut], 2))
    return found


def tier_of(bench: CostedSetting) -> tuple[Partition, ...]:
    """With costs of whole operators, as a measured profile has them."""
    return operation_tier(bench, measured(bench.members, bench.profile))


def check_best(bench: CostedSetting) -> set[Partition | None]:
    """Every collective's point is the least cut of those that take hardly longer than the shortest."""
    tier = {str(one.what): one for one in tier_of(bench)}
    for part, graph, op in kinds_of(bench):
        best = tier.get(f"layer/{op.name}")
        found = spans(bench, part, graph, op)
        alike = [one for one, ns in found.items() if ns <= min(found.values()) * 1.02]
        assert best in alike
        assert (best is None) == (None in alike)
        if best is not None:
            least = min(one.pieces * max(1, len(one.order)) for one in alike if one is not None)
            assert best.pieces * max(1, len(best.order)) == least
    return {tier.get(f"layer/{op.name}") for _, _, op in kinds_of(bench)}


@given(
    st.sampled_from([1e7, 1e9, 2e10, 1e12]),
    st.sampled_from([1e7, 1e9, 5e9, 1e12]),
    st.sampled_from([1, 2]),
    st.sampled_from(["none", "full"]),
    st.sampled_from([0, 2_000, 500_000]),
    st.sampled_from([0, 3_000, 500_000]),
)
@settings(max_examples=15)
def test_the_best_point_is_that_of_a_search_through_all(
    intra: float, inter: float, nodes: int, recompute: str, issue: int, take: int
) -> None:
    """With a rank that is busy with transfers, too."""
    bench = bench_of(intra, inter, nodes, recompute=recompute)
    collectives = [op.key for _, _, op in kinds_of(bench)]
    profile = replace(
        bench.profile,
        issue_ns=dict.fromkeys(collectives, issue),
        take_ns=dict.fromkeys(collectives, take),
    )
    check_best(replace(bench, profile=profile))


def test_slow_links_are_cut_for() -> None:
    slow = bench_of(inter=1e8)
    assert None not in check_best(slow)
    cut = tier_of(slow)
    assert [str(one.what) for one in cut] == [f"layer/{op.name}" for _, _, op in kinds_of(slow)]
    assert all(one.mesh == (2, 2) for one in cut)


def test_one_tensor_parallel_rank_has_nothing_to_cut() -> None:
    bench = modelled(cluster(nodes=2, gpus=2))(setting("braid", dp=4))
    assert tier_of(bench) == ()


@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("sequence", [4, 8, 16, 20])
def test_of_few_tokens_no_more_pieces_are_tried_than_there_are(shape: ModelShape, sequence: int) -> None:
    """A rank has 1, 2, 4, 5 of them."""
    bench = bench_of(inter=1e6, model=replace(shape, sequence=sequence))
    for part, graph, op in kinds_of(bench):
        for one in points(part, graph, op, bench.profile):
            with_partitions({"layer": part}, (one,), bench.setting.layout)
    for one in tier_of(bench):
        assert one.dim == "width" or one.pieces <= sequence // 4


# -- what replicas share -------------------------------------------------------------------------------------


def replicas(schedule: str = "braid", zero: int = 0, **links: float) -> CostedSetting:
    """Two nodes of two replicas."""
    own = setting(schedule, dp=4)
    own = replace(own, layout=replace(own.layout, zero=zero), distances=(0, 0))
    return modelled(cluster(nodes=2, gpus=2, **links))(own)


@pytest.mark.parametrize("zero", range(4))
def test_replicas_share_in_stages_where_that_is_shorter(zero: int) -> None:
    """Ranks of a node first where links between nodes are slow: then the least goes between them."""
    kinds = ("reduce_scatter", "all_gather") if zero else ("all_reduce",)
    order = {"reduce_scatter": (1, 0), "all_gather": (0, 1), "all_reduce": (1, 0)}
    found = sharing_partitions(replicas("braid", zero, intra=2e10, inter=1e9))
    assert found == tuple(
        Partition(what=Target("dp", kind), mesh=(2, 2), order=order[kind]) for kind in kinds
    )


@pytest.mark.parametrize("zero", [0, 2])
def test_what_is_rounded_is_shared_in_stages_only_where_half_of_it_gains(zero: int) -> None:
    """Where stages take as long as a whole sum of three bytes a number."""
    bench = replicas("braid", zero, intra=2e10, inter=1e9)
    kind = Kind.REDUCE_SCATTER if zero else Kind.ALL_REDUCE
    held = chunk_parameters(bench.members, bench.setting.layout, bench.setting.kinds, 0).dense
    whole = replace(bench.profile.transfer("dp", kind), latency_ns=0.0)
    three = whole.ns(held / len(bench.setting.kinds) * 3)
    stage = replace(whole, latency_ns=three / (1 if zero else 2), ns_per_byte=0.0)  # twice inside of a node
    transfers = {key: stage if key.startswith("dp.") else fit for key, fit in bench.profile.transfers.items()}
    profile = replace(bench.profile, transfers={**transfers, f"dp/{kind.value}": whole})
    for reduce_dtype, gains in ((None, True), ("bf16", False)):
        own = replace(bench.setting, reduce_dtype=reduce_dtype)
        found = sharing_partitions(replace(bench, setting=own, profile=profile))
        assert (f"dp/{kind.value}" in {str(one.what) for one in found}) == gains


def test_replicas_share_as_before_where_nothing_is_gained() -> None:
    assert sharing_partitions(replicas("megatron", inter=1e9)) == (), "nothing runs beside sums"
    alone = modelled(cluster(gpus=4))(setting("braid", dp=4))
    assert sharing_partitions(alone) == (), "one node"
    bench = replicas("braid", inter=1e9)
    assert sharing_partitions(bench)
    quick = replace(bench.profile.transfers["dp/all_reduce"], latency_ns=0.0, ns_per_byte=0.0)
    transfers = {**bench.profile.transfers, "dp/all_reduce": quick}
    assert sharing_partitions(replace(bench, profile=replace(bench.profile, transfers=transfers))) == ()


def test_stages_take_as_long_as_the_busier_links() -> None:
    profile = replicas(inter=1e9).profile

    def fit(dim: int, kind: Kind, payload: float) -> int:
        return profile.transfer(f"dp.2x2.{dim}", kind).ns(payload)

    payload = 4e6
    scatter = fit(1, Kind.REDUCE_SCATTER, payload), fit(0, Kind.REDUCE_SCATTER, payload / 2)
    assert stages_ns(profile, Kind.REDUCE_SCATTER, (2, 2), (1, 0), payload) == max(scatter)
    inside = fit(1, Kind.REDUCE_SCATTER, payload) + fit(1, Kind.ALL_GATHER, payload)
    between = fit(0, Kind.ALL_REDUCE, payload / 2)
    assert stages_ns(profile, Kind.ALL_REDUCE, (2, 2), (1, 0), payload) == max(inside, between)


def test_cuts_are_of_layers_of_what_replicas_share_and_of_both() -> None:
    spec = cluster(nodes=2, gpus=4, intra=1e10, inter=1e8)
    own = setting("braid", tp=2, dp=4)
    bench = modelled(spec)(own)
    layers, shared = operation_tier(bench, modelled(spec)), sharing_partitions(bench)
    assert layers
    assert shared
    assert list(cuts(bench, modelled(spec))) == [layers, shared, (*layers, *shared)]
    assert list(cuts(bench, modelled(spec), layers=False)) == [shared]
    of_one = modelled(cluster(gpus=2, intra=1e10))
    single = of_one(setting("braid", tp=2))
    assert list(cuts(single, of_one)) == [operation_tier(single, of_one)]
    for way in cuts(bench, modelled(spec)):
        cut = modelled(spec)(replace(own, partitions=way))
        assert (cut.members != bench.members) == bool(set(way) & set(layers))


@pytest.mark.parametrize("tier", ["reorders", "early_sums"])
def test_a_tier_that_is_left_out_decides_nothing(tier: str) -> None:
    """The operation tier has a test of its own."""
    spec = cluster(nodes=2, gpus=4, intra=5e8, inter=5e8)
    own = setting("braid", tp=4, dp=2, micro_batches=2, model=replace(SMALL, layers=2))
    every, without = (simulate_setting(one, spec) for one in (own, WithoutTier(**vars(own), tier=tier)))
    alone = [[sides for sides in one.choices.orders if len(sides) == 1] for one in (every, without)]
    begun = [
        sum(len(i.sums) for stage in one.code.schedule.stages for i in stage if isinstance(i, Block))
        for one in (every, without)
    ]
    assert alone[0]
    assert begun[0]
    assert every.setting.pipeline.startswith("together")
    if tier == "reorders":
        assert not alone[1]
        assert begun[1]
    else:
        assert alone[1]
        assert not begun[1]
        assert not without.setting.pipeline.startswith("together")
