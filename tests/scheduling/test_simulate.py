"""Laws of the simulator: sums and maxima, bubbles, bandwidth, spans, exactness of remembered blocks."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.scheduling.cost.prices import LANES, NORM_BYTES, Prices
from braid.scheduling.generate.lower import Choices
from braid.scheduling.generate.named import SCHEDULES
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.model.operators import Kind
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.plan.decide import modelled, simulate_setting
from braid.scheduling.plan.orders import CostedSetting
from braid.scheduling.schedule.operations import (
    Compute,
    Gather,
    Message,
    Node,
    Norm,
    Reduce,
    Start,
    Step,
    Update,
    name_of,
)
from braid.scheduling.schedule.order import parse_orders
from tests.scheduling.plans import SMALL, cluster, fastest, free_ends, lowered, setting
from tests.spans import communication_of, merge


def with_free_ends(bench: CostedSetting) -> CostedSetting:
    return replace(bench, profile=free_ends(bench.profile))


@given(tp=st.sampled_from([1, 2, 4]), m=st.integers(1, 6), recompute=st.sampled_from(["none", "full"]))
@settings(max_examples=20, deadline=None)
def test_without_overlap_a_step_is_the_sum_of_its_operators(tp: int, m: int, recompute: str) -> None:
    bench = modelled(cluster(gpus=tp))(setting(tp=tp, micro_batches=m, recompute=recompute))
    result = fastest(bench).simulation
    total = 0.0
    for name, part in bench.parts.items():
        count = bench.setting.model.layers if name == "layer" else 1
        graphs = (part.forward, part.backward)
        total += count * m * sum(bench.profile.solo(op.key) for g in graphs for op in g.operators)
    update = [one for one in result.ranks[0].executed if not isinstance(one.operation.what, Message | Node)]
    names = {"norm", "optimizer"} | ({"gradients.0 tp", "norm tp"} if tp > 1 else set())
    assert {name_of(one.operation.what) for one in update} == names
    total += sum(one.end - one.start for one in update)
    assert result.step_ns == pytest.approx(total, rel=1e-9)
    numbers = result.numbers(1)
    assert numbers.exposed_seconds == pytest.approx(numbers.communication_seconds)
    assert numbers.bubble_fraction == pytest.approx(0.0, abs=1e-9)


EXPERTS = replace(SMALL, family="moe", ffn=1408, experts=4, top_k=2)


@pytest.mark.parametrize(
    ("schedule", "model", "degrees"),
    [
        ("ddp", EXPERTS, {"tp": 2, "dp": 4, "ep": 2}),
        ("braid:w", SMALL, {"tp": 2, "pp": 2, "dp": 2}),
        ("megatron", replace(SMALL, tied_head=True), {"pp": 2, "dp": 2}),
    ],
)
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("reduce_dtype", [None, "bf16"])
def test_sums_gathers_and_the_update_have_their_price(
    schedule: str, model: ModelShape, degrees: Mapping[str, int], zero: int, reduce_dtype: str | None
) -> None:
    """Of so many parameters, in bytes of the dtype that is sent, on the link by itself; with rounding a rank
    reads and writes six bytes of each."""
    own = setting(schedule, model=model, reduce_dtype=reduce_dtype, **degrees)
    own = replace(own, layout=replace(own.layout, zero=zero))
    layout, bench = own.layout, modelled(cluster(nodes=2, gpus=own.layout.ranks // 2))(own)
    code, profile = fastest(bench).code, bench.profile
    prices, sent, shares = Prices(code, profile, "bf16", reduce_dtype), 2 if reduce_dtype else 4, 1
    if zero:
        shares = layout.dp
    stages = [map(code.parameters, layout.chunks_of(stage)) for stage in range(layout.pp)]
    most = max(sum(held.total for held in stage) for stage in stages) / shares
    table = model.vocabulary // layout.tp * model.hidden // (shares if zero > 1 else 1)
    seen = set()
    for operation in (o for stage in code.stages for stretch in stage for o in stretch.operations):
        if not isinstance(operation, Compute | Start):
            continue
        price, copied = prices.of(operation), 0.0
        match operation.what:
            case Reduce(None, axis):
                expected = profile.transfer(axis, Kind.ALL_REDUCE).ns(NORM_BYTES)
            case Reduce(int() as chunk, axis, bucket):
                held = code.parameters(chunk, bucket)
                counts = {"tp": held.whole, "dp": held.dense, "edp": held.experts, "ends": table}
                kind = Kind.REDUCE_SCATTER if zero and axis in ("dp", "edp") else Kind.ALL_REDUCE
                along, count = "pp" if axis == "ends" else axis, counts[axis]
                expected = profile.transfer(along, kind).ns(count * sent) if count else 0.0
                copied = 6 / 2 * count * profile.copy_ns_per_byte if reduce_dtype else 0.0
            case Gather(chunk, axis, bucket):
                held = code.parameters(chunk, bucket)
                count = {"dp": held.dense, "edp": held.experts}[axis]
                expected = profile.transfer(axis, Kind.ALL_GATHER).ns(count * 2)
            case Norm():
                expected = profile.norm_ns_per_parameter * most
            case Step():
                expected = profile.optimizer_ns_per_parameter * most
            case Update(chunk, bucket):
                held = code.parameters(chunk, bucket)
                expected = profile.optimizer_ns_per_parameter * held.total / layout.dp
            case _:
                continue
        assert (price.ns, price.busy_ns) == pytest.approx((expected, copied)), operation
        seen.add(type(operation.what))
    early = zero in (1, 2) and own.kind.early_sums
    assert seen >= {Reduce, Norm, Update if early else Step} | ({Gather} if zero else set())


@given(compute=st.integers(1, 10**6), moved=st.integers(1, 10**6))
@settings(max_examples=60, deadline=None)
def test_perfect_overlap_is_the_maximum_and_none_the_sum(compute: int, moved: int) -> None:
    """One compute operator beside one collective, OEF 1 and OEF 0."""
    for oef, expected in ((1.0, max(compute, moved)), (0.0, compute + moved)):
        assert layer_beside(compute, moved, oef) == pytest.approx(expected, rel=1e-6)


@given(
    compute=st.integers(1, 10**6),
    moved=st.integers(1, 10**6),
    issue=st.integers(0, 10**5),
    take=st.integers(0, 10**5),
)
@settings(max_examples=60, deadline=None)
def test_what_the_rank_does_for_a_transfer_is_never_hidden(
    compute: int, moved: int, issue: int, take: int
) -> None:
    """Starting takes time of its own; going on afterwards, which is a part of the solo time, moves out."""
    handling = {"issue_ns": {GATHER: issue}, "take_ns": {GATHER: take}}
    expected = max(issue + compute, moved - take) + take
    assert layer_beside(compute, moved, 1.0, **handling) == pytest.approx(expected, rel=1e-6)
    serial = layer_beside(compute, moved, 1.0, together=False, **handling)
    assert serial == pytest.approx(compute + moved, rel=1e-6), "alone, it is all in the solo time"


GATHER, GEMM = "layer/mlp_gather.grad", "layer/mlp_in.wgrad"


def layer_beside(
    compute: int, moved: int, oef: float, *, together: bool = True, **costs: dict[str, int]
) -> float:
    """What a layer takes in which nothing costs but a gather and a GEMM, one beside the other or after it."""
    own = setting("intra_batch", tp=2, micro_batches=1)
    bench = with_free_ends(modelled(cluster(gpus=2, oef=oef))(own))
    solo = dict.fromkeys(bench.profile.solo_ns, 0) | {GATHER: moved, GEMM: compute}
    alone = replace(bench, profile=replace(bench.profile, solo_ns=solo, **costs))
    order = [op.name for op in bench.members["layer"].backward.operators]
    order.remove("mlp_in.wgrad")
    order.insert(order.index("mlp_gather.grad") + (1 if together else 0), "mlp_in.wgrad")
    result = lowered(alone, Choices(orders=parse_orders({"B:layer": order})))
    return result.step_ns / own.model.layers


@given(
    schedule=st.sampled_from(sorted(SCHEDULES)),
    rate=st.floats(1e9, 1e11),
    faster=st.floats(1.0, 50.0),
    m=st.integers(4, 6),
)
@settings(max_examples=20, deadline=None)
def test_more_bandwidth_is_never_slower(schedule: str, rate: float, faster: float, m: int) -> None:
    """The same decisions on faster links; without contention, as then orders are monotone."""
    m = 2 * (m // 2)
    slow_cluster = cluster(nodes=2, gpus=2, oef=1.0, intra=rate, inter=rate / 3)
    fast_cluster = cluster(nodes=2, gpus=2, oef=1.0, intra=rate * faster, inter=rate * faster / 3)
    one = setting(schedule, tp=2, pp=2, micro_batches=m)
    slow, fast = modelled(slow_cluster)(one), modelled(fast_cluster)(one)
    decided = fastest(slow)
    assert lowered(fast, decided.choices).step_ns <= decided.step_ns * (1 + 1e-9)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_spans_hold_every_operator_once_and_agree_with_the_numbers(schedule: str) -> None:
    spec = cluster(nodes=2, gpus=2)
    outcome = simulate_setting(setting(schedule, tp=2, pp=2, micro_batches=4, dp=1), spec)
    bench, spans = outcome.bench, list(outcome.simulation.spans())
    model = bench.setting.model
    for stage, rank in enumerate((0, 2)):
        own = [span for span in spans if span.rank == rank]
        layers = [s for s in own if 0 <= s.layer < model.layers]
        count = len(bench.members["layer"].forward.operators) + len(bench.members["layer"].backward.operators)
        held = sum(
            len(bench.setting.layout.layers_of(c, model.layers))
            for c in bench.setting.layout.chunks_of(stage)
        )
        assert len(layers) == 4 * held * count
        assert len({(s.micro_batch, s.chunk, s.layer, s.operator) for s in layers}) == len(layers)
        compute = merge((s.start_ns, s.end_ns) for s in own if s.stream is Stream.COMPUTE)
        ordered = sorted((s.start_ns, s.end_ns) for s in own if s.stream is Stream.COMPUTE)
        assert all(a[1] <= b[0] + 1 for a, b in pairwise(ordered)), "one at a time"
        assert compute[-1][1] <= outcome.simulation.step_ns + 1
    totals = [communication_of(span for span in spans if span.rank == rank) for rank in (0, 2)]
    exposed = sum(exposed for _, exposed in totals) / 2e9
    assert outcome.numbers.exposed_seconds == pytest.approx(exposed, rel=1e-4, abs=1e-6)
    moved = sum(moved for moved, _ in totals) / 2e9
    assert outcome.numbers.communication_seconds == pytest.approx(moved, rel=1e-4, abs=1e-6)


def test_two_transfers_on_one_link_share_it() -> None:
    """Gradients reduced beside messages between stages take longer than either alone."""
    spec = cluster(nodes=4, gpus=1)
    own = setting("braid", pp=2, dp=2, micro_batches=4)
    outcome = simulate_setting(replace(own, layout=replace(own.layout, zero=1)), spec)
    lanes = [LANES.index(name) for name in ("data", "send")]
    moved = [e for rank in outcome.simulation.ranks for e in rank.executed if e.price.lane in lanes]
    assert any(e.end - e.start > e.price.ns * 1.01 for e in moved)
    assert all(e.end - e.start >= e.price.ns * (1 - 1e-9) for e in moved)


def test_a_missing_cost_is_an_error() -> None:
    bench = modelled(cluster(gpus=2))(setting(tp=2))
    solo = dict(bench.profile.solo_ns)
    del solo["layer/qkv"]
    outcome = lowered(replace(bench, profile=replace(bench.profile, solo_ns=solo)), Choices())
    with pytest.raises(ValueError, match="no cost of operator 'layer/qkv'"):
        _ = outcome.step_ns
