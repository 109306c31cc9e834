"""What ``braid plan`` decides is what a run with it executes; any other plan is refused in one line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from braid.actors.config import ConfigError, parse_config
from braid.actors.controller.planning import build_schedule
from braid.jobs.planning.work import Request, make_plan, with_plan
from braid.scheduling.plan.decide import replay
from braid.scheduling.plan.plan import read_plan
from braid.scheduling.schedule.text import write
from braid.scheduling.text.yaml_text import parse_yaml
from tests.scheduling.plans import cluster

VOCABULARY = 257
CONTENT: Mapping[str, Mapping[str, Any]] = {
    "model": {"hidden": 64, "layers": 4, "heads": 4, "sequence": 32},
    "train": {"global_batch": 16, "micro_batch": 2},
    "parallel": {"tp": 2, "pp": 2},
    "overlap": {"schedule": "braid"},
}


def config_of(**changed: Mapping[str, Any]) -> Any:
    keys = {*CONTENT, *changed}
    return parse_config({key: {**CONTENT.get(key, {}), **changed.get(key, {})} for key in keys})


def planned(folder: Path, **changed: Mapping[str, Any]) -> Path:
    """A plan on a made-up cluster, with the schedule that it was simulated with."""
    config, spec = config_of(**changed), cluster(gpus=4)
    made = make_plan(Request(config, config.model.shape(VOCABULARY), spec))
    (folder / "plan.yaml").write_text(made.to_yaml(), encoding="utf-8")
    outcome = replay(made.setting, made.choices, spec)
    (folder / "schedule.txt").write_text(write(outcome.code.schedule), encoding="utf-8")
    assert read_plan(folder / "plan.yaml") == made
    return folder / "plan.yaml"


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planned(tmp_path_factory.mktemp("plan"))


def scheduled(plan: Path, **changed: Mapping[str, Any]) -> str:
    """The schedule that a run with the plan executes."""
    config = with_plan(config_of(**changed), plan)
    return write(build_schedule(config, config.check(VOCABULARY)))


def test_the_run_executes_the_planned_schedule(plan: Path) -> None:
    text = (plan.parent / "schedule.txt").read_text(encoding="utf-8")
    assert scheduled(plan) == text
    assert scheduled(plan, overlap={"schedule": "auto"}) == text
    assert read_plan(plan).setting.schedule == "braid"


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"parallel": "auto"},
        {"parallel": {"auto": True, "tp": 2, "zero": 1}},
        {"parallel": {"tp": 2}, "overlap": {"schedule": "braid"}},
        {"train": {**CONTENT["train"], "recompute": "auto"}, "overlap": {"schedule": "auto"}},
    ],
    ids=str,
)
def test_a_plan_gives_what_the_configuration_leaves_open(plan: Path, sections: Mapping[str, Any]) -> None:
    content = {"model": CONTENT["model"], "train": CONTENT["train"], **sections}
    config = with_plan(parse_config(content), plan)
    assert (config.layout().tp, config.layout().pp, config.layout().ranks) == (2, 2, 4)
    assert config.overlap.schedule == "braid"
    assert (config.train.recompute, config.parallel.zero) == ("none", 0)
    text = (plan.parent / "schedule.txt").read_text(encoding="utf-8")
    assert write(build_schedule(config, config.check(VOCABULARY))) == text


def test_a_configuration_that_was_written_down_leaves_as_much_open(plan: Path) -> None:
    content = {"model": CONTENT["model"], "train": CONTENT["train"], "overlap": {"plan": str(plan)}}
    config = parse_config(parse_yaml(parse_config(content).to_yaml(), "it"))
    planned = with_plan(config, plan)
    assert planned.layout().ranks == 4
    again = parse_config(parse_yaml(planned.to_yaml(), "it"))
    assert with_plan(again, plan).layout() == planned.layout() == again.layout()


def test_samples_of_a_micro_batch_and_policies_are_the_plans(tmp_path: Path) -> None:
    file = planned(tmp_path, train={"recompute": "full"})
    given = with_plan(parse_config({"train": {"global_batch": 16}}), file)
    assert (given.train.micro_batch, given.train.recompute) == (2, "full")


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"parallel": {"tp": 1}}, "has parallel.tp=2, the configuration says 1: leave parallel.tp out"),
        ({"parallel": {"dp": 2, "tp": 2, "pp": 2}}, "has parallel.dp=1, the configuration says 2"),
        ({"model": {"hidden": 128}}, "model"),
        ({"train": {"micro_batch": 1}}, "train.micro_batch"),
        ({"train": {"global_batch": 32}}, "train.global_batch"),
        ({"train": {"dtype": "bf16"}}, "train.dtype"),
        ({"train": {"reduce_dtype": "bf16"}}, "train.reduce_dtype=null, the configuration has bf16"),
        ({"train": {"recompute": "full"}}, "train.recompute"),
        ({"overlap": {"schedule": "megatron"}}, "overlap.schedule"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_plan_for_another_run_is_refused(
    plan: Path, changed: Mapping[str, Mapping[str, Any]], key: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        scheduled(plan, **changed)
    assert key in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_plan_of_rounded_sums_is_for_runs_with_them(tmp_path: Path) -> None:
    file = planned(tmp_path, train={"reduce_dtype": "bf16"})
    assert scheduled(file, train={"reduce_dtype": "bf16"})
    with pytest.raises(ConfigError, match=r"train\.reduce_dtype=bf16, the configuration has null: plan anew"):
        scheduled(file)
