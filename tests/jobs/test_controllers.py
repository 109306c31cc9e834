"""Controllers that take over from one that died, as options: whose run they go on with."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from ray.exceptions import RayActorError

from braid.actors.controller.controller import RunOptions
from braid.actors.controller.records.run_records import CheckpointSaved, Started
from braid.actors.stage.rank.messages import RunPlan
from braid.jobs.training import controllers
from braid.jobs.training.controllers import run_on_ray
from braid.jobs.training.stopping import StopSignals
from tests.end_to_end.runs import BYTES_VOCABULARY, small_config

STARTED = Started(first_step=1, last_step=9, ranks=1, layout="", run_directory="")
SAVED = CheckpointSaved(step=4, path="", seconds=1.0)
GOES_ON = RunOptions(resume=True, again=True, takes_over=True)
RESUMES = RunOptions(resume=True, again=False, takes_over=True)
CASES: dict[str, tuple[dict[str, Any], list[Any], str, RunOptions]] = {
    # how the run was asked for, events before the controller dies, the mark that it wrote, the next options
    "nothing is written down: the folder holds the old run": (
        {"overwrite": True},
        [],
        "",
        RunOptions(overwrite=True),
    ),
    "a run that is written down goes on": ({"overwrite": True}, [STARTED], "new", GOES_ON),
    "a run with a checkpoint never begins again": ({}, [STARTED, SAVED], "new", RESUMES),
    "a resumed run": ({"resume": True, "until": 7}, [], "", replace(RESUMES, until=7)),
    "a resumed run that may begin": ({"resume": True, "again": True}, [], "", GOES_ON),
}


def planned(folder: Path) -> RunPlan:
    """In a folder that holds an old run."""
    config = small_config(folder)
    config.run_directory.mkdir(parents=True)
    (config.run_directory / "run-mark").write_text("old")
    return RunPlan(config=config, shape=config.check(BYTES_VOCABULARY), schedule="", data="")


@pytest.mark.parametrize("case", CASES)
def test_the_next_controller(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, events, mark, expected = CASES[case]
    started: list[RunOptions] = []

    def start(plan: RunPlan, options: RunOptions, replan: Any) -> Any:
        started.append(options)
        told = [*events, RayActorError()] if len(started) == 1 else []
        return Mock(**{"run.options.return_value.remote.return_value": told})

    monkeypatch.setattr(controllers, "start_controller", start)
    monkeypatch.setattr(controllers, "end_controller", ended := Mock())
    monkeypatch.setattr(controllers, "ray", Mock(get=lambda reference: reference))
    plan = planned(tmp_path)
    for _ in run_on_ray(plan, RunOptions(**asked), lambda config, launcher: plan, StopSignals()):
        if mark:
            (plan.config.run_directory / "run-mark").write_text(mark)
    assert len(started) == 2
    assert started[-1] == expected
    ended.assert_called_once()


def test_a_wish_to_stop_that_a_dead_controller_does_not_hear_raises_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actor = Mock()
    monkeypatch.setattr(controllers, "ray", Mock(get=Mock(side_effect=RayActorError())))
    controllers._stop(actor)
    actor.stop.remote.assert_called_once_with()
