"""Checkpoints while training goes on: the same bits, one at a time, and a disk that is full for a while."""

import errno
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from braid.actors.controller.controller import Controller, RunOptions
from braid.actors.controller.json_lines import read_lines
from braid.actors.controller.manifest import CheckpointError
from braid.actors.controller.planning import build_schedule
from braid.actors.controller.processes import ProcessLauncher
from braid.actors.controller.records import Event, Finished, Incident, Saved, StepDone
from braid.actors.stage import checkpoint
from braid.actors.stage.checked_files import CheckedWriter
from braid.actors.stage.checkpoint import read_tensors
from braid.actors.stage.global_state import UPDATES
from braid.actors.stage.messages import Fault, RunPlan, Written
from braid.actors.stage.worker import Worker
from braid.scheduling.schedule_text import write
from tests.end_to_end.runs import BYTES_VOCABULARY, KeptRanks, prepare_text, small_config

pytestmark = pytest.mark.slow

GATE, LOG = "BRAID_TEST_GATE", "BRAID_TEST_LOG"
"""Variables of the slow ranks' environment: files."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_text(tmp_path_factory.mktemp("saving"), 13, files=3)


def controller_of(path: Path, data: Path, launcher: Any = KeptRanks, **sections: Any) -> Controller:
    """A run of two ranks that is about to start."""
    sections = {"parallel": {"tp": 2}, "train": {"steps": 6, "validation_samples": 2}, **sections}
    config = small_config(path, **sections)
    shape = config.check(BYTES_VOCABULARY)
    schedule = write(build_schedule(config, shape))
    plan = RunPlan(config=config, shape=shape, schedule=schedule, data=str(data))
    return Controller(plan, launcher(config), RunOptions())


def slow(rank: int, address: str) -> Worker:
    """A rank whose saves wait for a gate, if there is one, and tell when they begin and end."""
    write = checkpoint._write

    def slowly(directory: Path, *rest: Any) -> Written:
        log = Path(os.environ[LOG]) / str(rank)
        with log.open("a") as file:
            file.write(f"begin {directory.name} ")
        while GATE in os.environ and not Path(os.environ[GATE]).exists():
            time.sleep(0.01)
        time.sleep(0.2)
        written = write(directory, *rest)
        with log.open("a") as file:
            file.write(f"end {directory.name} ")
        return written

    checkpoint._write = slowly
    return Worker(rank, address)


def slow_launcher(config: Any) -> ProcessLauncher:
    return ProcessLauncher(config, serve=slow)


def order(events: Sequence[Event]) -> list[tuple[str, int]]:
    """Steps and checkpoints in the order in which they were told."""
    steps = [("step", event.record.step) if isinstance(event, StepDone) else event for event in events]
    return [
        ("saved", event.step) if isinstance(event, Saved) else event
        for event in steps
        if isinstance(event, tuple | Saved)
    ]


def tensors(saved: Sequence[Event]) -> dict[int, dict[str, torch.Tensor]]:
    """Of all checkpoints of a run: parameters, moments and the number of updates, by step and name."""
    return {event.step: read_tensors(Path(event.path)) for event in saved if isinstance(event, Saved)}


def test_in_the_background_or_not_the_same_is_saved(tmp_path: Path, data: Path) -> None:
    found = {}
    for asynchronous in (True, False):
        keeping = {"every": 2, "keep": 9, "asynchronous": asynchronous}
        events = list(controller_of(tmp_path, data, checkpoint=keeping).run())
        found[asynchronous] = tensors(events)
        for event in events:
            if isinstance(event, Saved):
                assert 0 < event.stalled_seconds <= event.seconds
                assert asynchronous or event.stalled_seconds == event.seconds, "training waits for all of it"
    assert list(found[True]) == list(found[False]) == [2, 4, 6]
    for step, ours in found[True].items():
        theirs = found[False][step]
        assert set(ours) == set(theirs)
        assert {name.partition(".")[0] for name in ours} == {"parameter", "exp_avg", "exp_avg_sq", UPDATES}
        assert not [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]
    name = "parameter.head.weight" if "parameter.head.weight" in found[True][2] else min(found[True][2])
    assert not torch.equal(found[True][2][name], found[True][4][name])


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is saved is the state of its step, however late it is written."""
    gate = tmp_path / "gate"
    monkeypatch.setenv(GATE, str(gate))
    monkeypatch.setenv(LOG, str(tmp_path))
    keeping = {"every": 2, "keep": 9}
    events: list[Event] = []
    train = {"train": {"steps": 7, "validation_samples": 2}}
    sections: dict[str, Any] = {"checkpoint": {**keeping, "every": 4}, **train}
    for event in controller_of(tmp_path / "runs", data, slow_launcher, **sections).run():
        events.append(event)
        if isinstance(event, StepDone) and event.record.step == 6:
            assert not [one for one in events if isinstance(one, Saved)]
            gate.touch()
    told = order(events)
    assert told.index(("saved", 4)) > told.index(("step", 6))
    assert [one for one in told if one[0] == "saved"] == [("saved", 4), ("saved", 7)]
    late = tensors(events)
    plain = {**sections, "checkpoint": {**sections["checkpoint"], "asynchronous": False}}
    exact = tensors(list(controller_of(tmp_path / "runs", data, **plain).run()))
    assert list(late) == list(exact) == [4, 7]
    for step, ours in late.items():
        assert not [name for name in ours if not torch.equal(ours[name], exact[step][name])]


