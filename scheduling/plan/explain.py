"""Explains a plan, and simulates which single change (bandwidth, memory, batch) would help most."""

from dataclasses import dataclass, replace

from braid.scheduling.generate.setting import Setting
from braid.scheduling.mesh.cluster import ClusterSpec, Link
from braid.scheduling.plan.decide import Outcome, replay, simulate_setting
from braid.scheduling.plan.layout_candidates import Search
from braid.scheduling.plan.layouts import Tell, plan_layout
from braid.scheduling.plan.plan import Plan
from braid.scheduling.plan.space import with_schedule


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """Simulated step of a plan with one change; changes are compared by tokens per second."""

    change: str
    step_seconds: float
    speedup: float
    """Tokens per second divided by the unchanged plan's tokens per second."""
    layout: str


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A plan with the numbers of its simulation, and with the answers to what-if questions."""

    plan: Plan
    outcome: Outcome
    ideal_overlap_seconds: float
    """Seconds of the step without its exposed communication."""
    what_if: tuple[WhatIf, ...]


def explain(plan: Plan, cluster: ClusterSpec, tell: Tell = lambda text: None) -> Explanation:
    """Simulate a plan as it is, and planned anew with more bandwidth, with more memory and with a larger
    batch.

    ``tell`` is called with the name of each simulation before it starts.
    """
    tell("the plan itself")
    outcome = replay(plan.setting, plan.choices, cluster)
    now = outcome.numbers.tokens_per_second
    # The setting without the decisions that its schedule leaves open.
    opened = replace(with_schedule(plan.setting, plan.setting.name), unit_layers=plan.setting.unit_layers)

    def answer(change: str, setting: Setting, spec: ClusterSpec) -> WhatIf:
        numbers = simulate_setting(setting, spec).numbers
        gain = numbers.tokens_per_second / now
        return WhatIf(
            change=change,
            step_seconds=numbers.step_seconds,
            speedup=gain,
            layout=setting.layout.describe(),
        )

    tell("twice the bandwidth")
    quicker = replace(cluster, intra=_doubled(cluster.intra))
    answers = [answer("2x bandwidth inside nodes", opened, quicker)]
    if cluster.inter is not None:
        quicker = replace(cluster, inter=_doubled(cluster.inter))
        answers.append(answer("2x bandwidth between nodes", opened, quicker))
    if (memory := _more_memory(plan, now, cluster, lambda text: tell(f"more memory; {text}"))) is not None:
        answers.append(memory)
    tell("twice the batch")
    workload = replace(opened.workload, global_batch=2 * opened.workload.global_batch)
    answers.append(answer("2x global batch", replace(opened, workload=workload), cluster))
    return Explanation(
        plan=plan,
        outcome=outcome,
        ideal_overlap_seconds=outcome.numbers.step_seconds - outcome.numbers.exposed_seconds,
        what_if=tuple(sorted(answers, key=lambda change: -change.speedup)),
    )


def _doubled(link: Link) -> Link:
    return replace(link, bytes_per_s=2 * link.bytes_per_s)


def _more_memory(plan: Plan, now: float, cluster: ClusterSpec, tell: Tell) -> WhatIf | None:
    """Search layouts for GPUs with 1.5 times the memory; return None if there is none.

    ``now``: tokens per second of the plan.
    """
    gpu = replace(cluster.gpu, memory_bytes=cluster.gpu.memory_bytes * 3 // 2)
    setting = plan.setting
    search = Search(
        model=setting.model,
        global_batch=setting.workload.global_batch,
        dtype=setting.dtype,
        reduce_dtype=setting.reduce_dtype,
        states=setting.states,
        context=setting.context,
    )
    try:
        better = plan_layout(search, replace(cluster, gpu=gpu), simulated=3, tell=tell)
    except ValueError:
        return None
    return WhatIf(
        change="1.5x memory (layouts searched anew)",
        step_seconds=better.score.step_seconds,
        speedup=better.score.tokens_per_second / now,
        layout=f"{better.setting.layout.describe()}, recompute {better.setting.recompute}",
    )
