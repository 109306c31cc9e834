"""Plans: YAML that round-trips, replays to the same step, and is refused when edited into nonsense."""

import re
from dataclasses import replace

import pytest

from braid.scheduling.lowering.named import SCHEDULES
from braid.scheduling.plan import Plan, parse_plan
from braid.scheduling.planner.cluster import DoesNotFitError, Search, candidates, plan_layout, plan_of
from braid.scheduling.planner.compose import evaluate, replay
from braid.scheduling.planner.explain import explain
from braid.scheduling.spec import ModelShape
from tests.scheduling.plans import SMALL, cluster, setting


def made(schedule: str = "braid") -> Plan:
    """A plan of the small model on eight GPUs."""
    spec = cluster(nodes=2, gpus=4)
    return plan_of(evaluate(setting(schedule, tp=4, pp=2, micro_batches=8), spec), spec)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_a_plan_round_trips_and_replays(schedule: str) -> None:
    plan = made(schedule)
    again = parse_plan(plan.to_yaml(), "plan.yaml")
    assert again == plan
    outcome = replay(again.setting, again.choices, cluster(nodes=2, gpus=4))
    assert outcome.numbers.step_seconds == pytest.approx(plan.score.step_seconds, rel=1e-12)


@pytest.mark.parametrize(
    ("pattern", "text", "message"),
    [
        (r"braid_plan: 2", "braid_plan: 7", r"braid_plan=7 is not version 2; make the plan anew"),
        (r"  schedule: braid", "  schedule: brad", r"schedule='brad' must be one of megatron"),
        (r"    tp: 4", "    tp: 0", r"parallel.tp=0 must be at least 1"),
        (r"    tp: 4", "    tp: 3", r"not divisible by parallel.tp=3"),
        (r"    tp: 4", "    tp: four", r"plan.yaml.setting.layout.tp='four' must be a whole number"),
        (r"    tp: 4\n", "", None),
        (r"  dtype: bf16", "  dtype: fp8", r"dtype='fp8' must be one of bf16, fp32, fp64"),
        (r"  recompute: none", "  recompute: some", r"recompute='some' must be one of none, selective"),
        (r"placement: folded", "placement: linear", r"set it to 'folded'"),
        (r"placement: folded", "placement: upside", r"must be one of linear, folded"),
        (r"    layers: 8", "    layers: 2", r"model.layers=2 cannot fill 4 chunks"),
        (r"    method: order", "    method: magic", r"must be one of turns, barriers, order"),
        (r"  zero: 0", "  zero: 3", r"zero=3 must be one of 0, 1"),
        (r"step_seconds: [0-9.e-]+", "step_seconds: .nan", r"step_seconds=nan must be a finite number"),
        (r"  schedule: braid", "  scedule: braid", r"unknown key 'scedule'; did you mean 'schedule'\?"),
        (r"global_batch: 8", "global_batch: 7", None),
    ],
)
def test_an_edited_plan_is_refused_with_key_and_remedy(pattern: str, text: str, message: str | None) -> None:
    edited, count = re.subn(pattern, text, made().to_yaml(), count=1)
    assert count == 1, pattern
    if message is None:  # another valid plan
        assert parse_plan(edited, "plan.yaml") != made()
        return
    with pytest.raises(ValueError, match=message) as error:
        parse_plan(edited, "plan.yaml")
    assert str(error.value).startswith("plan.yaml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("F:qkv", "F:qvk", "F:qvk is no operator of the layer"),
        ("F:qkv", "F:projection", "F:projection stands twice"),
        ("F:qkv", "qkv", "must be written F:OPERATOR, B:OPERATOR or P:OPERATOR"),
        ("B:mlp_out.dgrad", "P:mlp_out.dgrad", "P:mlp_out.dgrad is put off, but B:activation.grad needs it"),
    ],
)
def test_an_edited_pairing_is_refused(old: str, new: str, message: str) -> None:
    plan = made()
    assert "layer|layer" in plan.choices.pairings
    steps = tuple(new if step == old else step for step in plan.choices.pairings["layer|layer"].steps)
    assert steps != plan.choices.pairings["layer|layer"].steps
    choices = replace(
        plan.choices, pairings={"layer|layer": replace(plan.choices.pairings["layer|layer"], steps=steps)}
    )
    with pytest.raises(ValueError, match=message):
        replay(plan.setting, choices, cluster(nodes=2, gpus=4))