@pytest.mark.parametrize(("bound", "beside"), [(2, 0), (3, 1)])
def test_training_waits_rather_than_risk_more_steps(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, bound: int, beside: int
) -> None:
    """Saves that never end by themselves: so many steps are done beside each of them."""
    gate = tmp_path / "gate"
    monkeypatch.setenv(GATE, str(gate))
    monkeypatch.setenv(LOG, str(tmp_path))
    keeping = {"every": 2, "lose_at_most": bound}
    events: list[Event] = []
    opener = threading.Timer(3.0, gate.touch)
    opener.start()
    try:
        events += controller_of(tmp_path / "runs", data, slow_launcher, checkpoint=keeping).run()
    finally:
        opener.cancel()
    told = order(events)
    durable = done = 0
    for kind, step in told:
        durable, done = (step, done) if kind == "saved" else (durable, step)
        assert done - durable <= bound
    assert told.index(("saved", 2)) == told.index(("step", 2)) + 1 + beside


@pytest.mark.parametrize("hit", [3, 6])
def test_a_checkpoint_that_a_failure_has_cost_is_made_up_for(tmp_path: Path, data: Path, hit: int) -> None:
    """A rank dies as it writes one; copies in memory save the steps, and the checkpoint is still wanted."""
    sections: dict[str, Any] = {
        "parallel": {"tp": 2},
        "train": {"steps": 6, "validation_samples": 2},
        "checkpoint": {"every": 3, "copies_every": 1},
        "cluster": {"launcher": "processes"},
    }
    config = small_config(tmp_path, **sections)
    shape = config.check(BYTES_VOCABULARY)
    schedule = write(build_schedule(config, shape))
    fault = Fault(name="kill-save", kind="kill", rank=1, step=hit - 1, phase="save")
    plan = RunPlan(config=config, shape=shape, schedule=schedule, data=str(data), faults=(fault,))
    events = list(Controller(plan, ProcessLauncher(config), RunOptions()).run())
    assert (config.run_directory / "faults" / fault.name).exists(), "it fired"
    lines = (config.run_directory / "incidents.jsonl").read_text().splitlines()
    assert [json.loads(line)["restored_from"] for line in lines] == ["copies in memory"]
    steps = [event.record.step for event in events if isinstance(event, StepDone)]
    assert steps == [1, 2, 3, 4, 5, 6], "none was lost"
    saved = [event.step for event in events if isinstance(event, Saved)]
    assert len(saved) == 2
    assert 3 <= saved[0] < 6 == saved[1]
    assert isinstance(events[-1], Finished)
    assert events[-1].complete


