"""The cluster tier: which layout, recomputation, micro-batch and schedule (``parallel: auto``).

Every combination of degrees is priced by a formula of its layer's serial and overlapped times, pruned by
memory; the most promising are decided in full and simulated, and the simulated step ranks them. ZeRO is not
searched: it is 1 wherever several ranks share parameters.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from braid.scheduling.analytic import analytic_profile, axis_groups, axis_placements
from braid.scheduling.cluster import ClusterSpec
from braid.scheduling.collectives import collective_ns
from braid.scheduling.layers import built_in_parts, part_sizes
from braid.scheduling.lowering.named import SCHEDULES
from braid.scheduling.lowering.recompute import RECOMPUTE_POLICIES
from braid.scheduling.memory import DTYPE_BYTES, chunk_parameters, state_bytes
from braid.scheduling.operators import Kind, Part
from braid.scheduling.plan import Plan, RunnerUp, score_of
from braid.scheduling.planner.decide import (
    COARSE,
    UNFUSED,
    Outcome,
    best_of,
    modelled,
    rank,
    uncollected,
    variants,
    with_schedule,
    within,
)
from braid.scheduling.planner.tiers import collective_notes, tier_notes
from braid.scheduling.setting import Setting
from braid.scheduling.spec import ModelShape, ParallelLayout, Placement, Workload, check_fit
from braid.scheduling.validate import check, check_memory

SIMULATED = 8
"""Layouts that are decided and simulated in full."""

OTHER_SCHEDULES = ("interleaved", "zbv", "megatron")
"""What the best layout is also simulated with; ours has to be better, or it is not taken."""

MICRO_BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is given, and what is fixed by the user; None is searched."""

    model: ModelShape
    global_batch: int
    dtype: str = "bf16"
    micro_batch: int | None = None
    recompute: str | None = None
    schedule: str | None = None
    fixed: Mapping[str, int] = field(default_factory=dict)
    """Degrees of axes that are given."""
    context: str = "all_gather"
    late_layers: int = 0
    """Layers of the first chunk that the last one takes (see `ParallelLayout`)."""


@dataclass(frozen=True)
class Candidate:
    """A setting with its estimated step and memory."""

    setting: Setting
    step_ns: float
    bytes: int


class DoesNotFitError(ValueError):
    """No layout of the search fits the cluster's memory."""


@uncollected()
def plan_layout(search: Search, cluster: ClusterSpec, keep: int = 5, simulated: int = SIMULATED) -> Plan:
    """The best plan that was found, with the runners-up.

    `DoesNotFitError` says how much memory is missing and what would make the job fit; `ValueError` where no
    layout divides the model and the batch.
    """
    found = list(candidates(search, cluster))
    if not found:
        raise ValueError(_nothing_divides(search, cluster))
    fitting = [c for c in found if c.bytes <= cluster.usable_bytes]
    if not fitting:
        raise DoesNotFitError(_missing_memory(search, cluster, found))
    fitting.sort(key=lambda candidate: candidate.step_ns)
    outcomes, refused = _simulate(_varied(fitting, simulated), cluster)
    if not outcomes:
        raise DoesNotFitError(_missing_memory(search, cluster, found))
    outcomes.sort(key=_step)
    outcomes[0] = _refined(outcomes[0], cluster)
    if search.schedule is None:
        outcomes += _other_schedules(outcomes[0], cluster)
        outcomes.sort(key=_step)
    best = outcomes[0]
    _validate(best, cluster)
    others = [_runner_up(outcome, best) for outcome in outcomes[1 : keep + 1]]
    return plan_of(best, cluster, tuple(others + refused[:3]))


def _validate(best: Outcome, cluster: ClusterSpec) -> None:
    """What is taken, and its memory instruction by instruction."""
    setting = best.setting
    check(best.code)
    check_memory(best.code, setting.model, setting.dtype, cluster.usable_bytes, setting.zero)


def plan_of(best: Outcome, cluster: ClusterSpec, runners_up: tuple[RunnerUp, ...] = ()) -> Plan:
    """An outcome as a plan."""
    return Plan(
        cluster=cluster.name,
        profile=best.bench.profile.source,
        setting=best.bench.setting,
        choices=best.choices,
        score=score_of(best.numbers),
        pairing=best.note,
        collectives=collective_notes(best.bench, cluster),
        tiers=tier_notes(best.bench, best.simulation, cluster),
        runners_up=runners_up,
    )


