"""A run whose own checkpoints are gone goes on from their copies elsewhere, bit for bit."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch

from braid.actors.config import ConfigError
from braid.actors.controller.controller import Controller, RunOptions
from braid.actors.controller.manifest import CheckpointError
from braid.actors.controller.planning import build_schedule
from braid.actors.controller.records import Event, Saved, Started, StepDone
from braid.actors.stage.messages import RunPlan
from braid.scheduling.schedule_text import write
from tests.end_to_end.command import braid, write_config, write_corpus
from tests.end_to_end.runs import BYTES_VOCABULARY, KeptRanks, Run, prepare_text, small_config

pytestmark = pytest.mark.slow


def test_a_run_goes_on_from_its_mirror(tmp_path: Path) -> None:
    data = prepare_text(tmp_path, 11, files=3)
    mirror = tmp_path / "mirror"
    config = small_config(
        tmp_path / "runs",
        train={"steps": 8, "validation_samples": 2},
        checkpoint={"every": 3, "mirror": mirror.as_uri()},
        parallel={"tp": 2},
    )
    shape = config.check(BYTES_VOCABULARY)
    plan = RunPlan(config=config, shape=shape, schedule=write(build_schedule(config, shape)), data=str(data))

    def run(options: RunOptions) -> Run:
        events: list[Event] = list(Controller(plan, KeptRanks(config), options).run())
        return Run(config=config, shape=shape, directory=config.run_directory, events=tuple(events))

    def notes(of: Run) -> str:
        return " ".join(note for event in of.events if isinstance(event, Started) for note in event.notes)

    whole = run(RunOptions())
    expected, parameters = whole.losses, whole.parameters()
    copies = mirror / config.name / (config.run_directory / "run-mark").read_text()
    assert sorted(path.name for path in copies.iterdir()) == ["run.json", "step-6", "step-8"]
    checkpoints = config.run_directory / "checkpoints"

    # All local ones are gone, and the newest copy is damaged.
    shutil.rmtree(checkpoints)
    torn = next((copies / "step-8").glob("__0*"))
    torn.write_bytes(torn.read_bytes()[:-1])
    resumed = run(RunOptions(resume=True))
    assert resumed.losses == expected[6:]
    assert "step 6 is read from file://" in notes(resumed)
    assert torn.name in notes(resumed)
    ours = resumed.parameters_at(8)
    assert not [name for name, tensor in ours.items() if not torch.equal(tensor, parameters[name])]
    lines = (config.run_directory / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 9))

    # Damaged ones here, good ones there, the newest included: what was wrong is told with what was done.
    for path in checkpoints.glob("step-*/.metadata"):
        path.write_bytes(b"damaged")
    again = run(RunOptions(resume=True))
    assert again.losses == []
    assert ".metadata has 7 bytes" in notes(again)
    assert "step 8 is read from file://" in notes(again)

    # Nothing anywhere.
    shutil.rmtree(checkpoints)
    shutil.rmtree(mirror)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in .* or file://.*mirror"):
        run(RunOptions(resume=True))


def test_runs_of_one_mirror_go_on_from_their_own_checkpoints(tmp_path: Path) -> None:
    """Two runs save there; the disk of the first is lost, as a volume may be, and it is started again."""
    data = prepare_text(tmp_path, 11, files=3)
    mirror = tmp_path / "mirror"
    ends = {"a": 4, "b": 6}

    def run(name: str, options: RunOptions) -> list[Event]:
        config = small_config(
            tmp_path / "runs",
            train={"steps": ends[name] + 2, "validation_samples": 2, "seed": ends[name]},
            checkpoint={"every": 2, "keep": 2, "mirror": mirror.as_uri()},
        ).model_copy(update={"name": name})
        shape = config.check(BYTES_VOCABULARY)
        schedule = write(build_schedule(config, shape))
        plan = RunPlan(config=config, shape=shape, schedule=schedule, data=str(data))
        return list(Controller(plan, KeptRanks(config), options).run())

    def digests() -> dict[str, str]:
        files = [path for path in mirror.rglob("*") if path.is_file()]
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    first = {name: run(name, RunOptions(until=end)) for name, end in ends.items()}
    before = digests()
    shutil.rmtree(tmp_path / "runs")
    again = RunOptions(resume=True, again=True)  # what braid train --resume-if-begun does
    for name, end in ends.items():
        events = run(name, again)
        (started,) = [event for event in events if isinstance(event, Started)]
        assert started.first_step == end + 1
        assert f"step {end} is read from {mirror.as_uri()}" in " ".join(started.notes)
        assert [event.record.step for event in events if isinstance(event, StepDone)] == [end + 1, end + 2]
        others = {path: digest for path, digest in before.items() if f"/{name}/" not in path}
        assert others.items() <= digests().items(), "the other run's files are as they were"
        assert len([event for event in first[name] if isinstance(event, Saved)]) == end // 2
        before = digests()
    assert sorted(path.name for path in mirror.iterdir()) == ["a", "b"]


def test_a_run_that_nobody_has_begun_begins(tmp_path: Path) -> None:
    """Whoever starts it again by itself need not know."""
    data = prepare_text(tmp_path, 11, files=3)
    config = small_config(
        tmp_path / "runs",
        train={"steps": 2, "validation_samples": 2},
        checkpoint={"mirror": (tmp_path / "mirror").as_uri()},
    )
    shape = config.check(BYTES_VOCABULARY)
    schedule = write(build_schedule(config, shape))
    plan = RunPlan(config=config, shape=shape, schedule=schedule, data=str(data))
    with pytest.raises(ConfigError, match=r"no run in .* to resume"):
        list(Controller(plan, KeptRanks(config), RunOptions(resume=True)).run())
    events = list(Controller(plan, KeptRanks(config), RunOptions(resume=True, again=True)).run())
    assert [event.record.step for event in events if isinstance(event, StepDone)] == [1, 2]
    again = list(Controller(plan, KeptRanks(config), RunOptions(resume=True, again=True)).run())
    assert not [event for event in again if isinstance(event, StepDone)], "nothing is left to do"


def test_a_url_that_cannot_be_used_is_one_message(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    write_config(tmp_path, telemetry={"page": False})
    outcome = braid(tmp_path, "train", "run.yaml", "--set", "checkpoint.mirror=nosuch://bucket/run")
    assert outcome.code == 2
    assert "checkpoint.mirror='nosuch://bucket/run'" in outcome.errors
    assert "Traceback" not in outcome.errors
    assert not (tmp_path / "runs" / "run").exists()
