"""A rank is killed, or a run is stopped: it goes on from the newest checkpoint as if nothing had been."""

import json
import os
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from braid.actors.controller.controller import Controller, RunOptions
from braid.actors.controller.ranks.processes import ProcessLauncher
from braid.actors.controller.records.json_lines import read_lines
from braid.actors.controller.records.run_records import Incident, StepDone
from braid.scheduling.trace.spans import KINDS
from tests.actors.stand_ins import losses
from tests.end_to_end.command import braid, left_running, losses_of, start, write_config, write_corpus
from tests.end_to_end.runs import Run, run_layout, run_plan, small_config
from tests.spans import read_folder
from tests.waiting import within

STEPS = 12
LAYOUTS = ({"dp": 2, "zero": 3}, pytest.param({"pp": 2}, marks=pytest.mark.thorough))


def killed(path: Path, data: Path, kills: Sequence[int], **overrides: Any) -> Run:
    """A run in which a rank that is drawn is killed after each of some numbers of events."""
    config = small_config(path, **overrides)
    plan = run_plan(config, data)
    draw, events = random.Random(str(kills)), []
    left = list(kills)
    for event in Controller(plan, ProcessLauncher(config), RunOptions()).run():
        events.append(event)
        if left and sum(isinstance(e, StepDone) for e in events) == left[0]:
            left.pop(0)
            processes = json.loads((config.run_directory / "cluster.json").read_text())["processes"]
            os.kill(draw.choice(processes), signal.SIGKILL)
    assert not left, "every fault fired"
    return Run.of(plan, events)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_a_killed_rank_changes_no_bit(tmp_path: Path, data: Path, parallel: dict[str, Any]) -> None:
    sections: dict[str, Any] = {
        "parallel": parallel,
        "train": {"steps": STEPS, "dtype": "fp64"},
        "checkpoint": {"every": 4, "asynchronous": False},
    }
    # After step 2 (no checkpoint yet: from the beginning) and, counting steps that ran again, after step 6.
    run = killed(tmp_path / "killed", data, [2, 8], **sections)
    whole = run_layout(tmp_path / "whole", data, **sections)
    assert losses(run.events) == whole.losses
    ours, theirs = run.parameters(STEPS), whole.parameters(STEPS)
    assert not [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]
    told = [event for event in run.events if isinstance(event, Incident)]
    assert [event.kind for event in told] == ["restarted", "restarted"]
    assert "all ranks go on as a new generation" in told[0].text
    lines = read_lines(run.directory / "incidents.jsonl")
    keys = ("step", "steps_lost", "generation")
    assert [tuple(line[key] for key in keys) for line in lines] == [(2, 2, 2), (6, 2, 3)]
    assert all(line["recovered_after_seconds"] > 0 for line in lines)
    steps = read_lines(run.directory / "metrics.jsonl")
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert [line["generation"] for line in steps] == [2] * 4 + [3] * 8
    logs = "".join(path.read_text() for path in (run.directory / "logs").glob("rank-?.log"))
    assert [logs.count(f"generation {number}, rank") for number in (1, 2, 3)] == [2, 2, 2]
    assert logs.count("Traceback") >= 2, "what the death of a rank was to the other one"
    assert len(run.records) > STEPS, "some steps ran twice"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_on_ray_survives_its_ranks_and_its_controller(tmp_path: Path) -> None:
    """From the command line, on a cluster of its own: the fastest layout is taken, a rank is killed, then the
    controller; Ctrl-C ends it with a checkpoint. Processes with the same plan have the same losses."""
    write_corpus(tmp_path)
    write_config(
        tmp_path,
        parallel={"auto": True, "pp": 1},
        overlap={"schedule": "auto"},
        train={"steps": 100_000},
        checkpoint={"every": 10},
        cluster={"cpus_per_rank": 1},
        telemetry={"page": False},
    )
    process = start(tmp_path, "train", "run.yaml", "--launcher", "ray")
    run = tmp_path / "runs" / "run"
    metrics = run / "metrics.jsonl"

    def until(done: Callable[[], bool]) -> None:
        if not within(300, lambda: process.poll() is not None or done()):
            os.killpg(process.pid, signal.SIGINT)
            pytest.fail(f"it does not come to that: {process.communicate(timeout=60)}")
        assert process.poll() is None, process.communicate()

    until(lambda: any((run / "checkpoints").glob("step-*/manifest.json")))
    cluster = json.loads((run / "cluster.json").read_text())
    os.kill(cluster["ranks"][1]["process"], signal.SIGKILL)
    until((run / "incidents.jsonl").exists)
    os.kill(cluster["controller"], signal.SIGKILL)
    until(lambda: read_lines(metrics)[-1]["generation"] == 3)
    done = read_lines(metrics)[-1]["step"]
    until(lambda: read_lines(metrics)[-1]["step"] >= done + 20)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors + (run / "events.jsonl").read_text()
    assert "Traceback" not in errors
    assert output.count("measuring layout") > 1
    assert "all ranks go on as a new generation" in output
    assert "stopped early; go on with --resume" in output
    assert left_running(process.pid) == []
    lines = read_lines(metrics)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert (run / "checkpoints" / f"step-{len(lines)}").exists()
    incidents = read_lines(run / "incidents.jsonl")
    assert [line["kind"] for line in incidents] == ["rank failed", "controller died"]
    assert incidents[0]["rank"] == 1
    assert all(0 <= line["steps_lost"] <= 20 for line in incidents)
    traces = read_folder(run)  # streamed to an actor, by three generations
    assert sorted(traces.ranks) == [0, 1]
    assert traces.steps[-1] == len(lines) - 1
    newest = traces.step(traces.steps[-1])
    assert {batch.generation for batch in newest} == {3}
    # How often a rank waits for the other one differs; what they run does not.
    ran = [batch.records["kind"] != KINDS.index("waiting") for batch in newest]
    assert len({int(kinds.sum()) for kinds in ran}) == 1
    log = (run / "logs" / "rank-0.log").read_text()  # of two processes, the second one with a new controller
    assert [log.count(f"generation {number}, rank 0") for number in (1, 2, 3)] == [1, 1, 1]

    same = ("--plan", str(run / "plan.yaml"), "--set", "name=same", "--until", "30")
    alone = braid(tmp_path, "train", "run.yaml", "--launcher", "processes", *same)
    assert alone.code == 0, alone.errors
    assert "measuring layout" not in alone.output
    schedules = [(tmp_path / "runs" / name / "schedule.txt").read_text() for name in ("run", "same")]
    assert schedules[0] == schedules[1]
    assert "measuring layout" not in alone.output
    theirs = read_lines(tmp_path / "runs" / "same" / "metrics.jsonl")
    assert [line["loss"] for line in theirs] == [line["loss"] for line in lines[:30]]