def _step(outcome: Outcome) -> float:
    return outcome.step_ns


def _simulate(chosen: Sequence[Candidate], cluster: ClusterSpec) -> tuple[list[Outcome], list[RunnerUp]]:
    """Outcomes of those that also fit when memory is counted instruction by instruction."""
    outcomes, refused = [], []
    for candidate in chosen:
        outcome = _best(variants(candidate.setting, COARSE), cluster)
        if not outcome.missing_bytes:
            outcomes.append(outcome)
            continue
        over = outcome.missing_bytes / 2**30
        refused.append(_described(outcome, f"needs {over:.1f} GiB more than a GPU has"))
    return outcomes, refused


def _refined(best: Outcome, cluster: ClusterSpec) -> Outcome:
    """The same layout with every pipeline of its schedule; layers are not fused (see `Space`)."""
    others = [one for one in variants(_open(best.setting), UNFUSED) if one != best.setting]
    return min(best, _best(others, cluster), key=rank) if others else best


def _best(settings: Iterable[Setting], cluster: ClusterSpec) -> Outcome:
    return best_of(settings, modelled(cluster), within(cluster.usable_bytes))


def _open(setting: Setting) -> Setting:
    """With nothing decided."""
    return with_schedule(setting, setting.schedule)


def _varied(ranked: Sequence[Candidate], simulated: int) -> list[Candidate]:
    """The most promising, but no more than three of the same degrees, so that the estimate is not trusted."""
    taken: list[Candidate] = []
    count: dict[ParallelLayout, int] = {}
    for candidate in ranked:
        layout = candidate.setting.layout
        if count.get(layout, 0) < 3:
            count[layout] = count.get(layout, 0) + 1
            taken.append(candidate)
        if len(taken) == simulated:
            break
    return taken


def _other_schedules(best: Outcome, cluster: ClusterSpec) -> list[Outcome]:
    outcomes = []
    for name in OTHER_SCHEDULES:
        try:
            outcome = _best(variants(with_schedule(best.setting, name), UNFUSED), cluster)
        except ValueError:
            continue  # a schedule that wants another number of micro-batches or layers
        if not outcome.missing_bytes:
            outcomes.append(outcome)
    return outcomes


def _runner_up(outcome: Outcome, best: Outcome) -> RunnerUp:
    slower = outcome.step_ns / best.step_ns - 1
    ours, theirs = best.numbers, outcome.numbers
    reasons = []
    if theirs.exposed_seconds > ours.exposed_seconds * 1.02:
        more = theirs.exposed_seconds - ours.exposed_seconds
        reasons.append(f"{more:.2f} s more exposed communication")
    if theirs.bubble_seconds > ours.bubble_seconds * 1.02:
        reasons.append(f"{theirs.bubble_seconds - ours.bubble_seconds:.2f} s more bubble")
    if outcome.bench.setting.recompute != best.bench.setting.recompute:
        reasons.append(f"recomputes {outcome.bench.setting.recompute}")
    why = f"{slower:.1%} slower" + (f": {', '.join(reasons)}" if reasons else "")
    return _described(outcome, why)


def _described(outcome: Outcome, reason: str) -> RunnerUp:
    setting = outcome.bench.setting
    return RunnerUp(
        layout=setting.layout.describe(),
        schedule=setting.schedule,
        micro_batch=setting.workload.micro_batch,
        recompute=setting.recompute,
        zero=setting.zero,
        step_seconds=outcome.step_ns / 1e9,
        peak_bytes=outcome.numbers.peak_bytes,
        reason=reason,
    )


# -- candidates ----------------------------------------------------------------------------------------------


def candidates(search: Search, cluster: ClusterSpec) -> Iterator[Candidate]:
    """All settings that divide model and batch, with estimates."""
    recomputes = [search.recompute] if search.recompute else RECOMPUTE_POLICIES
    priced: dict[tuple[int, int, int, int, str], _Layer] = {}
    for division, micro_batch in _layouts(search, cluster):
        for recompute in recomputes:
            layout = division
            key = (layout.tp, layout.cp, layout.ep, micro_batch, recompute)
            if key not in priced:
                priced[key] = _price(search, cluster, layout, micro_batch, recompute)
            layer = priced[key]
            layout = _balanced(search.model, layout, layer)
            shares = layout.dp * layout.cp
            for zero in (1,) if shares > 1 else (0,):
                yield _estimate(search, cluster, layout, micro_batch, recompute, zero, layer)


