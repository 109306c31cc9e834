"""Laws of the simulator: sums and maxima, bubbles, bandwidth, spans, exactness of remembered blocks."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.scheduling.cost.engine import Executed, RankRun
from braid.scheduling.cost.prices import LANES, NORM_BYTES, Prices
from braid.scheduling.generate.lower import Choices
from braid.scheduling.generate.named import SCHEDULES
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.model.operators import Kind
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.model.units import chunk_parameters
from braid.scheduling.plan.decide import modelled, simulate_setting
from braid.scheduling.plan.list_schedule import issue_ns, turns_order
from braid.scheduling.plan.orders import CostedSetting, layer_pair
from braid.scheduling.schedule.operations import (
    Clip,
    Compute,
    Gather,
    Message,
    Node,
    Norm,
    Reduce,
    Start,
    Step,
    Update,
    Wait,
    name_of,
)
from braid.scheduling.schedule.order import parse_orders
from tests.scheduling.plans import SMALL, cluster, fastest, free_ends, lowered, paired_runs, setting
from tests.spans import communication_of, merge


def layer_ns(bench: CostedSetting) -> int:
    """Solo times of a layer's two passes added up."""
    graphs = bench.members["layer"].forward, bench.members["layer"].backward
    return sum(bench.profile.solo(op.key) for graph in graphs for op in graph.operators)


def with_free_ends(bench: CostedSetting) -> CostedSetting:
    return replace(bench, profile=free_ends(bench.profile))


def shared(rank: RankRun) -> Mapping[str, list[Executed]]:
    """Sums, gathers and the update in the order of their begin, by name and, of buckets, number."""
    found: dict[str, list[Executed]] = defaultdict(list)
    within = [
        replace(one, start=run.start + one.start, end=run.start + one.end)
        for run in rank.blocks
        for one in run.course.executed
    ]
    for executed in sorted([*rank.executed, *within], key=lambda one: one.start):
        assert isinstance(executed.operation, Compute | Start)
        if not isinstance(executed.operation.what, Message | Node):
            found[shared_name(executed.operation.what)].append(executed)
    return found


def shared_name(what: Reduce | Gather | Norm | Step | Clip | Update) -> str:
    """The name of what is shared, with the number of its bucket."""
    if isinstance(what, Update):
        return f"{name_of(what)}.{what.chunk} {what.bucket}"
    bucket = what.bucket if isinstance(what, Reduce | Gather) else None
    return name_of(what) if bucket is None else f"{name_of(what)} {bucket}"


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
    update = shared(result.ranks[0])
    assert set(update) == {"norm", "optimizer"} | ({"gradients.0 tp", "norm tp"} if tp > 1 else set())
    total += sum(one.end - one.start for (one,) in update.values())
    assert result.step_ns == pytest.approx(total, rel=1e-9)
    numbers = result.numbers(1)
    assert numbers.exposed_seconds == pytest.approx(numbers.communication_seconds)
    assert numbers.bubble_fraction == pytest.approx(0.0, abs=1e-9)


TIED = replace(SMALL, tied_head=True)
EXPERTS = replace(SMALL, family="moe", ffn=1408, experts=4, top_k=2)


