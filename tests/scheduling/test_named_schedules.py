"""The table of named schedules, what they need, and what they refuse."""

from dataclasses import replace
from functools import partial

import pytest

from braid.scheduling.lowering.lower import Choices, training_schedule
from braid.scheduling.lowering.named import PIPELINES, POINTS, SCHEDULES, PairMethod
from braid.scheduling.lowering.pipelines import (
    bidirectional,
    eager_one_forward_one_backward,
    eager_paired_w,
    folded_sub_batches,
    folded_w,
    interleaved,
    layer_by_layer,
    one_forward_one_backward,
    paired_w,
    sub_batches,
    twin_ended,
    two_beside_one,
    weights_apart,
)
from braid.scheduling.lowering.zero_bubble import dual_pipe_v, zero_bubble_v
from braid.scheduling.planner.tiers import TIERS
from braid.scheduling.spec import ParallelLayout, Placement
from tests.scheduling.cases import code_of, exists, layout_for, parts_for, setting_for, several


def refused(name: str, stages: int, micro_batches: int, choices: Choices | None = None) -> str:
    """The message with which a schedule is refused."""
    setting = setting_for(name, layout_for(name, stages), micro_batches)
    with pytest.raises(ValueError) as error:
        training_schedule(setting, parts_for(setting), choices)
    return str(error.value)


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError) as error:
        setting_for("gpipe", ParallelLayout(), 1)
    assert str(error.value) == "schedule='gpipe' is not known; did you mean 'megatron'?"
    with pytest.raises(ValueError) as error:
        setting_for("tetris", ParallelLayout(), 1)
    assert str(error.value) == f"schedule='tetris' must be one of {', '.join(SCHEDULES)}"


def test_what_a_schedule_cannot_run_is_refused_with_key_value_and_remedy() -> None:
    assert refused("interleaved", 4, 6) == (
        "overlap.schedule=interleaved needs a multiple of parallel.pp=4 micro-batches a replica, "
        "train.global_batch and train.micro_batch give 6; make them give 8, or use overlap.schedule=megatron"
    )
    for name in ("dualpipev", "braid_v"):
        assert refused(name, 4, 7) == (
            "overlap.schedule=dualpipev and braid_v need 2 micro-batches a replica for each of parallel.pp=4 "
            "stages, train.global_batch and train.micro_batch give 7; make them give 8 or more, "
            "or use overlap.schedule=braid"
        )
    for p in range(1, 7):
        for m in range(1, 13):
            for name in ("interleaved", "dualpipev"):
                if not exists(name, p, m):
                    assert f"give {m}; make them give " in refused(name, p, m)


@pytest.mark.parametrize("name", ["dhelix", "braid", "braid_v", "bidirectional"])
def test_paired_blocks_need_a_decision(name: str) -> None:
    assert refused(name, 2, 8) == (
        f"overlap.schedule={name} needs a pairing: measure the run with `braid profile`, or make a plan "
        f"with `braid plan --output plan.yaml` and set overlap.plan"
    )


@pytest.mark.parametrize("name", ["dhelix", "braid", "bidirectional"])
def test_without_paired_blocks_no_decision_is_needed(name: str) -> None:
    """So few micro-batches that no two ever meet."""
    setting = setting_for(name, layout_for(name, 3), 2)
    assert all(len(sides) == 1 for sides in training_schedule(setting, parts_for(setting)).programs)


@pytest.mark.parametrize("name", ["wavelet", "dualpipev"])
def test_turns_need_no_decision(name: str) -> None:
    setting = setting_for(name, layout_for(name, 2), 6)
    schedule = training_schedule(setting, parts_for(setting))
    assert several(schedule)
    code_of(schedule, setting.layout)


def test_generators_want_their_layout() -> None:
    generators = {
        one_forward_one_backward: Placement.LINEAR,
        eager_one_forward_one_backward: Placement.LINEAR,
        weights_apart: Placement.LINEAR,
        folded_w: Placement.FOLDED,
        paired_w: Placement.FOLDED,
        eager_paired_w: Placement.FOLDED,
        twin_ended: Placement.FOLDED,
        two_beside_one: Placement.FOLDED,
        dual_pipe_v: Placement.FOLDED,
        zero_bubble_v: Placement.FOLDED,
        sub_batches: Placement.LINEAR,
        folded_sub_batches: Placement.FOLDED,
        interleaved: Placement.INTERLEAVED,
        bidirectional: Placement.BIDIRECTIONAL,
    }
    named = {kind.generator: kind.placement for kind in PIPELINES.values()}
    together = {one: placement for one, placement in named.items() if isinstance(one, partial)}
    assert {one.func for one in together} == {layer_by_layer}
    assert {one: placement for one, placement in named.items() if one not in together} == generators
    for generator, wanted in generators.items():
        for placement in Placement:
            if placement is not wanted:
                with pytest.raises(AssertionError):
                    generator(ParallelLayout(pp=2, placement=placement), 4)


def test_braid_searches_the_pipelines_of_all_its_points() -> None:
    # braid has all of the tiers. Sub-batches: on 1F1B placed otherwise, folded not searched yet.
    others = (*TIERS.values(), "braid_sub_batches", "braid_sub_batches_folded")
    points = [SCHEDULES[name] for name in POINTS if name not in others]
    assert {pipeline for kind in points for pipeline in kind.pipelines} == set(SCHEDULES["braid"].pipelines)
    assert all(len(kind.pipelines) == 1 and kind.searched for kind in points)
    alone = {kind.pipelines[0] for kind in points if kind.pairs is None}
    assert alone == {name for name, one in PIPELINES.items() if isinstance(one.generator, partial)}
    assert {kind.pairs for kind in points} == {PairMethod.ORDER, None}
    for kind in points:
        assert (kind.partitions, kind.reorders, kind.early_sums) == (True, True, True)


def test_without_a_tier_braid_is_otherwise_the_same() -> None:
    """Without the operation tier nothing is cut, without the layer tier backward passes by themselves run as
    they are, without the model tier sums wait for the end of a step, whose micro-batches go one by one."""
    braid = SCHEDULES["braid"]
    assert {tier: SCHEDULES[name] for tier, name in TIERS.items()} == {
        "operation": replace(braid, partitions=False),
        "layer": replace(braid, reorders=False),
        "model": replace(
            braid,
            early_sums=False,
            pipelines=tuple(name for name in braid.pipelines if not name.startswith("together")),
        ),
    }
    assert set(TIERS.values()) < set(POINTS)
    others = [kind for name, kind in SCHEDULES.items() if name != "braid" and name not in POINTS]
    assert not any(kind.searched or kind.partitions or kind.reorders for kind in others)