# -- a run that was stopped goes on as if it had not been, in other layouts too; how it stops: `test_signals`

ONE_AFTER_THE_OTHER = (
    (),
    ("parallel.tp=2",),
    ("parallel.pp=2", "overlap.pipeline=folded"),
    ("parallel.dp=2", "parallel.zero=3"),
    ("parallel.tp=2", "parallel.tensor_degrees=2 2*1 2"),
    ("parallel.dp=2",),
)
"""Of the steps 1 to 3, 4 to 6 and so on."""


@pytest.mark.slow
def test_every_layout_goes_on_from_the_one_before(tmp_path: Path) -> None:
    """Without the corpus, too, whose tokens the run has; and a finished run to nothing."""
    write_corpus(tmp_path)
    write_config(tmp_path, train={"steps": 18, "dtype": "fp64", "warmup_steps": 3}, checkpoint={"every": 5})

    def train(name: str, *options: str) -> str:
        outcome = braid(tmp_path, "train", "run.yaml", "--set", f"name={name}", *options)
        assert outcome.code == 0, outcome.errors
        return outcome.output

    train("whole")
    whole, more = losses_of(tmp_path, "whole"), ()
    for number, layout in enumerate(ONE_AFTER_THE_OTHER, start=1):
        options = (word for override in layout for word in ("--set", override))
        said = train("moved", *options, "--until", str(3 * number), *more)
        assert len(losses_of(tmp_path, "moved")) == 3 * number
        assert ("the run has the tokens that were made before" in said) == bool(more)
        more = ("--set", "data.files=[gone.txt]", "--resume")
    assert losses_of(tmp_path, "moved") == pytest.approx(whole, rel=1e-9)
    assert "nothing left to do" in train("whole", "--resume")
    assert losses_of(tmp_path, "whole") == whole
