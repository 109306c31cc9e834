"""A run whose own checkpoints are gone goes on from their copies elsewhere, bit for bit."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from braid.actors.controller.controller import Controller, RunOptions
from braid.actors.controller.manifest import CheckpointError
from braid.actors.controller.planning import build_schedule
from braid.actors.controller.records import Event, Started
from braid.actors.stage.messages import RunPlan
from braid.scheduling.schedule_text import write
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
