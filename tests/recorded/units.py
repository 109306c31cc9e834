"""Simulated steps that ``braid simulate`` cannot be asked for: units of layers, and costs as measured.

This is the one file of the records that calls the planner itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, Final

from braid.scheduling.cost.profile import Profile
from braid.scheduling.generate.named import ScheduleName
from braid.scheduling.generate.setting import Setting
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.presets.library import cluster_preset, model_preset
from braid.scheduling.model.shape import ModelShape, Workload
from braid.scheduling.plan.decide import anything, modelled, outcome_of
from braid.scheduling.plan.orders import CostedSetting, decisions
from braid.scheduling.schedule.validate import check
from tests.recorded.files import SCHEDULES as NAMES
from tests.recorded.files import Case

Numbers = Callable[[Mapping[str, Any]], Case]

FUSED: Final = ("braid", "braid:eager_w", "braid:twins", "braid:v")
PRESETS: Final = (("a40", "llama-8b", 4), ("h100", "gpt-6.7b", 2))
"""Cluster, model and tensor-parallel degree."""
LAYERS_PER_STAGE: Final = 8
MICRO_BATCHES: Final = 8

SLOWDOWNS: Final = {
    "gemm<intra": 0.18,
    "intra<gemm": 0.45,
    "attention<intra": 0.12,
    "intra<attention": 0.3,
    "memory<intra": 0.35,
    "intra<memory": 0.2,
    "gemm<inter": 0.06,
    "inter<gemm": 0.1,
}
"""Made up: what a measured profile says of classes, each side by itself."""


def unit_cases(numbers: Numbers) -> dict[str, Callable[[], Case]]:
    """Names of the cases, and how to record them.

    Units of two and four layers, on one stage and two; and costs by which starting a collective and going on
    after it take time, as in measured profiles, for units of layers and (on one cluster) for every schedule
    layer by layer. ``numbers`` picks what is recorded.
    """
    cases: dict[str, Callable[[], Case]] = {}
    for (cluster, model, tp), pp in product(PRESETS, (1, 2)):
        kinds = [
            *product((False,), FUSED, (2, 4)),
            *product((True,), FUSED, (4,)),
            *product((True,), NAMES if cluster == PRESETS[0][0] else (), (0,)),
        ]
        for handled, schedule, unit_layers in kinds:
            costs = "handled" if handled else "modelled"
            title = f"{model} on {cluster}, tp {tp} pp {pp}, {costs} costs, unit {unit_layers}: {schedule}"
            work = (model, tp, pp, schedule, unit_layers)
            cases[title] = partial(_simulated, cluster, work, handled, numbers)
    return cases


def _simulated(cluster: str, work: tuple[str, int, int, str, int], handled: bool, numbers: Numbers) -> Case:
    model, tp, pp, schedule, unit_layers = work
    spec = replace(cluster_preset(cluster), nodes=1, gpus_per_node=tp * pp)
    shape = replace(model_preset(model), layers=LAYERS_PER_STAGE * pp)
    setting = _setting(shape, tp, pp, schedule, unit_layers)
    kind, named = setting.kind, setting.pipeline
    pipelines = (named,) if named else kind.pipelines_on(setting.layout) or kind.pipelines[:1]
    benches = [modelled(spec)(replace(setting, pipeline=name)) for name in pipelines]
    if handled:
        benches = [replace(bench, profile=with_handling(bench)) for bench in benches]
    return _fastest(benches, numbers)


def _setting(shape: ModelShape, tp: int, pp: int, schedule: str, unit_layers: int) -> Setting:
    named = ScheduleName.parse(schedule)
    return Setting(
        model=shape,
        layout=ParallelLayout(tp=tp, pp=pp, placement=named.placement_on(pp)),
        workload=Workload(global_batch=MICRO_BATCHES, micro_batch=1),
        unit_layers=unit_layers,
        **named._asdict(),
    )


def _fastest(benches: Sequence[CostedSetting], numbers: Numbers) -> Case:
    """The step of the fastest decisions; of all, their number and the slowest step."""
    outcomes = [
        outcome_of(bench, choices, note, anything) for bench in benches for choices, note in decisions(bench)
    ]
    for outcome in outcomes:
        check(outcome.code)
    found = [outcome.numbers for outcome in outcomes]
    best = min(found, key=lambda one: one.step_seconds)
    others = sorted(one.step_seconds for one in found)
    return {**numbers(best.as_json()), "decisions": len(found), "slowest_seconds": others[-1]}


def with_handling(bench: CostedSetting) -> Profile:
    """Modelled costs with what only measured ones have: starting, going on afterwards, slowdowns by side."""
    profile = bench.profile
    links = {key: ns for key, ns in profile.solo_ns.items() if profile.classes[key] in ("intra", "inter")}
    return replace(
        profile,
        slowdowns=SLOWDOWNS,
        issue_ns={key: 3000 + ns // 60 for key, ns in links.items()},
        take_ns={key: ns // 15 for key, ns in links.items()},
        barrier_ns=0,
    )
