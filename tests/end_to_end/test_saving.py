"""Checkpoints that find no room, or are written slowly and badly: training goes on and keeps what it can.

What is refused: `test_saver`.
"""

import contextlib
import errno
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from braid.actors.controller.controller import Controller, RunOptions
from braid.actors.controller.ranks.processes import ProcessLauncher
from braid.actors.controller.records.json_lines import read_lines
from braid.actors.controller.records.run_records import CheckpointSaved, Event, Finished, Incident, StepDone
from braid.actors.controller.state.manifest import MANIFEST, CheckpointError, verify
from braid.actors.stage.files.checkpoint_files import CheckedWriter
from braid.actors.stage.rank.faults import FOLDER, fire, fired_at
from braid.actors.stage.rank.messages import Written
from braid.actors.stage.rank.worker import Worker
from braid.actors.stage.state.checkpoint import Saves, read_tensors
from braid.actors.stage.state.global_state import UPDATES
from tests.end_to_end.runs import KeptRanks, run_plan, small_config, trained

pytestmark = pytest.mark.slow


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB: room for records, not for a checkpoint of 3 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1000k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_checkpoints_go_to_the_mirror_where_the_disk_is_full(
    small_disk: Path, tmp_path: Path, data: Path
) -> None:
    """All of them, of the steps they were due at; a run goes on from there."""
    mirror = tmp_path / "mirror"
    config = small_config(
        small_disk / "runs",
        train={"steps": 12},
        parallel={"tp": 2},
        checkpoint={"every": 5, "mirror": mirror.as_uri(), "keep": 3},
    )
    plan = run_plan(config, data)
    events = trained(plan).events
    assert [event.step for event in events if isinstance(event, CheckpointSaved)] == [5, 10, 12]
    assert isinstance(events[-1], Finished)
    assert events[-1].complete
    assert not list((config.run_directory / "checkpoints").glob("step-*")), "no half checkpoint is left"
    mark = (config.run_directory / "run-mark").read_text()
    copies = mirror / config.name / mark
    assert sorted(path.name for path in copies.glob("step-*")) == ["step-10", "step-12", "step-5"]
    for name in ("step-10", "step-12"):
        assert verify(copies / name).run == mark
    (copies / "step-12" / MANIFEST).unlink()
    again = trained(plan, resume=True)
    assert [record.step for record in again.records] == [11, 12]
    assert again.losses == [event.record.loss for event in events if isinstance(event, StepDone)][10:]


