"""The cluster tier: layout, recomputation, micro-batch and schedule (``parallel: auto``).

Every combination of degrees is priced by a formula of its layer's serial and overlapped times and pruned by
memory; the most promising are decided in full and simulated, and the simulated step ranks them. Each
combination takes the first of ZeRO's stages, from 1 on, that fits.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from braid.scheduling.generate.setting import Setting
from braid.scheduling.mesh.cluster import ClusterSpec
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.units import members_of
from braid.scheduling.plan.decide import Outcome, Over, best_of, modelled, rank, with_cuts, within
from braid.scheduling.plan.layout_candidates import OURS, Candidate, Search, candidates
from braid.scheduling.plan.orders import BenchOf
from braid.scheduling.plan.plan import Plan, RunnerUp, score_of
from braid.scheduling.plan.space import COARSE, PART_BY_PART, variants, with_schedule
from braid.scheduling.schedule.memory import least_bytes
from braid.scheduling.schedule.validate import check, check_memory

SIMULATED = 8
"""Most fitting layouts that are simulated in full; at most thrice as many are tried."""

KEPT = 5
"""Most runners-up that a plan lists."""

REFUSED = 3
"""Most layouts that a plan lists as too large for the memory."""

LEAST = 0.85
"""Least expected ratio of simulated to estimated step time; in a hundred layouts of nine jobs it was 0.86 to
1.16 (docs/log.md)."""

COMPUTE_LESS = {"selective": ("none",), "fine": ("none", "selective"), "full": ("none", "selective")}
"""Recompute policy -> policies that recompute less and communicate no more. If one of these fits, the policy
need not be tried."""

USUAL_SCHEDULES = ("interleaved", "zbv", "megatron", "ddp")
"""Schedules of other systems under which the best layout is simulated too; the fastest schedule is taken."""

Tell = Callable[[str], None]
"""Callback that is given texts on the progress of a search."""


class DoesNotFitError(ValueError):
    """Error that no layout of a search fits the cluster's memory."""


def plan_layout(
    search: Search,
    cluster: ClusterSpec,
    simulated: int = SIMULATED,
    tell: Tell = lambda text: None,
) -> Plan:
    """Search layouts and return the best plan found, with `KEPT` runners-up and the usual schedules' times.

    Raises `DoesNotFitError`, which says how much memory is missing and what would make the job fit, or
    `ValueError` if no layout divides the model and the batch.
    """
    tell("which layouts fit")
    priced = list(candidates(search, cluster))
    if not priced:
        model = search.model
        raise ValueError(
            f"no layout of {cluster.gpus} GPUs divides model.layers={model.layers}, model.kv_heads="
            f"{model.kv_heads} and train.global_batch={search.global_batch}; change train.global_batch to a "
            f"multiple of {cluster.gpus}, or the number of GPUs"
        )
    fitting = sorted(
        (candidate for candidate in priced if candidate.bytes <= cluster.usable_bytes),
        key=lambda candidate: candidate.step_ns,
    )
    bench_of, over = modelled(cluster), within(cluster.usable_bytes)
    outcomes, refused = _simulate(fitting, simulated, bench_of, over, tell)
    if not outcomes:
        raise DoesNotFitError(_missing_memory(search, cluster, priced))
    outcomes.sort(key=rank)
    best = outcomes[0]
    tell(f"all pipelines of the best layout, {best.setting.layout.describe()}")
    # Every part is a unit: searching the orders of units takes seconds each.
    opened = variants(with_schedule(best.setting, search.schedule or OURS), PART_BY_PART)
    others = [setting for setting in opened if setting != best.setting]
    if others := [setting for setting in others if _may_fit(setting, bench_of, cluster.usable_bytes)]:
        best = min(best, best_of(others, bench_of, over), key=rank)
    outcomes[0] = best = with_cuts(best, bench_of, over)
    tell("what the usual schedules would take")
    usual = usual_schedules(best, bench_of, over)
    if search.schedule is None:
        outcomes += [outcome for outcome in usual if outcome is not best]
        outcomes.sort(key=rank)
    best = outcomes[0]
    setting = best.setting
    check(best.code)
    # Memory is checked for each instruction.
    check_memory(
        best.code, setting.model, setting.dtype, cluster.usable_bytes, setting.reduce_dtype, setting.states
    )
    others_told = [runner_up(outcome, best) for outcome in outcomes[1 : KEPT + 1]]
    return plan_of(best, cluster, (*others_told, *refused), usual)


def plan_of(
    best: Outcome,
    cluster: ClusterSpec,
    runners_up: Sequence[RunnerUp] = (),
    usual: Sequence[Outcome] = (),
) -> Plan:
    """Return the plan that stores an outcome's decisions and scores, with runners-up and usual schedules."""
    return Plan(
        cluster=cluster.name,
        profile=best.bench.profile.source,
        setting=best.setting,
        choices=best.choices,
        score=score_of(best.numbers),
        pairing=best.note,
        runners_up=tuple(runners_up),
        usual=tuple(runner_up(outcome, best) for outcome in usual),
    )


