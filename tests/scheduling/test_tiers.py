"""Centauri's operation tier in a run: in which ways a collective can be cut, and that the best is taken."""

from dataclasses import replace

import pytest

from braid.jobs.bench.overlap import WithoutTier
from braid.scheduling.generate.lower import Choices
from braid.scheduling.generate.partitions import with_partitions
from braid.scheduling.mesh.partition import Partition, Target, parse_partition
from braid.scheduling.model.operators import Kind
from braid.scheduling.model.units import chunk_parameters
from braid.scheduling.plan.decide import measured, modelled, simulate_setting
from braid.scheduling.plan.orders import CostedSetting
from braid.scheduling.plan.tiers import (
    cuts,
    operation_tier,
    points,
    sharing_partitions,
)
from braid.scheduling.schedule.schedule import Block
from tests.scheduling.cases import LLAMA
from tests.scheduling.partition_cases import collectives_of
from tests.scheduling.plans import SMALL, cluster, lowered, setting


def test_slow_links_are_cut_for() -> None:
    """With costs of whole operators, as a measured profile has them."""
    slow = modelled(cluster(nodes=2, gpus=2, inter=1e8))(setting("braid", tp=4))
    cut = operation_tier(slow, measured(slow.members, slow.profile))
    layer = slow.members["layer"]
    assert [str(one.what) for one in cut] == [f"layer/{op.name}" for _, op in collectives_of(layer)]
    assert all(one.mesh == (2, 2) for one in cut)


OTHERS = (
    "tp/all_gather pieces 4 of tokens with 1",
    "tp/all_gather mesh 2x2 order 0,1 pieces 2",
    "tp/reduce_scatter pieces 8 of tokens with 2",
    "tp/reduce_scatter mesh 2x2 order 0,1",
)


@pytest.mark.parametrize("inter", [1e8, 1e9])
def test_steps_with_the_best_cuts_are_not_slower_than_with_others(inter: float) -> None:
    """Where nothing else hides collectives, as the simulator has it."""
    bench_at = modelled(cluster(nodes=2, gpus=2, inter=inter))
    whole = bench_at(setting("megatron", tp=4, model=replace(SMALL, layers=2)))

    def step_ns(*partitions: Partition) -> float:
        return lowered(bench_at(replace(whole.setting, partitions=partitions)), Choices()).step_ns

    best = step_ns(*operation_tier(whole, bench_at))
    assert best < 0.95 * step_ns()
    for text in OTHERS:
        assert best <= step_ns(parse_partition(text)) * 1.02, text


@pytest.mark.parametrize("sequence", [4, 20])
def test_of_few_tokens_no_more_pieces_are_tried_than_there_are(sequence: int) -> None:
    """A rank has 1 or 5 of them."""
    bench = modelled(cluster(nodes=2, gpus=2))(
        setting("braid", tp=4, model=replace(LLAMA, sequence=sequence))
    )
    layer = bench.members["layer"]
    for graph, op in collectives_of(layer):
        for one in points(layer, graph, op, bench.profile):
            with_partitions({"layer": layer}, (one,), bench.setting.layout)


def test_one_tensor_parallel_rank_has_nothing_to_cut() -> None:
    bench = modelled(cluster(nodes=2, gpus=2))(setting("braid", dp=4))
    assert operation_tier(bench, measured(bench.members, bench.profile)) == ()


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
