"""What plans and explanations say of what overlap gains, and of what does not help."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from braid.jobs.planning.view import show_explanation, show_plan, usual_line
from braid.scheduling.plan import Plan, RunnerUp
from braid.scheduling.planner.cluster import plan_of, usual_schedules
from braid.scheduling.planner.decide import evaluate, modelled, within
from braid.scheduling.planner.explain import Explanation, WhatIf
from tests.scheduling.plans import cluster, setting


def usual(schedule: str, seconds: float) -> RunnerUp:
    return RunnerUp(
        layout="dp 4",
        schedule=schedule,
        micro_batch=1,
        recompute="none",
        step_seconds=seconds,
        peak_bytes=1,
        reason="",
    )


@pytest.fixture(scope="module")
def plan() -> Plan:
    spec = cluster(nodes=2, gpus=4)
    outcome = evaluate(setting("braid", tp=4, pp=2, micro_batches=8), spec)
    found = usual_schedules(outcome, modelled(spec), within(spec.usable_bytes))
    return plan_of(outcome, spec, (), found)


def shown(plan: Plan) -> str:
    file = io.StringIO()
    show_plan(Console(file=file, width=80), plan, cluster(nodes=2, gpus=4))
    return " ".join(file.getvalue().replace("│", " ").split())


def test_a_plan_says_of_what_it_is(plan: Plan) -> None:
    text, model = shown(plan), plan.setting.model
    assert f"{model.layers} layers, hidden {model.hidden}, {model.sequence:,} tokens" in text
    batch = plan.setting.workload.global_batch
    assert f"{batch:,} samples, {batch * model.sequence:,} tokens a step" in text
    assert f"megatron {next(o.step_seconds for o in plan.usual if o.schedule == 'megatron'):.3f} s" in text


def test_gains_are_over_the_best_of_the_usual_schedules(plan: Plan) -> None:
    ours = replace(plan, score=replace(plan.score, step_seconds=5.0))
    line = usual_line(replace(ours, usual=(usual("ddp", 5.5), usual("zbv", 6.0), usual("megatron", 7.0))))
    assert line == "ddp 5.500 s, megatron 7.000 s; the plan is 10.0% faster than ddp"
    line = usual_line(replace(ours, usual=(usual("ddp", 5.05), usual("megatron", 7.0))))
    assert "the plan is 1.0% faster than ddp, less than the simulator can tell (2%)" in line
    assert line.endswith("overlap beyond that gains nothing here")


def test_what_hurts_stands_apart_from_what_helps(plan: Plan) -> None:
    spec = cluster(nodes=2, gpus=4)
    found = (
        WhatIf(change="2x memory", step_seconds=1.0, speedup=1.2, layout="dp 8"),
        WhatIf(change="2x batch", step_seconds=2.0, speedup=1.001, layout="dp 8"),
        WhatIf(change="2x bandwidth", step_seconds=2.0, speedup=0.97, layout="dp 8"),
    )
    outcome = evaluate(setting("braid", tp=4, pp=2, micro_batches=8), spec)
    file = io.StringIO()
    show_explanation(
        Console(file=file, width=80),
        Explanation(plan=plan, outcome=outcome, ideal_overlap_seconds=1.0, what_if=found),
    )
    helps, _, not_help = file.getvalue().partition("what does not help: ")
    assert "2x memory" in helps
    assert "2x b" not in helps
    assert not_help.split() == ["2x", "batch", "(x", "1.001),", "2x", "bandwidth", "(x", "0.970)"]