@pytest.mark.parametrize(
    ("schedule", "model", "degrees"),
    [
        ("megatron", SMALL, {}),
        ("megatron", SMALL, {"tp": 2, "pp": 2, "dp": 2}),
        ("ddp", EXPERTS, {"tp": 2, "dp": 4, "ep": 2}),
        ("braid:w", SMALL, {"tp": 2, "pp": 2, "dp": 2}),
        ("megatron", TIED, {"pp": 2, "dp": 2}),
        ("megatron", EXPERTS, {"tp": 2, "dp": 4, "ep": 2}),
    ],
)
@pytest.mark.parametrize("zero", range(4))
def test_every_sum_and_the_update_have_their_price(
    schedule: str, model: ModelShape, degrees: Mapping[str, int], zero: int
) -> None:
    """By hand: what is summed over which ranks, and how long that takes on its link by itself.

    Sums that begin in blocks, and what is in shares: bucket by bucket, as often as the code has them; so is
    the update that gathers for the next step follow.
    """
    own = setting(schedule, model=model, **degrees)
    if zero and own.layout.dp == 1:
        pytest.skip("one replica has no shares")
    own = replace(own, layout=replace(own.layout, zero=zero))
    gpus = own.layout.ranks
    bench = modelled(cluster(nodes=2, gpus=gpus // 2) if gpus > 1 else cluster(gpus=1))(own)
    result, layout, profile = fastest(bench).simulation, own.layout, bench.profile
    table = model.vocabulary // layout.tp * model.hidden
    in_blocks = zero > 1 or (layout.dp > 1 and own.kind.early_sums)
    for stage, rank in enumerate(result.ranks):
        expected: dict[str, float] = {}
        for chunk in layout.chunks_of(stage):
            held = chunk_parameters(bench.members, layout, model.kinds, chunk)
            buckets = [one.parameters for one in result.code.buckets.of(chunk)]
            assert sum(one.total for one in buckets) == held.total
            summed = {f" {number}": one for number, one in enumerate(buckets)} if in_blocks else {"": held}
            for suffix, one in summed.items():
                if layout.tp > 1 and one.whole:
                    name = f"gradients.{chunk} tp{suffix}"
                    expected[name] = profile.transfer("tp", Kind.ALL_REDUCE).ns(one.whole * 4)
            if model.tied_head:
                ways = layout.dp if zero > 1 else 1
                name = f"gradients.{chunk} ends"
                expected[name] = profile.transfer("pp", Kind.ALL_REDUCE).ns(table // ways * 4)
            for suffix, one in summed.items():
                for axis, count in (("dp", one.dense), ("edp", one.experts)):
                    if layout.dp > 1 and count:
                        kind = Kind.REDUCE_SCATTER if zero else Kind.ALL_REDUCE
                        name = f"gradients.{chunk} {axis}{suffix}"
                        expected[name] = profile.transfer(axis, kind).ns(count * 4)
            for number, one in enumerate(buckets if zero else ()):
                for axis, count in (("dp", one.dense), ("edp", one.experts)):
                    if count:
                        name = f"parameters.{chunk} {axis} {number}"
                        expected[name] = profile.transfer(axis, Kind.ALL_GATHER).ns(count * 2)
        for axis in ("tp", "pp", "dp") if zero else ("tp", "pp", "ep"):
            if layout.degree(axis) > 1:
                expected[f"norm {axis}"] = profile.transfer(axis, Kind.ALL_REDUCE).ns(NORM_BYTES)
        most = max(
            sum(result.code.parameters(chunk).total for chunk in layout.chunks_of(number))
            for number in range(layout.pp)
        )
        share = most / (layout.dp if zero else 1)
        expected["norm"] = profile.norm_ns_per_parameter * share
        early = zero in (1, 2) and own.kind.early_sums
        if early:
            expected["clip"] = 0.0
            for chunk in layout.chunks_of(stage):
                for number, one in enumerate(result.code.buckets.of(chunk)):
                    ns = profile.optimizer_ns_per_parameter * one.parameters.total / layout.dp
                    expected[f"optimizer.{chunk} {number}"] = ns
        else:
            expected["optimizer"] = profile.optimizer_ns_per_parameter * share
        found = shared(rank)
        assert {name: alike[0].price.ns for name, alike in found.items()} == pytest.approx(expected)
        for name, alike in found.items():
            assert all(one.price.ns == alike[0].price.ns for one in alike)
            assert alike[0].price.ns > 0 or name == "clip"
        starts = [o for s in result.code.stages[stage] for o in s.operations if isinstance(o, Start)]
        begun = Counter(shared_name(o.what) for o in starts if isinstance(o.what, Reduce | Gather))
        assert {name: len(alike) for name, alike in found.items()} == {
            name: begun.get(name, 1) for name in expected
        }
        if zero < 2:
            assert all(len(alike) == 1 for alike in found.values())
        if early:  # from one update to the next: each bucket's gathers follow its own
            assert min(found, key=lambda name: found[name][-1].start) == "clip"
            for name, (one, *_) in found.items():
                if name.startswith("parameters"):
                    bucket = name.removeprefix("parameters.").split()
                    updated = found[f"optimizer.{bucket[0]} {bucket[-1]}"][0]
                    assert one.start >= updated.end * (1 - 1e-9)
        else:
            assert max(found, key=lambda name: found[name][-1].start) == "optimizer"


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("schedule", ["megatron", "ddp"])
def test_rounded_gradients_take_half_the_bytes_and_a_copy_each_way(schedule: str, zero: int) -> None:
    """Of what is added up in four bytes and travels in two a rank reads and writes six for a number."""
    own = setting(schedule, tp=2, dp=4, model=replace(SMALL, layers=2))
    own = replace(own, layout=replace(own.layout, zero=zero, shards=2 if zero else 0), distances=(0, 0))
    spec = cluster(nodes=2, gpus=4)
    whole = fastest(modelled(spec)(own))
    bench = modelled(spec)(replace(own, reduce_dtype="bf16"))
    rounded = fastest(bench)
    before, after = (shared(one.simulation.ranks[0]) for one in (whole, rounded))
    assert before.keys() == after.keys()
    sums = [name for name in after if name.startswith("gradients")]
    assert {name.split()[1] for name in sums} == {"tp", "dp", "replica"} - (set() if zero else {"replica"})
    for name, (one, *_) in after.items():
        other = before[name][0].price
        assert one.price.bytes == (pytest.approx(other.bytes / 2, abs=1) if name in sums else other.bytes)
        assert one.price.ns < other.ns if name in sums else one.price.ns == other.ns
    prices = Prices(rounded.code, bench.profile, "bf16", "bf16")
    for operation in (o for stretch in rounded.code.stages[0] for o in stretch.operations):
        what = getattr(operation, "what", None)
        if not isinstance(what, Reduce) or not isinstance(operation, Start | Wait) or what.chunk is None:
            continue
        held = rounded.code.parameters(what.chunk, what.bucket)
        count = {"tp": held.whole, "dp": held.dense, "replica": held.total / 2}[what.axis]
        if isinstance(operation, Wait) and what.axis == "dp" and zero:
            count /= 2
        assert prices.of(operation).busy_ns == pytest.approx(bench.profile.copy_ns_per_byte * 3 * count)


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


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize(("schedule", "m"), [("megatron", 4), ("megatron", 9), ("dhelix", 6), ("dhelix", 11)])
def test_bubble_of_1f1b_and_of_the_paired_w_is_the_formula(schedule: str, m: int, p: int) -> None:
    """(p - 1)(f + b), where a stage's forward and backward passes take f and b (Narayanan et al. 2021).

    With paired blocks that take as long as both passes, the W pipeline idles as 1F1B does (DHelix 4.1).
    """
    model = replace(setting().model, layers=2 * 3 * p)
    bench = with_free_ends(modelled(cluster(gpus=p))(setting(schedule, pp=p, micro_batches=m, model=model)))
    expected = (p - 1) * 6 * layer_ns(bench)
    assert fastest(bench).numbers.bubble_seconds * 1e9 == pytest.approx(expected, rel=1e-6, abs=1)


@given(
    schedule=st.sampled_from(sorted(SCHEDULES)),
    rate=st.floats(1e9, 1e11),
    faster=st.floats(1.0, 50.0),
    m=st.integers(4, 6),
)
@settings(max_examples=40, deadline=None)
def test_more_bandwidth_is_never_slower(schedule: str, rate: float, faster: float, m: int) -> None:
    """The same decisions on faster links; without contention, as then orders are monotone."""
    m = 2 * (m // 2)
    slow_cluster = cluster(nodes=2, gpus=2, oef=1.0, intra=rate, inter=rate / 3)
    fast_cluster = cluster(nodes=2, gpus=2, oef=1.0, intra=rate * faster, inter=rate * faster / 3)
    one = setting(schedule, tp=2, pp=2, micro_batches=m)
    slow, fast = modelled(slow_cluster)(one), modelled(fast_cluster)(one)
    decided = fastest(slow)
    assert lowered(fast, decided.choices).step_ns <= decided.step_ns * (1 + 1e-9)


def test_an_order_takes_as_long_in_the_simulator_as_in_the_search() -> None:
    """`issue_ns` and the engine are two programs for one rule."""
    for oef, apart in ((1.0, {}), (0.8, {}), (0.3, {}), (0.8, {"gemm<intra": 0.1, "intra<gemm": 0.9})):
        spec = cluster(gpus=4, oef=oef)
        bench = with_free_ends(modelled(spec)(setting("wavelet", tp=4, micro_batches=2)))
        bench = replace(bench, profile=replace(bench.profile, slowdowns=apart))
        problem = layer_pair(bench)
        expected = issue_ns(problem, turns_order(problem))
        runs = paired_runs(fastest(bench).simulation)[0]
        layers = bench.setting.model.layers // bench.setting.layout.chunks
        assert runs[0].course.duration == pytest.approx(layers * expected, rel=1e-6)


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
