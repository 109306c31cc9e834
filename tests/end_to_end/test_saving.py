"""A checkpoint that is written slowly, and badly at first, while training goes on. Refusals: `test_saver`."""

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from braid.actors.controller.controller import Controller, RunOptions
from braid.actors.controller.processes import ProcessLauncher
from braid.actors.controller.records import Event, Incident, Saved, StepDone
from braid.actors.stage import checkpoint
from braid.actors.stage.checked_files import CheckedWriter
from braid.actors.stage.checkpoint import read_tensors
from braid.actors.stage.global_state import UPDATES
from braid.actors.stage.messages import Written
from braid.actors.stage.worker import Worker
from tests.end_to_end.runs import KeptRanks, run_plan, small_config

pytestmark = pytest.mark.slow

GATE = "BRAID_TEST_GATE"
"""A variable of the ranks' environment: the file that their saves wait for."""


def events_of(path: Path, data: Path, launcher: Any, **keeping: Any) -> Iterator[Event]:
    """A run of two ranks and eight steps."""
    train = {"steps": 8, "validation_samples": 2}
    config = small_config(
        path, parallel={"tp": 2}, train=train, checkpoint={"every": 4, "keep": 9, **keeping}
    )
    return Controller(run_plan(config, data), launcher(config), RunOptions()).run()


def troubled(rank: int, address: str) -> Worker:
    """A rank whose saves wait for the gate; the first one fails: rank 0 cannot read, rank 1 finds others."""
    write, read_back = checkpoint._write, CheckedWriter.read_back
    failed: list[bool] = []

    def slowly(directory: Path, *rest: Any) -> Written:
        while not Path(os.environ[GATE]).exists():
            time.sleep(0.01)
        return write(directory, *rest)

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

    checkpoint._write = slowly
    CheckedWriter.read_back = badly  # type: ignore[method-assign]
    return Worker(rank, address)


def tensors(events: list[Event]) -> dict[int, dict[str, torch.Tensor]]:
    """Of all checkpoints of a run: parameters, moments and the number of updates, by step and name."""
    return {event.step: read_tensors(Path(event.path)) for event in events if isinstance(event, Saved)}


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
            assert not [one for one in events if isinstance(one, Saved)]
            gate.touch()
        if isinstance(event, Saved):
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
