"""A run whose own checkpoints are gone goes on from their copies elsewhere, bit for bit."""

import shutil
from pathlib import Path

import pytest
import torch

from braid.actors.controller.json_lines import read_lines
from braid.actors.controller.manifest import CheckpointError
from braid.actors.controller.records import Started
from tests.end_to_end.runs import Run, run_plan, small_config, trained

pytestmark = pytest.mark.slow


def test_a_run_goes_on_from_its_mirror(tmp_path: Path, data: Path) -> None:
    mirror = tmp_path / "mirror"
    config = small_config(
        tmp_path / "runs",
        train={"steps": 8, "validation_samples": 2},
        checkpoint={"every": 3, "mirror": mirror.as_uri()},
        parallel={"tp": 2},
    )
    plan = run_plan(config, data)

    def notes(of: Run) -> str:
        return " ".join(note for event in of.events if isinstance(event, Started) for note in event.notes)

    whole = trained(plan)
    expected, parameters = whole.losses, whole.parameters()
    copies = mirror / config.name / (config.run_directory / "run-mark").read_text()
    assert sorted(path.name for path in copies.iterdir()) == ["run.json", "step-6", "step-8"]
    checkpoints = config.run_directory / "checkpoints"

    # All local ones are gone, and the newest copy is damaged.
    shutil.rmtree(checkpoints)
    torn = next((copies / "step-8").glob("__0*"))
    torn.write_bytes(torn.read_bytes()[:-1])
    resumed = trained(plan, resume=True)
    assert resumed.losses == expected[6:]
    assert "step 6 is read from file://" in notes(resumed)
    assert torn.name in notes(resumed)
    ours = resumed.parameters(8)
    assert not [name for name, tensor in ours.items() if not torch.equal(tensor, parameters[name])]
    lines = read_lines(config.run_directory / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 9))

    # Damaged ones here, good ones there, the newest included: what was wrong is told with what was done.
    for path in checkpoints.glob("step-*/.metadata"):
        path.write_bytes(b"damaged")
    again = trained(plan, resume=True)
    assert again.losses == []
    assert ".metadata has 7 bytes" in notes(again)
    assert "step 8 is read from file://" in notes(again)

    # Nothing anywhere.
    shutil.rmtree(checkpoints)
    shutil.rmtree(mirror)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in .* or file://.*mirror"):
        trained(plan, resume=True)
