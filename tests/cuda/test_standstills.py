"""Every schedule that runs, as what its ranks issue on CUDA: members of communicators agree, nothing stands.

Communicators are made at set-up (`Mesh.warm_up`). The check itself must find what is made up to be wrong.
"""

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from braid.scheduling import buckets
from braid.scheduling.link import link
from braid.scheduling.lowering.lower import training_schedule, validation_schedule
from braid.scheduling.lowering.named import SCHEDULES, PairMethod
from braid.scheduling.lowering.partitions import mega_scale
from braid.scheduling.planner.decide import evaluate
from braid.scheduling.schedule import Schedule
from braid.scheduling.spec import ModelShape, ParallelLayout
from braid.scheduling.units import unit_parts
from tests.cuda.issued import Action, Call, Compute, Group, Programs, Start, Synchronise, Wait, issued
from tests.cuda.standstills import standstill, streams_of, unequal
from tests.scheduling import plans
from tests.scheduling.cases import (
    GPT,
    LLAMA,
    LOWERED,
    choices_for,
    exists,
    layout_for,
    model_for,
    model_parts,
    parts_for,
    setting_for,
    valid_schedules,
)

pytestmark = pytest.mark.alone

SMALL = replace(LLAMA, layers=1)
"""A layer for every chunk."""
EXPERTS = replace(SMALL, family="moe", experts=8, top_k=2, balance_loss=0.1)
"""The host has to know how many rows go where, before it can go on."""
NAMES = pytest.mark.parametrize("name", LOWERED)


