"""Why a plan is as it is, and what would help most: each answer is a simulation with one thing changed."""

from dataclasses import dataclass, replace

from braid.scheduling.cluster import ClusterSpec, Level, Link
from braid.scheduling.plan import Plan
from braid.scheduling.planner.candidates import Search
from braid.scheduling.planner.cluster import DoesNotFitError, Tell, plan_layout
from braid.scheduling.planner.decide import Outcome, evaluate, replay
from braid.scheduling.planner.space import with_schedule
from braid.scheduling.setting import Setting
from braid.scheduling.spec import Workload


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """The step if one thing were different; seconds per token of the global batch decide."""

    change: str
    step_seconds: float
    speedup: float
    """Tokens per second over the plan's."""
    layout: str


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A plan with the numbers of its simulation and of what might be."""

    plan: Plan
    outcome: Outcome
    ideal_overlap_seconds: float
    """The step if every communication were hidden, everything else equal."""
    what_if: tuple[WhatIf, ...]


def explain(plan: Plan, cluster: ClusterSpec, tell: Tell = lambda text: None) -> Explanation:
    """Simulate a plan, and again with more bandwidth, memory and batch, planned anew for each. ``tell``: what
    it is at."""
    tell("the plan itself")
    outcome = replay(plan.setting, plan.choices, cluster)
    numbers = outcome.numbers
    tell("twice the bandwidth")
    answers: list[WhatIf | None] = [
        _planned(plan, outcome, "2x bandwidth inside nodes", _faster(cluster, Level.INTRA)),
    ]
    if cluster.inter is not None:
        answers.append(_planned(plan, outcome, "2x bandwidth between nodes", _faster(cluster, Level.INTER)))
    answers.append(_more_memory(plan, outcome, cluster, lambda text: tell(f"more memory; {text}")))
    tell("twice the batch")
    answers.append(_larger_batch(plan, outcome, cluster))
    found = sorted((a for a in answers if a is not None), key=lambda answer: -answer.speedup)
    return Explanation(
        plan=plan,
        outcome=outcome,
        ideal_overlap_seconds=numbers.step_seconds - numbers.exposed_seconds,
        what_if=tuple(found),
    )


def _faster(cluster: ClusterSpec, level: Level) -> ClusterSpec:
    def doubled(link: Link) -> Link:
        return replace(link, bytes_per_s=2 * link.bytes_per_s)

    if level is Level.INTRA:
        return replace(cluster, intra=doubled(cluster.intra))
    return replace(cluster, inter=doubled(cluster.link(level)))


def _planned(plan: Plan, base: Outcome, change: str, cluster: ClusterSpec) -> WhatIf:
    """The same layout, decided anew."""
    return _answer(change, evaluate(_open(plan.setting), cluster), base)


def _open(setting: Setting) -> Setting:
    """The setting with nothing decided that its schedule leaves open."""
    return replace(with_schedule(setting, setting.name), unit_layers=setting.unit_layers)


def _more_memory(plan: Plan, base: Outcome, cluster: ClusterSpec, tell: Tell) -> WhatIf | None:
    """Half as much memory again: a new search over layouts."""
    gpu = replace(cluster.gpu, memory_bytes=cluster.gpu.memory_bytes * 3 // 2)
    setting = plan.setting
    search = Search(
        model=setting.model,
        global_batch=setting.workload.global_batch,
        dtype=setting.dtype,
        reduce_dtype=setting.reduce_dtype,
        context=setting.context,
    )
    try:
        better = plan_layout(search, replace(cluster, gpu=gpu), simulated=3, tell=tell)
    except (DoesNotFitError, ValueError):
        return None
    score = better.score
    layout = f"{better.setting.layout.describe()}, recompute {better.setting.recompute}"
    return WhatIf(
        change="1.5x memory (layouts searched anew)",
        step_seconds=score.step_seconds,
        speedup=score.tokens_per_second / base.numbers.tokens_per_second,
        layout=layout,
    )


def _larger_batch(plan: Plan, base: Outcome, cluster: ClusterSpec) -> WhatIf | None:
    workload = plan.setting.workload
    larger = Workload(global_batch=2 * workload.global_batch, micro_batch=workload.micro_batch)
    return _answer("2x global batch", evaluate(_open(replace(plan.setting, workload=larger)), cluster), base)


def _answer(change: str, outcome: Outcome, base: Outcome) -> WhatIf:
    return WhatIf(
        change=change,
        step_seconds=outcome.numbers.step_seconds,
        speedup=outcome.numbers.tokens_per_second / base.numbers.tokens_per_second,
        layout=outcome.setting.layout.describe(),
    )
