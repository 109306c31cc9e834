"""The cluster tier: which layout, recomputation, micro-batch and schedule (``parallel: auto``).

Every combination of degrees is priced by a formula of its layer's serial and overlapped times, pruned by
memory; the most promising are decided in full and simulated, and the simulated step ranks them. Of ZeRO's
stages each combination takes the first that fits, from 1 on.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from braid.scheduling.cluster import ClusterSpec
from braid.scheduling.lowering.named import ScheduleName
from braid.scheduling.memory import least_bytes
from braid.scheduling.plan import Plan, RunnerUp, score_of
from braid.scheduling.planner.candidates import OURS, Candidate, Search, candidates
from braid.scheduling.planner.decide import Outcome, Over, best_of, modelled, rank, with_cuts, within
from braid.scheduling.planner.orders import BenchOf
from braid.scheduling.planner.space import COARSE, PART_BY_PART, variants, with_schedule
from braid.scheduling.setting import Setting
from braid.scheduling.spec import ParallelLayout
from braid.scheduling.units import members_of
from braid.scheduling.validate import check, check_memory

SIMULATED = 8
"""Most layouts that are decided and simulated in full; thrice as many are looked at whether they fit."""

REFUSED = 3
"""So many of those that do not fit are told with a plan."""

LEAST = 0.85
"""Of its estimate a step takes no less: 0.86 to 1.16 over a hundred layouts of nine jobs (docs/log.md)."""

COMPUTE_LESS = {"selective": ("none",), "fine": ("none", "selective"), "full": ("none", "selective")}
"""Policies under which a layer computes less and moves no more: where one fits, no other need be tried."""

USUAL_SCHEDULES = ("interleaved", "zbv", "megatron", "ddp")
"""What the best layout is also simulated with; ours has to be better, or it is not taken."""

Tell = Callable[[str], None]
"""Told what a search is at."""


class DoesNotFitError(ValueError):
    """No layout of the search fits the cluster's memory."""


def plan_layout(
    search: Search,
    cluster: ClusterSpec,
    keep: int = 5,
    simulated: int = SIMULATED,
    tell: Tell = lambda text: None,
) -> Plan:
    """The best plan that was found, with the runners-up and what the usual schedules would take.

    `DoesNotFitError` says how much memory is missing and what would make the job fit; `ValueError` where no
    layout divides the model and the batch.
    """
    tell("which layouts fit")
    found = list(candidates(search, cluster))
    if not found:
        raise ValueError(_nothing_divides(search, cluster))
    fitting = [c for c in found if c.bytes <= cluster.usable_bytes]
    if not fitting:
        raise DoesNotFitError(_missing_memory(search, cluster, found))
    fitting.sort(key=lambda candidate: candidate.step_ns)
    outcomes, refused = _simulate(fitting, simulated, cluster, tell)
    if not outcomes:
        raise DoesNotFitError(_missing_memory(search, cluster, found))
    outcomes.sort(key=_step)
    tell(f"all pipelines of the best layout, {outcomes[0].setting.layout.describe()}")
    outcomes[0] = _refined(outcomes[0], search.schedule or OURS, cluster)
    tell("what the usual schedules would take")
    usual = usual_schedules(outcomes[0], modelled(cluster), within(cluster.usable_bytes))
    if search.schedule is None:
        outcomes += [one for one in usual if one is not outcomes[0]]
        outcomes.sort(key=_step)
    best = outcomes[0]
    _validate(best, cluster)
    others = [runner_up(outcome, best) for outcome in outcomes[1 : keep + 1]]
    return plan_of(best, cluster, tuple(others + refused), usual)


def _validate(best: Outcome, cluster: ClusterSpec) -> None:
    """What is taken, and its memory instruction by instruction."""
    setting = best.setting
    check(best.code)
    check_memory(best.code, setting.model, setting.dtype, cluster.usable_bytes, setting.reduce_dtype)


def plan_of(
    best: Outcome,
    cluster: ClusterSpec,
    runners_up: tuple[RunnerUp, ...] = (),
    usual: Sequence[Outcome] = (),
) -> Plan:
    """An outcome as a plan."""
    return Plan(
        cluster=cluster.name,
        profile=best.bench.profile.source,
        setting=best.bench.setting,
        choices=best.choices,
        score=score_of(best.numbers),
        pairing=best.note,
        runners_up=runners_up,
        usual=tuple(runner_up(one, best) for one in usual),
    )


def _step(outcome: Outcome) -> float:
    return outcome.step_ns


