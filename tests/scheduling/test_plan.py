"""Plans: YAML that round-trips, replays to the same step, and is refused when edited into nonsense."""

import re
from dataclasses import replace
from functools import cache

import pytest

from braid.scheduling.generate.named import ScheduleName
from braid.scheduling.model.presets.library import load_cluster, model_preset
from braid.scheduling.plan.decide import EQUAL, best_of, modelled, replay, simulate_setting, within
from braid.scheduling.plan.explain import explain
from braid.scheduling.plan.layout_candidates import Search, candidates
from braid.scheduling.plan.layouts import LEAST, DoesNotFitError, plan_layout, plan_of
from braid.scheduling.plan.plan import Plan, parse_plan
from braid.scheduling.plan.space import COARSE, PART_BY_PART, variants, with_schedule
from tests.scheduling.plans import SMALL, cluster, setting


@cache
def made(schedule: str = "braid") -> Plan:
    """A plan of the small model on eight GPUs."""
    spec = cluster(nodes=2, gpus=4)
    return plan_of(simulate_setting(setting(schedule, tp=4, pp=2, micro_batches=8), spec), spec)


@pytest.mark.parametrize("schedule", ["intra_batch", "dhelix", "braid"])
def test_a_plan_round_trips_and_replays(schedule: str) -> None:
    plan = made(schedule)
    named = ScheduleName.parse(schedule)
    assert plan.setting.schedule == named.schedule
    assert plan.setting.pipeline == named.pipeline or schedule == str(plan.setting.name)
    again = parse_plan(plan.to_yaml(), "plan.yaml")
    assert again == plan
    outcome = replay(again.setting, again.choices, cluster(nodes=2, gpus=4))
    assert outcome.numbers.step_seconds == pytest.approx(plan.score.step_seconds, rel=1e-12)


