"""Controllers that take over from one that died, as options: whose run they go on with."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from braid.actors.controller.controller import RunOptions
from braid.actors.controller.records.run_records import CheckpointSaved, Started
from braid.actors.stage.rank.messages import RunPlan
from braid.jobs.training import controllers
from braid.jobs.training.controllers import Controllers
from tests.end_to_end.runs import BYTES_VOCABULARY, small_config

STARTED = Started(first_step=1, last_step=9, ranks=1, layout="", run_directory="")
SAVED = CheckpointSaved(step=4, path="", seconds=1.0)


class Fakes:
    """Controllers that tell some events and die. What each was started with is kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.options: list[RunOptions] = []
        self.asked: list[int] = []
        self.tells: list[Any] = []
        self.config = small_config(tmp_path)
        monkeypatch.setattr(controllers, "start_controller", self._start)
        monkeypatch.setattr(controllers, "ray", SimpleNamespace(get=self._get, kill=self.asked.append))

    def _start(self, plan: RunPlan, options: RunOptions, replan: Any) -> Any:
        number = len(self.options)
        self.options.append(options)
        run = SimpleNamespace(remote=self._run)
        return SimpleNamespace(
            run=SimpleNamespace(options=lambda num_returns: run),
            stop=SimpleNamespace(remote=lambda: ("stop", number)),
        )

    def _run(self) -> Iterator[Any]:
        yield from self.tells
        yield RayActorError()

    def _get(self, reference: Any, timeout: float | None = None) -> Any:
        if isinstance(reference, RayActorError):
            raise reference
        if isinstance(reference, tuple):
            self.asked.append(reference[1])
        return reference

    def mark(self, mark: str) -> None:
        """The run's directory holds a run of this mark."""
        self.config.run_directory.mkdir(parents=True, exist_ok=True)
        (self.config.run_directory / "run-mark").write_text(mark)

    def controllers(self, **options: Any) -> Controllers:
        shape = self.config.check(BYTES_VOCABULARY)
        plan = RunPlan(config=self.config, shape=shape, schedule="", data="")
        return Controllers(plan, RunOptions(**options), lambda config, launcher: plan)

    def dies_after(self, run: Controllers, *events: Any, mark: str = "") -> RunOptions:
        """What the next controller is started with."""
        self.tells = list(events)
        run.start()
        if mark:
            self.mark(mark)
        with pytest.raises(RayActorError):
            list(run.events())
        run.start()
        return self.options[-1]


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes(monkeypatch, tmp_path)


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


@pytest.mark.parametrize(("asked", "events", "mark", "expected"), CASES.values(), ids=CASES)
def test_the_next_controller(
    fakes: Fakes, asked: dict[str, Any], events: list[Any], mark: str, expected: RunOptions
) -> None:
    fakes.mark("old")
    assert fakes.dies_after(fakes.controllers(**asked), *events, mark=mark) == expected


def test_a_wish_to_stop_that_a_dead_controller_does_not_hear_raises_nothing(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fakes.controllers()
    run.start()
    run.stop()
    assert fakes.asked == [0]

    def dead(reference: Any, timeout: float | None = None) -> Any:
        raise RayActorError

    monkeypatch.setattr(controllers.ray, "get", dead)
    run.stop()
