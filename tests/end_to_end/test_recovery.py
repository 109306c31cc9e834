"""A rank is killed: all start anew from the newest checkpoint, and the run ends as if nothing had been."""

import json
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from braid.actors.config import Config
from braid.actors.controller.controller import Controller, RunOptions
from braid.actors.controller.group import Launcher, NoRoomError, WorkerError, WorkerGroup
from braid.actors.controller.json_lines import read_lines
from braid.actors.controller.planning import build_schedule
from braid.actors.controller.processes import ProcessLauncher
from braid.actors.controller.records import Event, Incident, Saved, StepDone
from braid.actors.stage.messages import RunPlan
from braid.dashboards.metrics import PrometheusSink
from braid.dashboards.metrics_feed import MetricsFeed
from braid.scheduling.schedule_text import write
from braid.scheduling.trace import KINDS
from tests.end_to_end.command import start, write_config, write_corpus
from tests.end_to_end.runs import BYTES_VOCABULARY, Run, prepare_text, run_layout, small_config
from tests.spans import read_folder

STEPS = 12
LAYOUTS: Sequence[dict[str, Any]] = (
    {"tp": 2},
    {"pp": 2},
    {"dp": 2},
    {"dp": 2, "zero": 3},
    {"cp": 2, "context": "ring"},
    {"dp": 2, "ep": 2},
)
EXPERTS = {"family": "moe", "experts": 4, "top_k": 2, "balance_loss": 0.02}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_text(tmp_path_factory.mktemp("recovery"), 7, files=4)


def killed(
    path: Path, data: Path, kills: Sequence[int], sink: PrometheusSink | None = None, **overrides: Any
) -> Run:
    """A run in which a rank that is drawn is killed after each of some numbers of events.

    sink: takes the run's metrics.
    """
    config = small_config(path, **overrides)
    shape = config.check(BYTES_VOCABULARY)
    plan = RunPlan(config=config, shape=shape, schedule=write(build_schedule(config, shape)), data=str(data))
    draw, events = random.Random(str(kills)), []
    left = list(kills)
    feed = None if sink is None else MetricsFeed(config.run_directory, sink)
    for event in Controller(plan, ProcessLauncher(config), RunOptions()).run():
        events.append(event)
        if feed is not None:
            feed.refresh()
        if left and sum(isinstance(e, StepDone) for e in events) == left[0]:
            left.pop(0)
            processes = json.loads((config.run_directory / "cluster.json").read_text())["processes"]
            os.kill(draw.choice(processes), signal.SIGKILL)
    assert not left, "every fault fired"
    return Run(config=config, shape=shape, directory=config.run_directory, events=tuple(events))


def last_of_each_step(events: Sequence[Event]) -> list[float]:
    """Losses; of a step that ran twice, the later one."""
    found = {event.record.step: event.record.loss for event in events if isinstance(event, StepDone)}
    return [found[step] for step in sorted(found)]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_a_killed_rank_changes_no_bit(tmp_path: Path, data: Path, parallel: dict[str, Any]) -> None:
    sections: dict[str, Any] = {
        "parallel": parallel,
        "model": EXPERTS if "ep" in parallel else {},
        "train": {"steps": STEPS, "dtype": "fp64"},
        "checkpoint": {"every": 4, "asynchronous": False},
    }
    # After step 2 (no checkpoint yet: from the beginning) and, counting steps that ran again, after step 6.
    sink = PrometheusSink()
    run = killed(tmp_path / "killed", data, [2, 8], sink, **sections)
    whole = run_layout(tmp_path / "whole", data, **sections)
    assert last_of_each_step(run.events) == whole.losses
    ours, theirs = run.parameters_at(STEPS), whole.parameters_at(STEPS)
    assert not [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]
    told = [event for event in run.events if isinstance(event, Incident)]
    assert [event.kind for event in told] == ["restarted", "restarted"]
    assert "all ranks go on as a new generation" in told[0].text
    lines = [json.loads(line) for line in (run.directory / "incidents.jsonl").read_text().splitlines()]
    assert [(line["step"], line["steps_lost"], line["generation"]) for line in lines] == [
        (2, 2, 2),
        (6, 2, 3),
    ]
    assert all(line["recovered_after_seconds"] > 0 for line in lines)
    steps = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert [line["generation"] for line in steps] == [2] * 4 + [3] * 8
    logs = "".join(path.read_text() for path in (run.directory / "logs").glob("rank-?.log"))
    assert [logs.count(f"generation {number}, rank") for number in (1, 2, 3)] == [2, 2, 2]
    assert logs.count("Traceback") >= 2, "what the death of a rank was to the other one"
    executed = [record.tokens for record in run.records]
    assert len(executed) > STEPS, "some steps ran twice"
    totals = {
        sample.name: sample.value
        for family in sink.registry.collect()
        for sample in family.samples
        if set(sample.labels) == {"run"}
    }
    assert totals["braid_tokens_total"] == sum(executed), "each of them counts once"
    assert totals["braid_step_duration_seconds_count"] == len(executed)
    assert (totals["braid_restarts_total"], totals["braid_starts_total"]) == (2, 3)
    assert totals["braid_checkpoints_total"] == sum(isinstance(event, Saved) for event in run.events)