def _simulate(
    ranked: Sequence[Candidate], simulated: int, cluster: ClusterSpec, tell: Tell
) -> tuple[list[Outcome], list[RunnerUp]]:
    """Outcomes of those that also fit when memory is counted instruction by instruction."""
    outcomes: list[Outcome] = []
    refused: list[RunnerUp] = []
    fitting: set[Setting] = set()
    for candidate in islice(_varied(ranked), 3 * simulated):
        best = min(map(_step, outcomes), default=math.inf)
        if len(outcomes) == simulated or candidate.step_ns * LEAST > best:
            break  # nor are those quicker that follow
        setting = candidate.setting
        quickest = f", the quickest takes {best / 1e9:.3f} s" if outcomes else ""
        tell(f"layouts: {len(outcomes)} of {simulated} simulated{quickest}")
        less = COMPUTE_LESS.get(setting.recompute, ())
        if not fitting.isdisjoint(replace(setting, recompute=one) for one in less):
            continue
        outcome = _best(variants(setting, COARSE), cluster)
        if not outcome.missing_bytes:
            outcomes.append(outcome)
            fitting.add(setting)
        elif len(refused) < REFUSED:
            refused.append(_refused(candidate, outcome))
    return outcomes, refused


def _refined(best: Outcome, schedule: ScheduleName, cluster: ClusterSpec) -> Outcome:
    """The same layout with every pipeline of its schedule; every part is a unit (see `Space`)."""
    opened = with_schedule(best.setting, schedule)
    others = [one for one in variants(opened, PART_BY_PART) if one != best.setting]
    if others := list(_fitting(others, modelled(cluster), cluster.usable_bytes)):
        best = min(best, _best(others, cluster), key=rank)
    return with_cuts(best, modelled(cluster), within(cluster.usable_bytes))


def _best(settings: Iterable[Setting], cluster: ClusterSpec) -> Outcome:
    return best_of(settings, modelled(cluster), within(cluster.usable_bytes))


def _fitting(settings: Iterable[Setting], bench_of: BenchOf, usable_bytes: float) -> Iterator[Setting]:
    """Those that may fit, by what they hold at least."""
    for setting in settings:
        layout, parts = setting.layout, bench_of(setting).members
        members = {chunk: members_of(parts, layout, setting.kinds, chunk) for chunk in range(layout.chunks)}
        order = setting.order.order(layout, setting.micro_batches, setting.hop)
        if least_bytes(order, members, layout, setting.dtype) <= usable_bytes:
            yield setting


def _varied(ranked: Iterable[Candidate]) -> Iterator[Candidate]:
    """The most promising first, but no more than three of the same degrees, so that the estimate is not
    trusted."""
    count: dict[ParallelLayout, int] = {}
    for candidate in ranked:
        layout = candidate.setting.layout
        if count.get(layout, 0) < 3:
            count[layout] = count.get(layout, 0) + 1
            yield candidate


def usual_schedules(best: Outcome, bench_of: BenchOf, over: Over) -> list[Outcome]:
    """The same degrees under each of `USUAL_SCHEDULES` that suits them and fits, the quickest first; ``best``
    itself, if it is one of them."""
    found = []
    for name in USUAL_SCHEDULES:
        if name == str(best.setting.name):
            found.append(best)
            continue
        try:
            settings = variants(with_schedule(best.setting, name), PART_BY_PART)
            outcome = best_of(settings, bench_of, over)
        except ValueError:
            continue  # a schedule that wants another number of micro-batches or layers
        if not outcome.missing_bytes:
            found.append(outcome)
    return sorted(found, key=_step)


def runner_up(outcome: Outcome, best: Outcome) -> RunnerUp:
    """What a plan says of a setting that was simulated and not taken."""
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
    return _described(outcome, outcome.step_ns, why)


def _refused(candidate: Candidate, outcome: Outcome) -> RunnerUp:
    """What a plan says of a setting that does not fit, which is not simulated."""
    over = outcome.missing_bytes / 2**30
    return _described(outcome, candidate.step_ns, f"needs {over:.1f} GiB more than a GPU has; step estimated")


def _described(outcome: Outcome, step_ns: float, reason: str) -> RunnerUp:
    setting = outcome.setting
    return RunnerUp(
        layout=setting.layout.describe(),
        schedule=str(setting.name),
        micro_batch=setting.workload.micro_batch,
        recompute=setting.recompute,
        step_seconds=step_ns / 1e9,
        peak_bytes=max(held.total_bytes for held in outcome.simulation.memory),
        reason=reason,
    )


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
        f"train.recompute={setting.recompute} and train.micro_batch={setting.workload.micro_batch}, "
        f"needs {leanest.bytes / 2**30:.1f} GiB a GPU, {over / 2**30:.1f} GiB more than the "
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
