"""Every schedule that runs, as what its ranks issue on CUDA: members of a communicator agree, nothing stands.

Communicators are made at set-up, and a barrier orders streams by events; what else brings a step to a
standstill is in `test_standstills`.
"""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from braid.scheduling import buckets
from braid.scheduling.link import link
from braid.scheduling.lowering.named import PairMethod
from braid.scheduling.lowering.partitions import mega_scale
from braid.scheduling.planner.decide import evaluate
from braid.scheduling.schedule import Schedule
from braid.scheduling.spec import ModelShape, ParallelLayout
from braid.scheduling.units import unit_parts
from tests.cuda.actions import FirstUse, Programs, unequal
from tests.cuda.issued import issued
from tests.cuda.kernels_in_flight import deadlock
from tests.cuda.programs import (
    CASES,
    EAGER,
    EVERY_CASE,
    EXPERTS,
    FORWARD,
    WARM,
    forward_passes,
    programs,
    sizes,
)
from tests.scheduling import plans
from tests.scheduling.cases import (
    GPT,
    LLAMA,
    LOWERED,
    exists,
    model_for,
    model_parts,
    pairs_of,
    valid_schedules,
)

pytestmark = pytest.mark.alone


def assert_sound(ranks: Programs) -> None:
    """Members agree, and the step ends. With communicators of groups, messages wait for more than with those
    of pairs, so what ends with these ends with those."""
    assert unequal(ranks) is None
    assert deadlock(ranks, EAGER) is None


@EVERY_CASE
def test_on_up_to_eight_stages(name: str) -> None:
    for p, m in sizes(name, range(1, 9)):
        assert_sound(programs(name, p, m))


@EVERY_CASE
def test_with_tensor_parallelism(name: str) -> None:
    for p in range(1, 9):
        for m in [m for m in (2, p, 2 * p) if exists(name, p, m)][:1]:
            assert_sound(programs(name, p, m, tp=2))


@pytest.mark.parametrize("name", LOWERED)
def test_with_replicas_on_hosts(name: str) -> None:
    """Sums of gradients over every axis; what goes between two hosts has lanes of its own."""
    for p, hosts in ((2, 1), (4, 2)):
        m = p if exists(name, p, p) else 2 * p
        assert_sound(programs(name, p, m, tp=2, dp=2, hosts=hosts))


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("name", LOWERED)
def test_with_shares(name: str, zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathers and scatters of buckets among all that passes issue, for parts that have one and several."""
    for p, tp, least in ((1, 1, 4096), (2, 2, buckets.LEAST_ELEMENTS), (4, 1, 4096)):
        monkeypatch.setattr(buckets, "LEAST_ELEMENTS", least)
        m = p if exists(name, p, p) else 2 * p
        for count in (m, 3 * m) if exists(name, p, m) else ():
            assert_sound(programs(name, p, count, tp, dp=2, zero=zero))


OVER: dict[str, dict[str, object]] = {
    "gathered": {"cp": 2, "tp": 2},
    "ring": {"cp": 4, "context": "ring"},
    "experts": {"dp": 2, "ep": 2, "tp": 2, "model": EXPERTS},
    "shares": {"dp": 4, "ep": 2, "zero": 3, "model": EXPERTS},
    "both": {"dp": 2, "ep": 2, "cp": 2, "context": "ring", "model": EXPERTS, "hosts": 2},
}
"""Layouts over cp and ep."""


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("name", ["megatron", "wavelet", "dhelix", "expert_overlap", "braid:w"])
def test_over_context_and_experts(name: str, over: str) -> None:
    """What goes around a ring, to experts and back; hosts wait until they know how many rows go where."""
    for p in (1, 2):
        for m in (p, 2 * p + 2):
            ranks = programs(name, p, m, **OVER[over])  # type: ignore[arg-type]
            assert_sound(ranks)
            assert unequal(ranks, FirstUse.WARM) is None
            assert deadlock(ranks, WARM) is None


@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("name", LOWERED)
def test_with_a_tied_head(name: str, model: ModelShape) -> None:
    for p in (2, 3):
        for zero in range(4):
            assert_sound(programs(name, p, 2 * p, dp=2, zero=zero, model=replace(model, tied_head=True)))


def test_warmed_up_pairs_end_where_communicators_of_groups_do() -> None:
    for name in CASES:
        ranks = programs(name, 4, 8)
        assert unequal(ranks, FirstUse.WARM) is None
        assert deadlock(ranks, WARM) is None


@pytest.mark.parametrize("name", [name for name in LOWERED if pairs_of(name) is PairMethod.ORDER])
def test_passes_that_leave_ends(name: str) -> None:
    for p in (1, 2, 3):
        assert_sound(programs(name, p, 2 * p + 1, tp=2, ends=True))


@pytest.mark.parametrize("name", ["dhelix", "braid", "braid:eager_w", "braid:v"])
def test_orders_that_were_searched(name: str) -> None:
    """With a modelled profile; in ``dhelix``'s way of pairing, with and without barriers that synchronise."""
    own = plans.setting(name, tp=2, pp=2, micro_batches=6, model=replace(plans.SMALL, layers=4))
    outcome = evaluate(own, plans.cluster(gpus=4))
    assert_sound(issued(outcome.code, outcome.setting.model, barriers=False))
    stands = deadlock(issued(outcome.code, outcome.setting.model, barriers=True), WARM)
    assert (stands is not None) == (pairs_of(name) is PairMethod.BARRIERS)


def test_recomputed_layers_in_pieces_and_units() -> None:
    for recompute in ("selective", "full"):
        for name in ("megatron", "wavelet", "braid:w", "dualpipev"):
            assert_sound(programs(name, 2, 5, tp=2, recompute=recompute))
    for pieces in (2, 4):
        assert_sound(programs("intra_batch", 2, 5, tp=2, partitions=mega_scale(pieces)))
    for name in ("megatron", "braid:w"):
        assert_sound(programs(name, 2, 5, tp=2, model=LLAMA, unit_layers=2))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(valid_schedules())
def test_what_validation_lets_through(drawn: tuple[Schedule, ParallelLayout]) -> None:
    """Schedules with receives that are started far earlier, other strands, early sums, ends."""
    schedule, layout = drawn
    model = model_for(layout)
    parts = unit_parts(model_parts(LLAMA, layout.tp), layout, model.kinds, schedule.unit_layers)
    code = link(schedule, layout, model.kinds, parts)
    ranks = issued(code, model, barriers=False)
    assert unequal(ranks) is None
    assert deadlock(ranks, WARM) is None


@pytest.mark.parametrize("name", FORWARD)
def test_forward_passes_alone(name: str) -> None:
    for p in (p for p in range(1, 9) if exists(name, p, 2 * p)):
        for m in (1, 2, p, p + 1, 2 * p):
            for dp, zero in ((1, 0), *(((2, 1), (2, 3)) if p < 4 else ())):
                ranks = forward_passes(name, p, m, dp=dp, zero=zero)
                assert unequal(ranks) is None
                assert deadlock(ranks, WARM) is None