def programs(
    name: str,
    stages: int,
    micro_batches: int,
    tp: int = 1,
    *,
    dp: int = 1,
    cp: int = 1,
    ep: int = 1,
    zero: int = 0,
    model: ModelShape = SMALL,
    hosts: int = 1,
    barriers: bool = False,
    ends: bool = False,
    **more: object,
) -> Programs:
    """What all ranks issue. hosts: so many. barriers: see `issued`. ends: see `choices_for`."""
    layout = replace(layout_for(name, stages, tp, dp, zero), cp=cp, ep=ep)
    setting = setting_for(name, layout, micro_batches, model=model, **more)
    parts = parts_for(setting)
    schedule = training_schedule(setting, parts, choices_for(setting, ends=ends))
    code = link(schedule, layout, setting.model.kinds, parts)
    places = [str(rank * hosts // layout.ranks) for rank in range(layout.ranks)]
    return issued(code, setting.model, places, barriers=barriers)


def assert_sound(ranks: Programs) -> None:
    """Members agree, the step ends, and every stream finds one of torch's 32 hardware queues for itself."""
    assert unequal(ranks) is None
    assert standstill(ranks) is None
    assert streams_of(ranks) <= 32


@NAMES
def test_on_one_to_eight_stages(name: str) -> None:
    for p in (1, 2, 3, 4, 8):
        for m in (m for m in {1, 3, p, 2 * p + 2} if exists(name, p, m)):
            assert_sound(programs(name, p, m))


LAYOUTS: dict[str, dict[str, Any]] = {
    "hosts": {"tp": 2, "dp": 2, "hosts": 2},
    "ZeRO 1": {"dp": 2, "zero": 1},
    "ZeRO 2": {"dp": 2, "zero": 2},
    "ZeRO 3, tp": {"tp": 2, "dp": 2, "zero": 3},
    "tied": {"dp": 2, "model": replace(GPT, layers=1, tied_head=True), "zero": 3},
    "gathered": {"cp": 2, "tp": 2},
    "ring": {"cp": 4, "context": "ring"},
    "experts": {"dp": 2, "ep": 2, "tp": 2, "model": EXPERTS},
    "experts, shares": {"dp": 4, "ep": 2, "zero": 3, "model": EXPERTS},
    "experts, ring": {"dp": 2, "ep": 2, "cp": 2, "context": "ring", "model": EXPERTS, "hosts": 2},
    "recomputed": {"tp": 2, "recompute": "selective"},
}


@NAMES
def test_with_every_axis(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two stages, three layouts for each schedule; parts have several buckets where states are cut."""
    first = LOWERED.index(name)
    for layout in [*LAYOUTS][first % 4 :: 4]:
        if "zero" in LAYOUTS[layout]:
            monkeypatch.setattr(buckets, "LEAST_ELEMENTS", 4096)
        assert_sound(programs(name, 2, 6, **LAYOUTS[layout]))


def test_passes_that_leave_ends_pieces_and_units() -> None:
    for name in (name for name in LOWERED if name.startswith("braid") and "sub" not in name):
        assert_sound(programs(name, 3, 7, tp=2, ends=True))
    for pieces in (2, 4):
        assert_sound(programs("intra_batch", 2, 5, tp=2, partitions=mega_scale(pieces)))
    assert_sound(programs("braid", 2, 5, tp=2, model=LLAMA, unit_layers=2))


@pytest.mark.parametrize("name", ["dhelix", "braid", "braid:eager_w", "braid:v"])
def test_orders_that_were_searched(name: str) -> None:
    """With a modelled profile; a barrier that synchronised the device would let DHelix's stand."""
    own = plans.setting(name, tp=2, pp=2, micro_batches=6, model=replace(plans.SMALL, layers=4))
    outcome = evaluate(own, plans.cluster(gpus=4))
    assert_sound(issued(outcome.code, outcome.setting.model))
    stands = standstill(issued(outcome.code, outcome.setting.model, barriers=True))
    assert (stands is not None) == (SCHEDULES[name.partition(":")[0]].pairs is PairMethod.BARRIERS)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(valid_schedules())
def test_what_validation_lets_through(drawn: tuple[Schedule, ParallelLayout]) -> None:
    """Schedules with receives that are started far earlier, other strands, early sums, ends."""
    schedule, layout = drawn
    model = model_for(layout)
    parts = unit_parts(model_parts(LLAMA, layout.tp), layout, model.kinds, schedule.unit_layers)
    assert_sound(issued(link(schedule, layout, model.kinds, parts), model))


@pytest.mark.parametrize("name", ["megatron", "interleaved", "megatron:folded"])
def test_forward_passes_alone(name: str) -> None:
    """A schedule for each placement: forward passes alone follow from that."""
    for p in (1, 2, 4, 8):
        for m in (1, 2, p, p + 1, 2 * p):
            for dp, zero in ((1, 0), (2, 1), (2, 3)) if p < 4 else ((1, 0),):
                layout = layout_for(name, p, dp=dp, zero=zero)
                setting = setting_for(name, layout, 2 * p, model=SMALL)
                parts = parts_for(setting)
                schedule = validation_schedule(SMALL, layout, m, parts)
                assert_sound(issued(link(schedule, layout, setting.model.kinds, parts), setting.model))


@NAMES
def test_slots_and_queues(name: str) -> None:
    """With room for four kernels of communicators on a device no order stands, with room for one some does.
    In one hardware queue a receive that is started early holds up what is computed meanwhile."""
    cases = [programs(name, p, m) for p in (2, 3) for m in (p, 2 * p + 1) if exists(name, p, m)]
    cases = cases or [programs(name, p, 2 * p) for p in (2, 3)]
    seeds = (None, *(random.randrange(2**31) for _ in range(4)))
    assert not any(standstill(ranks, slots=4, seed=seed) for ranks in cases for seed in seeds)
    assert any(standstill(ranks, slots=1, seed=seed) for ranks in cases for seed in (None, 1, 2))
    assert standstill(programs(name, 4, 1 if exists(name, 4, 1) else 8), queues=1) is not None
    ranks = programs(name, 4, 8, tp=2)
    assert standstill(ranks, queues=streams_of(ranks)) is None


# -- what is wrong is found ----------------------------------------------------------------------------------

PAIR, OTHER = Group("pair", (0, 1)), Group("other", (0, 1))


def summed(name: str, group: Group = PAIR, elements: int = 8, side: str = "") -> list[Action]:
    """A sum, waited for at once."""
    return [Start(name, side or group.name, (Call("all_reduce", group, elements, what=name),)), Wait(name)]


def message(kind: str, name: str, peer: int) -> Start:
    """A message that one rank sends to the other, on a channel for each direction."""
    group = Group("down" if (kind == "send") is (peer == 1) else "up", (0, 1))
    return Start(name, f"{kind} {group.name}", (Call(kind, group, 8, peer),))


def test_two_communicators_used_in_opposite_orders() -> None:
    """Each on a side stream of its own they stand where one kernel finds room, on a common one always."""
    (a, wait_a), (b, wait_b) = summed("a", PAIR), summed("b", OTHER)
    apart = [a, b, wait_a, wait_b], [b, a, wait_b, wait_a]
    assert unequal(apart) is None
    assert standstill(apart, slots=2) is None
    assert standstill(apart, slots=1) is not None
    first, second = summed("a", PAIR, side="common"), summed("b", OTHER, side="common")
    assert standstill([[*first, *second], [*second, *first]]) is not None


def test_issues_that_are_swapped_left_out_or_of_another_size() -> None:
    a, b, alike = summed("a", elements=8), summed("b", elements=16), summed("c", elements=8)
    assert unequal([[*a, *b], [*b, *a]]) == (
        "call 0: rank 0 issues all_reduce of 8 on pair: a, rank 1 issues all_reduce of 16 on pair: b"
    )
    assert unequal([[*a, *alike], [*alike, *a]]) is not None, "NCCL would mix up their data"
    assert unequal([[*a, *b], a]) == (
        "call 1: rank 0 issues all_reduce of 16 on pair: b, rank 1 issues nothing more"
    )
    stands = standstill([[*a, *b], a])
    assert stands is not None
    assert "rank 0: b runs until others do" in stands


def test_messages_that_wait_for_each_other() -> None:
    """A receive that is issued after what it feeds; an answer that is awaited before the question."""
    sends = [message("send", "x", 1), Wait("x"), Synchronise("the end")]
    late = [Wait("x"), Compute("reads x"), message("receive", "x", 0), Synchronise("the end")]
    stands = standstill([sends, late])
    assert stands is not None
    assert "rank 1: its host waits for Wait(name='x')" in stands
    asks = [
        [message("receive", "y", 1), Wait("y"), Compute("reads y"), message("send", "x", 1), Wait("x")],
        [message("receive", "x", 0), Wait("x"), Compute("reads x"), message("send", "y", 0), Wait("y")],
    ]
    assert standstill(asks) is not None


@pytest.mark.parametrize(
    ("name", "over"),
    [
        ("megatron", {"tp": 2}),
        ("dualpipev", {"tp": 2}),
        ("megatron", {"cp": 4, "context": "ring"}),
        ("expert_overlap", {"dp": 2, "ep": 2, "model": EXPERTS}),
    ],
    ids=["tp", "tp of a V", "ring", "experts"],
)
def test_every_start_that_one_rank_leaves_out_or_swaps_is_found(name: str, over: dict[str, Any]) -> None:
    """Of the ranks of one stage, one issues otherwise than the linked code says."""
    ranks = [*programs(name, 2, 4, **over)]
    own = [*ranks[1]]
    starts = [n for n, action in enumerate(own) if isinstance(action, Start)]
    for place, at in enumerate(starts[::5]):
        start = own[at]
        assert isinstance(start, Start)
        ranks[1] = [action for action in own if action not in (start, Wait(start.name))]
        assert unequal(ranks) is not None, start
        assert place % 4 or standstill(ranks) is not None, start
    alike = [(a, b) for a, b in pairwise(starts) if _group(own[a]) == _group(own[b])]
    assert len(alike) > 15
    for a, b in alike[::5]:
        ranks[1] = [*own]
        ranks[1][a], ranks[1][b] = own[b], own[a]
        assert unequal(ranks) is not None or standstill(ranks) is not None, own[a]


def _group(action: Action) -> Group:
    assert isinstance(action, Start)
    return action.calls[0].group