@pytest.mark.slow
def test_there_is_a_budget(tmp_path: Path, data: Path) -> None:
    with pytest.raises(WorkerError, match="its process"):
        killed(tmp_path, data, [1, 2], failure={"max_restarts": 1}, parallel={"tp": 2})
    (events,) = tmp_path.glob("*/events.jsonl")
    kinds = [json.loads(line)["kind"] for line in events.read_text().splitlines()]
    assert kinds == ["started", "restarted", "started", "failed"]


class Shrinking(ProcessLauncher):
    """Machines that are fewer each time ranks are to start, down to one."""

    room = 4

    def capacity(self, group: WorkerGroup | None, avoid: Sequence[str] = ()) -> tuple[int, bool]:
        return self.room, False

    def start(self, ranks: int, avoid: Sequence[str] = (), stopped: Any = None) -> WorkerGroup:
        self.room = max(self.room - 1, 1)
        if ranks > self.room:
            raise NoRoomError(f"room for {self.room} of {ranks}")
        return super().start(ranks)


@pytest.mark.slow
def test_layouts_that_trained_no_step_are_one_incident_with_the_next(tmp_path: Path, data: Path) -> None:
    sections: dict[str, Any] = {"parallel": {"dp": 4}, "train": {"steps": 2, "global_batch": 24}}
    config = small_config(tmp_path, **sections, elastic={"min_ranks": 1, "max_ranks": 4})

    def planned(config: Config, _: Launcher) -> RunPlan:
        shape = config.check(BYTES_VOCABULARY)
        schedule = write(build_schedule(config, shape))
        return RunPlan(config=config, shape=shape, schedule=schedule, data=str(data))

    launcher = Shrinking(config)
    events = list(Controller(planned(config, launcher), launcher, RunOptions(), planned).run())
    assert [event.record.step for event in events if isinstance(event, StepDone)] == [1, 2]
    assert [event.kind for event in events if isinstance(event, Incident)] == ["resized"] * 3
    (line,) = read_lines(config.run_directory / "incidents.jsonl")
    assert (line["ranks"], line["steps_lost"]) == ([4, 1], 0)
    assert line["text"].split("; then ") == [
        f"not all nodes are there: room for {room} of {ranks}" for room, ranks in ((3, 4), (2, 3), (1, 2))
    ]
    assert line["recovered_after_seconds"] == pytest.approx(sum(line["parts"].values()))


@pytest.mark.slow
def test_actors_that_are_killed(tmp_path: Path) -> None:
    """The same through Ray and the command line: a rank, then the controller."""
    write_corpus(tmp_path)
    write_config(
        tmp_path,
        parallel={"tp": 2},
        train={"steps": 400},
        checkpoint={"every": 10},
        telemetry={"page": False},
    )
    process = start(tmp_path, "train", "run.yaml", "--until", "150", "--launcher", "ray")
    run = tmp_path / "runs" / "run"
    deadline = time.monotonic() + 90
    while not (run / "checkpoints" / "latest").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    cluster = json.loads((run / "cluster.json").read_text())
    os.kill(cluster["ranks"][1]["process"], signal.SIGKILL)
    while not (run / "incidents.jsonl").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    os.kill(cluster["controller"], signal.SIGKILL)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors + (run / "events.jsonl").read_text()
    assert "all ranks go on as a new generation" in output
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 151))
    incidents = [json.loads(line) for line in (run / "incidents.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in incidents] == ["rank failed", "controller died"]
    assert incidents[0]["rank"] == 1
    traces = read_folder(run)  # streamed to an actor, by two generations
    assert sorted(traces.ranks) == [0, 1]
    assert traces.steps[-1] == 149
    assert {batch.generation for batch in traces.step(149)} == {3}
    # How often a rank waits for the other one differs; what they run does not.
    ran = [batch.records["kind"] != KINDS.index("waiting") for batch in traces.step(149)]
    assert len({int(kinds.sum()) for kinds in ran}) == 1
    log = (run / "logs" / "rank-0.log").read_text()  # of two processes, the second one with a new controller
    assert [log.count(f"generation {number}, rank 0") for number in (1, 2, 3)] == [1, 1, 1]
    assert "Traceback" in log, "what the death of rank 1 was to it"
    assert all(0 <= line["steps_lost"] <= 20 for line in incidents)