def test_a_save_waits_for_the_one_before_it(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(GATE, raising=False)
    monkeypatch.setenv(LOG, str(tmp_path))
    controller = controller_of(tmp_path / "runs", data, slow_launcher, checkpoint={"every": 1, "keep": 2})
    events = list(controller.run())
    told = order(events)
    assert [step for kind, step in told if kind == "saved"] == [1, 2, 3, 4, 5, 6]
    for step in range(1, 5):
        assert told.index(("saved", step)) < told.index(("step", step + 2)), "at most one is under way"
    for rank in range(2):
        words = (tmp_path / str(rank)).read_text().split()
        assert words == [word for step in range(1, 7) for word in pair(step)]
    (checkpoints,) = (tmp_path / "runs").glob("*/checkpoints")
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step-5", "step-6"]


def pair(step: int) -> list[str]:
    return ["begin", f"step-{step}.tmp-1", "end", f"step-{step}.tmp-1"]


FAILURES = {
    "what is read back differs": "what is read back is not what was written: the checksum of file",
    "input/output error": os.strerror(errno.EIO),
    "stale file handle": os.strerror(errno.ESTALE),
}


def failing(rank: int, address: str) -> Worker:
    """A rank that fails at some of its saves, as the environment says."""
    kind, times = os.environ[GATE].rsplit("*", 1)
    left = [int(times) if rank == 1 else 0]
    read_back = CheckedWriter.read_back

    def once(self: CheckedWriter) -> Any:
        if left[0]:
            left[0] -= 1
            if kind == "what is read back differs":
                path = next(path for path in self._directory.glob("__1_*"))
                content = bytearray(path.read_bytes())
                content[len(content) // 2] ^= 1
                path.write_bytes(content)
            else:
                number = errno.EIO if kind == "input/output error" else errno.ESTALE
                raise OSError(number, os.strerror(number))
        return read_back(self)

    CheckedWriter.read_back = once  # type: ignore[method-assign]
    return Worker(rank, address)


def failing_launcher(config: Any) -> ProcessLauncher:
    return ProcessLauncher(config, serve=failing)


@pytest.mark.parametrize("asynchronous", [True, False], ids=["background", "at once"])
@pytest.mark.parametrize("kind", FAILURES)
def test_a_save_that_fails_is_tried_again_with_the_same_state(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, kind: str, asynchronous: bool
) -> None:
    monkeypatch.setenv(GATE, f"{kind}*2")
    keeping = {"every": 2, "keep": 9, "asynchronous": asynchronous}
    events = list(controller_of(tmp_path / "runs", data, failing_launcher, checkpoint=keeping).run())
    told = [event.text for event in events if isinstance(event, Incident)]
    assert len(told) == 2
    assert all(text.startswith("the checkpoint of step 2 failed") and FAILURES[kind] in text for text in told)
    assert all(text.endswith("it is tried again") for text in told)
    saved = [event.step for event in events if isinstance(event, Saved)]
    assert saved == [2, 4, 6]
    lines = read_lines(next((tmp_path / "runs").glob("*/events.jsonl")))
    assert [line["kind"] for line in lines].count("save-failed") == 2
    assert isinstance(events[-1], Finished)
    whole = tensors(list(controller_of(tmp_path / "whole", data, checkpoint=keeping).run()))
    for step, ours in tensors(events).items():
        assert not [name for name in ours if not torch.equal(ours[name], whole[step][name])]


def test_training_goes_on_without_a_save_that_fails_every_time(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GATE, "input/output error*3")
    events = list(controller_of(tmp_path / "runs", data, failing_launcher, checkpoint={"every": 3}).run())
    told = [event.text for event in events if isinstance(event, Incident)]
    assert len(told) == 3
    assert told[2].startswith("the checkpoint of step 3 failed")
    assert told[2].endswith("training goes on")
    assert [event.record.step for event in events if isinstance(event, StepDone)] == list(range(1, 7))
    assert [event.step for event in events if isinstance(event, Saved)] == [6]


def test_a_last_checkpoint_that_cannot_be_written_is_an_error(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GATE, "stale file handle*3")
    with pytest.raises(
        CheckpointError, match=r"step 6 is done, but its checkpoint failed \(.*Stale file handle"
    ):
        list(controller_of(tmp_path / "runs", data, failing_launcher).run())


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for records only, until its file ``filler`` is removed."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        with (folder / "filler").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 63 << 20)
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("asynchronous", [True, False], ids=["in the background", "not"])
def test_a_disk_that_is_full_for_a_while(disk: Path, tmp_path: Path, data: Path, asynchronous: bool) -> None:
    keeping = {"every": 2, "keep": 9, "asynchronous": asynchronous}
    events: list[Event] = []
    for event in controller_of(disk / "runs", data, checkpoint=keeping, train={"steps": 12}).run():
        events.append(event)
        if isinstance(event, Incident) and "checkpoint of step 2 does not fit on the disk" in event.text:
            (disk / "filler").unlink()
    assert not (disk / "filler").exists(), "it was full"
    assert "restarted" not in {event.kind for event in events if isinstance(event, Incident)}
    told = order(events)
    assert [step for kind, step in told if kind == "step"] == list(range(1, 13))
    saved = [step for kind, step in told if kind == "saved"]
    assert saved in ([4, 6, 8, 10, 12], [6, 8, 10, 12]), "what began before there was room failed as well"
    assert isinstance(events[-1], Finished)
    whole = list(controller_of(tmp_path / "whole", data, checkpoint=keeping, train={"steps": 12}).run())
    ours, theirs = tensors(events)[12], tensors(whole)[12]
    assert not [name for name in theirs if not torch.equal(ours[name], theirs[name])]