def test_a_pairing_that_reads_too_early_is_refused() -> None:
    plan = made()
    assert "layer|layer" in plan.choices.pairings
    steps = list(plan.choices.pairings["layer|layer"].steps)
    steps.remove("F:qkv")
    steps.insert(0, "F:qkv")
    choices = replace(
        plan.choices,
        pairings={"layer|layer": replace(plan.choices.pairings["layer|layer"], steps=tuple(steps))},
    )
    with pytest.raises(ValueError, match="is read before it is there"):
        replay(plan.setting, choices, cluster(nodes=2, gpus=4))


def test_the_search_takes_the_best_of_what_it_simulates() -> None:
    spec = cluster(nodes=2, gpus=4, inter=2e9)
    search = Search(model=SMALL, global_batch=32)
    plan = plan_layout(search, spec)
    assert plan.setting.layout.ranks == 8
    assert plan.score.peak_bytes <= spec.usable_bytes
    for other in plan.runners_up:
        if not other.reason.startswith("needs"):
            assert other.step_seconds >= plan.score.step_seconds
    # Every candidate that fits, simulated: the search looks at a part of them and must not miss by much.
    fitting = [c for c in candidates(search, spec) if c.bytes <= spec.usable_bytes]
    steps = []
    for candidate in fitting[:: max(1, len(fitting) // 40)]:
        outcome = evaluate(candidate.setting, spec)
        if outcome.numbers.peak_bytes <= spec.usable_bytes:
            steps.append(outcome.numbers.step_seconds)
    assert plan.score.step_seconds <= min(steps) * 1.05


def test_what_is_fixed_stays() -> None:
    spec = cluster(nodes=2, gpus=4)
    plan = plan_layout(
        Search(
            model=SMALL,
            global_batch=32,
            micro_batch=2,
            recompute="fine",
            schedule="megatron",
            fixed={"tp": 2},
        ),
        spec,
    )
    assert plan.setting.layout.tp == 2
    assert plan.setting.workload.micro_batch == 2
    assert plan.setting.recompute == "fine"
    assert plan.setting.schedule == "megatron"


def test_a_job_that_fits_nowhere_says_what_is_missing_and_what_would_do() -> None:
    spec = cluster(nodes=1, gpus=4)
    large = replace(SMALL, hidden=8192, ffn=28672, heads=64, layers=16)
    with pytest.raises(DoesNotFitError) as error:
        plan_layout(Search(model=large, global_batch=64), spec)
    message = str(error.value)
    assert re.search(r"needs \d+\.\d GiB a GPU, \d+\.\d GiB more than the \d+\.\d GiB", message)
    assert "use fewer layers" in message  # a single node has no network to grow over
    with pytest.raises(DoesNotFitError, match=r"\d+ nodes \(\d+ GPUs\) would do"):
        plan_layout(Search(model=large, global_batch=64), cluster(nodes=2, gpus=2))


def test_nothing_divides() -> None:
    with pytest.raises(ValueError, match="no layout of 8 GPUs divides"):
        plan_layout(Search(model=SMALL, global_batch=32, fixed={"tp": 3}), cluster(nodes=2, gpus=4))


def test_a_layout_for_other_hardware_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 8 GPUs, cluster test has 1 x 4 = 4"):
        evaluate(setting(tp=4, pp=2), cluster(gpus=4))


def test_explain_says_what_would_help() -> None:
    plan = made("megatron")
    explanation = explain(plan, cluster(nodes=2, gpus=4))
    assert explanation.ideal_overlap_seconds < plan.score.step_seconds
    changes = {answer.change: answer for answer in explanation.what_if}
    assert changes["2x bandwidth inside nodes"].speedup > 1
    assert [a.speedup for a in explanation.what_if] == sorted(
        (a.speedup for a in explanation.what_if), reverse=True
    )


def test_a_moe_model_is_planned_with_experts_over_ranks() -> None:
    model = ModelShape(
        family="moe",
        hidden=1024,
        ffn=1408,
        layers=8,
        heads=16,
        kv_heads=8,
        head_dim=64,
        vocabulary=1024,
        sequence=1024,
        experts=8,
        top_k=2,
    )
    spec = cluster(nodes=2, gpus=4)
    plan = plan_layout(Search(model=model, global_batch=32, fixed={"ep": 4}), spec)
    assert plan.setting.layout.ep == 4
    assert plan.setting.layout.dp % 4 == 0