def _layouts(search: Search, cluster: ClusterSpec) -> Iterator[tuple[ParallelLayout, int]]:
    """Every division of the GPUs that the model and the batch allow, with every micro-batch."""
    kind = SCHEDULES[search.schedule or "braid"]
    batches = [search.micro_batch] if search.micro_batch else MICRO_BATCHES
    for division in _divisions(search, cluster):
        if any(division.degree(axis) != degree for axis, degree in search.fixed.items()):
            continue
        placement = kind.placement_on(division.pp)
        late = search.late_layers if placement is Placement.FOLDED else 0
        layout = replace(division, placement=placement, late_layers=late)
        for micro_batch in batches:
            workload = Workload(global_batch=search.global_batch, micro_batch=micro_batch)
            try:
                check_fit(search.model, layout, workload)
            except ValueError:
                continue
            if workload.micro_batches(layout) >= layout.pp:
                yield layout, micro_batch


def _divisions(search: Search, cluster: ClusterSpec) -> Iterator[ParallelLayout]:
    model = search.model
    for tp in _powers(min(2 * cluster.gpus_per_node, cluster.gpus)):
        for cp in _powers(max(1, model.sequence // 4096)):
            for pp in _divisors_up_to(cluster.gpus, model.layers):
                if cluster.gpus % (tp * cp * pp):
                    continue
                dp = cluster.gpus // (tp * cp * pp)
                for ep in _powers(min(dp, max(1, model.experts))):
                    if dp % ep == 0:
                        yield ParallelLayout(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep)


def _powers(limit: int) -> list[int]:
    return [2**n for n in range(int(math.log2(limit)) + 1)]


def _divisors_up_to(number: int, limit: int) -> list[int]:
    return [n for n in range(1, min(number, limit, 64) + 1) if number % n == 0]


@dataclass(frozen=True)
class _Layer:
    """What one layer, and the ends of the model, cost on a rank for one micro-batch."""

    forward_ns: float
    backward_ns: float
    pair_ns: float
    ends_ns: float
    saved_bytes: int
    ends_saved_bytes: int
    working_bytes: int


def _price(
    search: Search, cluster: ClusterSpec, layout: ParallelLayout, micro_batch: int, recompute: str
) -> _Layer:
    """Serial times, and an estimate of the paired time between its bounds."""
    placements = axis_placements(layout, cluster.gpus_per_node)
    sizes = part_sizes(search.model, layout, micro_batch, placements, search.context)
    parts = built_in_parts(sizes, recompute)
    width = DTYPE_BYTES[search.dtype]
    profile = analytic_profile(cluster, layout, parts, width)
    layer, head = parts["layer"], parts["head"]

    def total(part: Part, forward: bool) -> float:
        graph = part.forward if forward else part.backward
        return sum(profile.solo(op.key) for op in graph.operators)

    loads: dict[str, float] = {}
    for op in (*layer.forward.operators, *layer.backward.operators):
        loads[op.stream] = loads.get(op.stream, 0.0) + profile.solo(op.key)
    serial = sum(loads.values())
    # Searched pairings come within about a third of the way from the busiest stream to the serial time.
    paired = max(loads.values()) + 0.3 * (serial - max(loads.values()))
    ends = ("embedding", "head")
    return _Layer(
        forward_ns=total(layer, True),
        backward_ns=total(layer, False),
        pair_ns=paired,
        ends_ns=sum(total(parts[name], True) + total(parts[name], False) for name in ends),
        saved_bytes=layer.saved_bytes(width),
        ends_saved_bytes=sum(parts[name].saved_bytes(width) for name in ends),
        working_bytes=_widest(head, width) + 2 * layer.values["x"].bytes(width),
    )


def _widest(part: Part, width: int) -> int:
    """Most bytes that an operator of a forward pass reads and writes."""
    names = ({*op.reads, *op.writes} for op in part.forward.operators)
    return max(sum(part.values[name].bytes(width) for name in touched) for touched in names)


def _balanced(model: ModelShape, layout: ParallelLayout, layer: _Layer) -> ParallelLayout:
    """The layout with the head counted as the layers that it costs as much as."""
    counts = round(layer.ends_ns / (layer.forward_ns + layer.backward_ns))
    while counts:
        balanced = replace(layout, head_layers=counts)
        try:
            balanced.layers_of(0, model.layers)
        except ValueError:
            counts -= 1
            continue
        return balanced
    return layout


def _estimate(
    search: Search,
    cluster: ClusterSpec,
    layout: ParallelLayout,
    micro_batch: int,
    recompute: str,
    zero: int,
    layer: _Layer,
) -> Candidate:
    setting = Setting(
        model=search.model,
        layout=layout,
        workload=Workload(global_batch=search.global_batch, micro_batch=micro_batch),
        schedule=search.schedule or "braid",
        dtype=search.dtype,
        recompute=recompute,
        zero=zero,
        context=search.context,
    )
    m, p = setting.micro_batches, layout.pp
    layers = math.ceil(search.model.layers / p)
    serial = layer.forward_ns + layer.backward_ns
    pairs = SCHEDULES[setting.schedule].pairs is not None
    steady = max(0, m - p) * (layer.pair_ns if pairs else serial) + min(m, p) * serial
    # The ends of the model make their stages longer: all others wait for them.
    step = layers * (steady + (p - 1) * serial) + m * layer.ends_ns
    held = [chunk_parameters(search.model, layout, chunk) for chunk in layout.chunks_of(0)]
    parameters = sum(part.total for part in held)
    width = DTYPE_BYTES[search.dtype]
    step += _gradients_ns(cluster, layout, parameters)
    states = sum(state_bytes(parameters, width, layout.dp * layout.cp, zero))
    alive = min(m, p) * layers * layer.saved_bytes + layer.ends_saved_bytes
    if pairs:
        alive += round(1.6 * layer.saved_bytes)  # two layers under way; counted exactly when simulated
    return Candidate(setting, step, states + alive + layer.working_bytes)


def _gradients_ns(cluster: ClusterSpec, layout: ParallelLayout, parameters: int) -> float:
    group = axis_groups(layout, cluster.gpus_per_node)["dp"]
    return 0.75 * collective_ns(cluster, Kind.ALL_REDUCE, parameters * 4, group)


# -- messages ------------------------------------------------------------------------------------------------


def _nothing_divides(search: Search, cluster: ClusterSpec) -> str:
    model = search.model
    return (
        f"no layout of {cluster.gpus} GPUs divides model.layers={model.layers}, model.kv_heads="
        f"{model.kv_heads} and train.global_batch={search.global_batch}; change train.global_batch to a "
        f"multiple of {cluster.gpus}, or the number of GPUs"
    )


def _missing_memory(search: Search, cluster: ClusterSpec, found: Sequence[Candidate]) -> str:
    leanest = min(found, key=lambda candidate: candidate.bytes)
    setting = leanest.setting
    over = leanest.bytes - cluster.usable_bytes
    text = (
        f"the job fits on no layout of cluster {cluster.name}: the leanest, {setting.layout.describe()} with "
        f"train.recompute={setting.recompute}, train.micro_batch={setting.workload.micro_batch} and ZeRO "
        f"{setting.zero}, needs {leanest.bytes / 2**30:.1f} GiB a GPU, {over / 2**30:.1f} GiB more than the "
        f"{cluster.usable_bytes / 2**30:.1f} GiB that it can use"
    )
    nodes = _enough_nodes(search, cluster)
    if nodes is not None:
        return f"{text}; {nodes} nodes ({nodes * cluster.gpus_per_node} GPUs) would do, or a shorter sequence"
    return f"{text}; use fewer layers, a shorter model.sequence or GPUs with more memory"


def _enough_nodes(search: Search, cluster: ClusterSpec) -> int | None:
    """The first doubling of the nodes that fits, if one within 64 times does."""
    if cluster.inter is None:
        return None
    for doubling in range(1, 7):
        larger = replace(cluster, nodes=cluster.nodes * 2**doubling)
        if any(c.bytes <= larger.usable_bytes for c in candidates(search, larger)):
            return larger.nodes
    return None