def _simulate(
    ranked: Sequence[Candidate], simulated: int, bench_of: BenchOf, over: Over, tell: Tell
) -> tuple[list[Outcome], list[RunnerUp]]:
    """Simulate candidates in the order of ``ranked``; return those that fit, and some that do not.

    Memory is counted for each instruction. At most three candidates of the same layout are simulated, since
    estimates are imprecise.
    """
    outcomes: list[Outcome] = []
    refused: list[RunnerUp] = []
    fitting: set[Setting] = set()
    tried: Counter[ParallelLayout] = Counter()
    for candidate in ranked:
        setting = candidate.setting
        if tried[setting.layout] == 3:
            continue
        tried[setting.layout] += 1
        best = min((outcome.step_ns for outcome in outcomes), default=math.inf)
        # Later candidates are estimated to be no quicker.
        no_hope = len(outcomes) == simulated or candidate.step_ns * LEAST > best
        if no_hope or tried.total() > 3 * simulated:
            break
        quickest = f", the quickest takes {best / 1e9:.3f} s" if outcomes else ""
        tell(f"layouts: {len(outcomes)} of {simulated} simulated{quickest}")
        less = COMPUTE_LESS.get(setting.recompute, ())
        if not fitting.isdisjoint(replace(setting, recompute=policy) for policy in less):
            continue
        outcome = best_of(variants(setting, COARSE), bench_of, over)
        if not outcome.missing_bytes:
            outcomes.append(outcome)
            fitting.add(setting)
        elif len(refused) < REFUSED:
            reason = f"needs {outcome.missing_bytes / 2**30:.1f} GiB more than a GPU has; step estimated"
            refused.append(_described(outcome, candidate.step_ns, reason))
    return outcomes, refused


def _may_fit(setting: Setting, bench_of: BenchOf, usable_bytes: float) -> bool:
    """Return whether a lower bound of the setting's memory per rank is within ``usable_bytes``."""
    layout, parts = setting.layout, bench_of(setting).members
    members = {chunk: members_of(parts, layout, setting.kinds, chunk) for chunk in range(layout.chunks)}
    order = setting.order.order(layout, setting.micro_batches, setting.hop)
    return least_bytes(order, members, layout, setting.dtype, setting.states) <= usable_bytes


def usual_schedules(best: Outcome, bench_of: BenchOf, over: Over) -> list[Outcome]:
    """Simulate the layout of ``best`` under each of `USUAL_SCHEDULES`; return the outcomes that fit, quickest
    first. The schedule of ``best`` is not simulated again."""
    outcomes = []
    for name in USUAL_SCHEDULES:
        if name == str(best.setting.name):
            outcomes.append(best)
            continue
        try:
            settings = variants(with_schedule(best.setting, name), PART_BY_PART)
            outcome = best_of(settings, bench_of, over)
        except ValueError:
            continue  # a schedule that needs another number of micro-batches or layers
        if not outcome.missing_bytes:
            outcomes.append(outcome)
    return sorted(outcomes, key=rank)


def runner_up(outcome: Outcome, best: Outcome) -> RunnerUp:
    """Return a plan's entry for a simulated setting that lost to ``best``, with the reasons why it is
    slower."""
    slower = outcome.step_ns / best.step_ns - 1
    ours, theirs = best.numbers, outcome.numbers
    reasons = []
    if theirs.exposed_seconds > ours.exposed_seconds * 1.02:
        exposed = theirs.exposed_seconds - ours.exposed_seconds
        reasons.append(f"{exposed:.2f} s more exposed communication")
    if theirs.bubble_seconds > ours.bubble_seconds * 1.02:
        reasons.append(f"{theirs.bubble_seconds - ours.bubble_seconds:.2f} s more bubble")
    if outcome.setting.recompute != best.setting.recompute:
        reasons.append(f"recomputes {outcome.setting.recompute}")
    why = f"{slower:.1%} slower" + (f": {', '.join(reasons)}" if reasons else "")
    return _described(outcome, outcome.step_ns, why)


def _described(outcome: Outcome, step_ns: float, reason: str) -> RunnerUp:
    setting = outcome.setting
    return RunnerUp(
        layout=setting.layout.describe(),
        schedule=str(setting.name),
        micro_batch=setting.workload.micro_batch,
        recompute=setting.recompute,
        step_seconds=step_ns / 1e9,
        peak_bytes=outcome.held_bytes(),
        reason=reason,
    )


def _missing_memory(search: Search, cluster: ClusterSpec, priced: Sequence[Candidate]) -> str:
    """Return an error text that names the layout with least memory, and how many nodes would do (tried: 2, 4,
    ... 64 times as many)."""
    leanest = min(priced, key=lambda candidate: candidate.bytes)
    setting = leanest.setting
    over = leanest.bytes - cluster.usable_bytes
    text = (
        f"the job fits on no layout of cluster {cluster.name}: the leanest, {setting.layout.describe()} with "
        f"train.recompute={setting.recompute} and train.micro_batch={setting.workload.micro_batch}, "
        f"needs {leanest.bytes / 2**30:.1f} GiB a GPU, {over / 2**30:.1f} GiB more than the "
        f"{cluster.usable_bytes / 2**30:.1f} GiB that it can use"
    )
    for doubling in range(1, 7) if cluster.inter is not None else ():
        larger = replace(cluster, nodes=cluster.nodes * 2**doubling)
        if any(candidate.bytes <= larger.usable_bytes for candidate in candidates(search, larger)):
            nodes = f"{larger.nodes} nodes ({larger.nodes * cluster.gpus_per_node} GPUs)"
            return f"{text}; {nodes} would do, or a shorter sequence"
    return f"{text}; use fewer layers, a shorter model.sequence or GPUs with more memory"
