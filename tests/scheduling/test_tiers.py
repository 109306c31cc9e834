"""Centauri's operation tier in a run: in which ways a collective can be cut, and that the best is taken."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest

from braid.jobs.bench.overlap import WithoutTier
from braid.scheduling.generate.partitions import with_partitions
from braid.scheduling.mesh.partition import Partition, Target
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


# -- the best of them ----------------------------------------------------------------------------------------


def tier_of(bench: CostedSetting) -> tuple[Partition, ...]:
    """With costs of whole operators, as a measured profile has them."""
    return operation_tier(bench, measured(bench.members, bench.profile))


def test_slow_links_are_cut_for() -> None:
    slow = bench_of(inter=1e8)
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