@pytest.mark.parametrize(
    ("pattern", "text", "message"),
    [
        (r"braid_plan: 6", "braid_plan: 5\npieces: 2", r"braid_plan=5 is not version 6; make the plan anew"),
        (r"schedule: braid", "schedule: brad", r"schedule='brad' is not known; did you mean 'braid'"),
        (r"tp: 4", "tp: 0", r"parallel.tp=0 must be at least 1"),
        (r"    tp: 4\n", "", None),
        (r"recompute: none", "recompute: some", r"'some' is not a recompute policy; use one of none"),
        (r"placement: folded", "placement: linear", r"set it to 'folded'"),
        (r"    layers: 8", "    layers: 2", r"model.layers=2 cannot fill 4 chunks"),
        (r"pipeline: \w+", "pipeline: 1f1b", r"pipeline='1f1b' must be one of w, twins, eager_w, v"),
        (r"hop: \d", "hop: 9", r"hop=9, slots of a message in pipeline"),
        (
            r"partitions: \[\]",
            "partitions:\n  - what: tp/all_gather\n    pieces: 0",
            r"plan.yaml.setting.partitions.0.*: partition tp/all_gather: pieces=0 must be between 1 and 64",
        ),
        (r"unit_layers: 0", "unit_layers: 9", r"unit_layers=9 must be between 0 and 8 layers"),
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


@pytest.mark.slow
def test_the_search_takes_the_best_of_what_it_simulates() -> None:
    spec = cluster(nodes=2, gpus=4, inter=2e9)
    search = Search(model=SMALL, global_batch=32)
    plan = plan_layout(search, spec)
    assert plan.setting.layout.ranks == 8
    assert plan.score.peak_bytes <= spec.usable_bytes
    for other in plan.runners_up:
        if not other.reason.startswith("needs"):
            assert other.step_seconds >= plan.score.step_seconds
    for other in plan.usual:  # each simulated alone, with the same degrees
        alone = simulate_setting(with_schedule(plan.setting, other.schedule), spec)
        assert other.step_seconds == pytest.approx(alone.numbers.step_seconds, rel=0.01)
    assert [one.step_seconds for one in plan.usual] == sorted(one.step_seconds for one in plan.usual)
    assert "megatron" in {one.schedule for one in plan.usual}
    # Candidates that fit, simulated: the search looks at a part of them and must not miss by much.
    fitting = [c for c in candidates(search, spec) if c.bytes <= spec.usable_bytes]
    steps = []
    for candidate in fitting[:: max(1, len(fitting) // 15)]:
        outcome = simulate_setting(candidate.setting, spec, space=COARSE)
        if outcome.numbers.peak_bytes <= spec.usable_bytes:
            steps.append(outcome.numbers.step_seconds)
    assert plan.score.step_seconds <= min(steps) * 1.05


@pytest.mark.parametrize(
    ("model", "name", "nodes", "batch"),
    [("llama-3.1-8b", "h100", 1, 64), ("mixtral-8x7b", "a800", 8, 256)],
)
def test_no_step_is_quicker_than_its_estimate_allows(model: str, name: str, nodes: int, batch: int) -> None:
    """What the estimate says cannot win is not simulated."""
    spec, shape = load_cluster(name, nodes), model_preset(model)
    found = sorted(candidates(Search(model=shape, global_batch=batch), spec), key=lambda one: one.step_ns)
    fitting = [one for one in found if one.bytes <= spec.usable_bytes]
    for candidate in fitting[:12:6]:
        outcome = simulate_setting(candidate.setting, spec, space=COARSE)
        assert LEAST < outcome.step_ns / candidate.step_ns < 1.4


@pytest.mark.parametrize("share", [0.2, 0.6])
def test_what_is_left_out_for_its_memory_would_not_have_been_taken(share: float) -> None:
    spec = cluster(nodes=2, gpus=4, inter=2e9)
    tried = list(variants(setting("braid:eager_w", tp=2, pp=4, micro_batches=16), PART_BY_PART))
    assert len({one.hop for one in tried}) > 2
    alone = [best_of([one], modelled(spec), within(0)) for one in tried]
    needs = [one.missing_bytes for one in alone]
    limit = min(needs) + share * (max(needs) - min(needs))
    fitting = [one.step_ns for one in alone if one.missing_bytes <= limit]
    assert best_of(tried, modelled(spec), within(limit)).step_ns <= min(fitting) * (1 + EQUAL)


def test_what_is_fixed_stays() -> None:
    recompute = f"2*fine {SMALL.layers - 2}*full"
    named = ScheduleName("megatron")
    fixed = {"micro_batch": 2, "recompute": recompute, "schedule": named, "fixed": {"tp": 2}}
    found = plan_layout(Search(model=SMALL, global_batch=32, **fixed), cluster(nodes=2, gpus=4)).setting
    assert (found.layout.tp, found.workload.micro_batch) == (2, 2)
    assert (found.recompute, found.schedule) == (recompute, "megatron")
    slots = replace(setting("braid", tp=4, pp=2, micro_batches=8), pipeline="eager_w", hop=3)
    assert [*variants(slots, PART_BY_PART)] == [slots]


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
    with pytest.raises(ValueError, match="no layout of 8 GPUs divides"):
        plan_layout(Search(model=SMALL, global_batch=32, fixed={"tp": 3}), cluster(nodes=2, gpus=4))
    with pytest.raises(ValueError, match="needs 8 GPUs, cluster test has 1 x 4 = 4"):
        simulate_setting(setting(tp=4, pp=2), cluster(gpus=4))


@pytest.mark.parametrize("schedule", ["braid:eager_w", "intra_batch"])
def test_explain_says_what_would_help(schedule: str) -> None:
    """Of plans in which hops and chunks are decided, too: they are decided anew."""
    plan = made(schedule)
    assert bool(plan.setting.hop) is (schedule == "braid:eager_w")
    assert bool(plan.setting.partitions) is (schedule == "intra_batch")
    explanation = explain(plan, cluster(nodes=2, gpus=4))
    assert explanation.ideal_overlap_seconds < plan.score.step_seconds
    changes = {answer.change: answer for answer in explanation.what_if}
    assert changes["2x bandwidth inside nodes"].speedup > 1
    assert [a.speedup for a in explanation.what_if] == sorted(
        (a.speedup for a in explanation.what_if), reverse=True
    )