def test_training_goes_on_and_keeps_what_fits(small_disk: Path, data: Path) -> None:
    """There is no room for checkpoints, and after some steps none for spans and records either."""
    train = {"steps": 400, "validation_samples": 2}
    config = small_config(small_disk / "runs", train=train, checkpoint={"every": 5})
    controller = Controller(run_plan(config, data), KeptRanks(config), RunOptions())
    events: list[Event] = []
    told: list[str] = []

    def train_on() -> None:
        for event in controller.run():
            events.append(event)
            if isinstance(event, StepDone) and event.record.step == 12:
                deadline = time.monotonic() + 30  # a thread writes the lines
                while len(read_lines(config.run_directory / "metrics.jsonl")) < 4:
                    assert time.monotonic() < deadline, "the first lines are never written"
                    time.sleep(0.02)
                _fill(small_disk / "filler")
            if isinstance(event, Incident):
                told.append(event.text)
                if "No space left on device" in event.text:
                    controller.stop()

    with pytest.raises(
        CheckpointError, match=r"is done, but its checkpoint does not fit.*go on with resume=True"
    ):
        train_on()
    assert told[0] == "the checkpoint of step 5 does not fit on the disk; training goes on"
    assert any("No space left on device" in text for text in told)
    steps = [event.record.step for event in events if isinstance(event, StepDone)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > 10
    assert not list((config.run_directory / "checkpoints").glob("step-*")), "no half checkpoint is left"
    lines = read_lines(config.run_directory / "metrics.jsonl")
    assert [line["step"] for line in lines][:4] == [1, 2, 3, 4], "steps before the first checkpoint"


def _fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_a_fault_leaves_its_mark_on_a_full_disk(small_disk: Path) -> None:
    """A drill's next fault may come while the disk is still full."""
    folder = small_disk / FOLDER
    assert fire(folder, "000")
    _fill(small_disk / "filler")
    before = time.time()
    assert fire(folder, "001")
    assert not fire(folder, "001")
    assert before - 1e-3 <= fired_at(folder, "001") <= time.time()


# -- checkpoints that are written slowly, and badly at first -----------------------------------------------


GATE = "BRAID_TEST_GATE"
"""A variable of the ranks' environment: the file that their saves wait for."""


def events_of(path: Path, data: Path, launcher: Any, **keeping: Any) -> Iterator[Event]:
    train = {"steps": 8, "validation_samples": 2}
    config = small_config(
        path, parallel={"tp": 2}, train=train, checkpoint={"every": 4, "keep": 9, **keeping}
    )
    return Controller(run_plan(config, data), launcher(config), RunOptions()).run()


def troubled(rank: int, address: str) -> Worker:
    """A rank whose saves wait for the gate; the first one fails: rank 0 cannot read, rank 1 finds others."""
    write, read_back = Saves._write, CheckedWriter.read_back
    failed: list[bool] = []

    def slowly(self: Saves, *arguments: Any) -> Written:
        while not Path(os.environ[GATE]).exists():
            time.sleep(0.01)
        return write(self, *arguments)

    def badly(self: CheckedWriter) -> Any:
        if not failed:
            failed.append(True)
            if rank == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            path = next(path for path in self._directory.glob("__1_*"))
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        return read_back(self)

    Saves._write = slowly  # type: ignore[method-assign]
    CheckedWriter.read_back = badly  # type: ignore[method-assign]
    return Worker(rank, address)


def tensors(events: list[Event]) -> dict[int, dict[str, torch.Tensor]]:
    """Of all checkpoints of a run: parameters, moments and the number of updates, by step and name."""
    return {
        event.step: read_tensors(Path(event.path)) for event in events if isinstance(event, CheckpointSaved)
    }


def test_what_is_saved_is_the_state_of_its_step_however_late_it_is_written(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the second try, too: as in a run that waits for its saves."""
    gate = tmp_path / "gate"
    monkeypatch.setenv(GATE, str(gate))
    events: list[Event] = []
    for event in events_of(tmp_path / "late", data, lambda config: ProcessLauncher(config, serve=troubled)):
        events.append(event)
        if isinstance(event, StepDone) and event.record.step == 6:
            assert not [one for one in events if isinstance(one, CheckpointSaved)]
            gate.touch()
        if isinstance(event, CheckpointSaved):
            assert 0 < event.stalled_seconds < event.seconds
    (told,) = [event.text for event in events if isinstance(event, Incident)]
    assert told.startswith("the checkpoint of step 4 failed")
    assert os.strerror(errno.EIO) in told
    assert "what is read back is not what was written: the checksum of file" in told
    assert told.endswith("it is tried again")
    assert [event.record.step for event in events if isinstance(event, StepDone)] == list(range(1, 9))

    exact = tensors(list(events_of(tmp_path / "exact", data, KeptRanks, asynchronous=False)))
    late = tensors(events)
    assert list(late) == list(exact) == [4, 8]
    for step, ours in late.items():
        assert set(ours) == set(exact[step])
        assert {name.partition(".")[0] for name in ours} == {"parameter", "exp_avg", "exp_avg_sq", UPDATES}
        assert not [name for name in ours if not torch.equal(ours[name], exact[step][name])]
    weight = next(name for name in late[4] if name.startswith("parameter."))
    assert not torch.equal(late[4][weight], late[8][weight])
