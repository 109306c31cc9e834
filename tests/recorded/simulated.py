"""What simulated steps come to: presets of clusters and models under every schedule.

Record a commit in its own checkout, then compare (``--only`` takes cases whose names hold a pattern)::

    PYTHONPATH=$PWD python -m tests.recorded.simulated --out new.json
    PYTHONPATH=$PWD python -m tests.recorded.simulated --compare tests/golden/simulated.json new.json

``tests/golden/simulated.json`` is the record of the commit that wrote it. Numbers are exact, so that another
record of the same commit equals it; ``--compare`` lists by schedule what differs by more than 1e-9 of itself.
All cases take about three minutes. A `ValueError` counts as refused, with its message as it is. The cases of
`cli_cases` go through ``braid simulate --json``; those of `unit_cases` cannot.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

from typer.testing import CliRunner

from braid.jobs.cli import app
from braid.scheduling.generate.named import ScheduleName
from braid.scheduling.generate.setting import Setting
from braid.scheduling.mesh.cluster import ClusterSpec
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.presets.library import cluster_preset, model_preset
from braid.scheduling.model.shape import Workload
from braid.scheduling.plan.decide import anything, modelled, outcome_of
from braid.scheduling.plan.orders import CostedSetting, decisions
from braid.scheduling.schedule.validate import check
from tests.recorded.files import REFUSED, SCHEDULES, Case, chosen, command, write_cases

NUMBERS: Final = (
    *("hidden_fraction", "bubble_fraction", "peak_bytes"),
    *(f"{what}_seconds" for what in ("step", "communication", "exposed", "bubble", "slowdown", "launch_gap")),
)
"""What is recorded of the object that ``--json`` prints, beside bytes per GPU and level of links."""
TOLERANCE: Final = 1e-9
"""Relative differences up to this are taken for rounding in another order."""


class Situation(NamedTuple):
    """A model on a cluster in a layout; ``micro_batches`` of a replica in a step."""

    cluster: str
    nodes: int
    model: str
    parallel: Mapping[str, int | str]
    micro_batches: int
    variants: Sequence[tuple[str, int]] = (("none", 0),)
    """Recomputation and ZeRO."""
    micro_batch: int = 1


ALL: Final = (("none", 0), ("full", 0), ("none", 1))
SITUATIONS: Final = (
    # dense models, tensor parallelism over a node, pipelines over nodes
    Situation("a40", 8, "llama-25b", {"tp": 8, "pp": 8}, 16, ALL),
    Situation("h100", 4, "gpt-18b", {"tp": 4, "pp": 4, "dp": 2}, 12, ALL),
    Situation("h200", 4, "llama-3.1-70b", {"tp": 8, "pp": 4}, 8, (("selective", 0), ("fine", 1)), 2),
    Situation("b200", 2, "qwen3-32b", {"tp": 2, "pp": 4, "dp": 2}, 16),
    Situation("rtx3090", 2, "oases-llama-7b", {"tp": 4, "pp": 2}, 8),
    Situation("v100x8", 1, "bert-1.3b", {"pp": 4, "dp": 2}, 8),
    # one table for both ends; chunks of unequal numbers of layers
    Situation("a100x8", 1, "qwen3-1.7b", {"tp": 2, "pp": 4}, 8),
    # one stage
    Situation("h100", 2, "llama-3.1-8b", {"tp": 8, "dp": 2}, 6, (("none", 0), ("full", 1))),
    Situation("centauri_a", 4, "centauri-medium", {"tp": 4, "dp": 8}, 2),
    # mixtures of experts
    Situation("h100", 4, "mixtral-8x7b", {"dp": 8, "ep": 8, "pp": 4}, 8, ALL),
    Situation("a800", 2, "phi-31b", {"tp": 2, "dp": 4, "ep": 4, "pp": 2}, 8),
    # context parallelism, both exchanges
    Situation("a800", 8, "llama-66b", {"tp": 8, "cp": 2, "pp": 4}, 8, (("none", 0), ("fine", 0))),
    Situation("a40", 4, "gpt-6.7b", {"tp": 4, "cp": 2, "pp": 2, "dp": 2, "context": "ring"}, 4),
    # micro-batches that some pipelines refuse
    Situation("h100", 1, "llama-8b", {"tp": 2, "pp": 4}, 5),
)


def cli_cases() -> dict[str, Callable[[], Case]]:
    """Names of the cases that ``braid simulate`` can do, and how to record them."""
    cases = {}
    for one in SITUATIONS:
        degrees = " ".join(f"{key} {value}" for key, value in one.parallel.items())
        title = f"{one.model} on {one.nodes} {one.cluster}, {degrees}, {one.micro_batches} mb"
        for (recompute, zero), schedule in product(one.variants, SCHEDULES):
            name = f"{title}, recompute {recompute}, zero {zero}: {schedule}"
            cases[name] = partial(_simulated, _arguments(one, schedule, recompute, zero))
    return cases


def _arguments(one: Situation, schedule: str, recompute: str, zero: int) -> list[str]:
    """Of ``braid``."""
    named, replicas = ScheduleName.parse(schedule), int(one.parallel.get("dp", 1))
    shares = replicas * int(one.parallel.get("cp", 1)) > 1  # one replica has none
    keys = {
        "parallel": json.dumps({**one.parallel, "zero": zero if shares else 0}),
        "train.global_batch": one.micro_batches * one.micro_batch * replicas,
        "train.micro_batch": one.micro_batch,
        "train.recompute": recompute,
        "overlap.schedule": named.schedule,
        "overlap.pipeline": named.pipeline or "null",
    }
    sets = [text for key, value in keys.items() for text in ("--set", f"{key}={value}")]
    return ["simulate", one.model, "--cluster", one.cluster, "--nodes", str(one.nodes), *sets, "--json"]


def _simulated(arguments: Sequence[str]) -> Case:
    """The numbers of one step; `RuntimeError` where the command fails but does not refuse."""
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, ValueError):
        return {REFUSED: str(result.exception)}
    if result.exit_code:
        raise RuntimeError(f"braid {' '.join(arguments)}: {result.output}") from result.exception
    return numbers_of(json.loads(result.stdout))


def numbers_of(printed: Mapping[str, Any]) -> Case:
    """What is recorded of the object that ``braid simulate --json`` prints."""
    links = printed["communication"]
    found = {name: printed[name] for name in NUMBERS}
    return {**found, **{f"{level}_bytes": links[level]["bytes_per_gpu"] for level in ("intra", "inter")}}


# -- units of layers, and costs as measured ------------------------------------------------------------------

LONG: Final = ("braid", "braid:eager_w", "braid:twins", "braid:v")
PRESETS: Final = (("a40", "llama-8b", 4), ("h100", "gpt-6.7b", 2))
"""Cluster, model and tensor-parallel degree."""
LAYERS_PER_STAGE: Final = 8
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


def unit_cases() -> dict[str, Callable[[], Case]]:
    """Units of two and four layers, on one stage and two; and costs by which starting a collective and going
    on after it take time, for units of layers and (on one cluster) for every schedule layer by layer."""
    cases: dict[str, Callable[[], Case]] = {}
    for (cluster, model, tp), pp in product(PRESETS, (1, 2)):
        spec = replace(cluster_preset(cluster), nodes=1, gpus_per_node=tp * pp)
        kinds = [
            *product(("modelled",), LONG, (2, 4)),
            *product(("handled",), LONG, (4,)),
            *product(("handled",), SCHEDULES if cluster == PRESETS[0][0] else (), (0,)),
        ]
        for costs, schedule, unit_layers in kinds:
            named = ScheduleName.parse(schedule)
            setting = Setting(
                model=replace(model_preset(model), layers=LAYERS_PER_STAGE * pp),
                layout=ParallelLayout(tp=tp, pp=pp, placement=named.placement_on(pp)),
                workload=Workload(global_batch=8, micro_batch=1),
                unit_layers=unit_layers,
                **named._asdict(),
            )
            title = f"{model} on {cluster}, tp {tp} pp {pp}, {costs} costs, unit {unit_layers}: {schedule}"
            cases[title] = partial(_fastest, setting, spec, costs == "handled")
    return cases


def _fastest(setting: Setting, spec: ClusterSpec, handled: bool) -> Case:
    """The step of the fastest decisions; of all, their number and the slowest step."""
    named = (setting.pipeline,) if setting.pipeline else setting.kind.pipelines_on(setting.layout)
    benches = [
        modelled(spec)(replace(setting, pipeline=name)) for name in named or setting.kind.pipelines[:1]
    ]
    outcomes = [
        outcome_of(bench, choices, note, anything)
        for bench in (map(with_handling, benches) if handled else benches)
        for choices, note in decisions(bench)
    ]
    for outcome in outcomes:
        check(outcome.code)
    found = [outcome.numbers for outcome in outcomes]
    best = min(found, key=lambda one: one.step_seconds)
    slowest = max(one.step_seconds for one in found)
    return {**numbers_of(best.as_json()), "decisions": len(found), "slowest_seconds": slowest}


def with_handling(bench: CostedSetting) -> CostedSetting:
    """Modelled costs with what only measured ones have: starting, going on afterwards, slowdowns by side."""
    profile = bench.profile
    links = {key: ns for key, ns in profile.solo_ns.items() if profile.classes[key] in ("intra", "inter")}
    handling = {"issue_ns": {key: 3000 + ns // 60 for key, ns in links.items()}}
    handling["take_ns"] = {key: ns // 15 for key, ns in links.items()}
    return replace(bench, profile=replace(profile, slowdowns=SLOWDOWNS, barrier_ns=0, **handling))


def record(out: Path, pattern: str | None) -> int:
    """Write all cases whose names hold the pattern."""
    cases = {**cli_cases(), **unit_cases()}
    names = chosen(cases, pattern)
    found: dict[str, Case] = {}
    for number, name in enumerate(names, start=1):
        begin = time.perf_counter()
        found[name] = cases[name]()
        shown = found[name].get(REFUSED) or f"{found[name]['step_seconds']:.6f} s"
        told = f"{number}/{len(names)} {name}: {shown} ({time.perf_counter() - begin:.2f} s)"
        print(told, file=sys.stderr, flush=True)
    write_cases(out, found)
    return 0


def unlike(old: Case, new: Case) -> str:
    """Relative differences beyond the tolerance, by number; 1 for a number that is in one of them alone."""

    def share(name: str) -> float:
        if not (name in old and name in new):
            return 1.0
        before, after = old[name], new[name]
        return 0.0 if before == after else (after - before) / max(abs(before), abs(after))

    shares = {name: share(name) for name in sorted({*old, *new})}
    return ", ".join(f"{name} {found:+.2e}" for name, found in shares.items() if abs(found) > TOLERANCE)


if __name__ == "__main__":
    sys.exit(command("simulated steps", record, unlike))
