"""Faults of drills: at their place, in their rank, once in a run."""

import os
import random
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from braid.actors.controller.planning import build_schedule
from braid.actors.stage.faults import FOLDER, Saboteur, call, fire, fired_at
from braid.actors.stage.messages import Fault
from braid.scheduling.schedule import Direction, Instruction, Norm, Reduce, Step, passes_in
from braid.scheduling.schedule_text import parse, write
from tests.end_to_end.runs import BYTES_VOCABULARY, small_config


@pytest.fixture
def instructions(tmp_path: Path) -> tuple[Instruction, ...]:
    """Of a pipeline's first stage."""
    return of_first_stage(tmp_path, {"pp": 2, "dp": 2})


def of_first_stage(tmp_path: Path, parallel: dict[str, int]) -> tuple[Instruction, ...]:
    config = small_config(tmp_path / "runs", parallel=parallel)
    schedule = build_schedule(config, config.check(BYTES_VOCABULARY))
    return tuple(parse(write(schedule)).stages[0])


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Signals that this process would have sent to itself."""
    signals: list[int] = []

    def kill(process: int, number: int) -> None:
        assert process == os.getpid()
        signals.append(number)

    monkeypatch.setattr(os, "kill", kill)
    return signals


def gradients() -> Any:
    return SimpleNamespace(buckets=[SimpleNamespace(share=torch.zeros(4)) for _ in range(2)])


def fault(**changes: Any) -> Fault:
    return Fault(**{"name": "000", "kind": "kill", "rank": 1, "step": 5, "phase": "forward", **changes})


def positions(saboteur: Saboteur, step: int, count: int, signals: list[int]) -> list[int]:
    """Positions in a step before which something happened."""
    look = saboteur.before(step, gradients())
    found = []
    for position in range(count) if look is not None else ():
        before = len(signals)
        look(position)
        found += [position] * (len(signals) - before)
    return found


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_it_comes_once_at_its_place(
    tmp_path: Path, instructions: tuple[Instruction, ...], killed: list[int], phase: str
) -> None:
    draw, hit = random.Random(), set()
    for number in range(30):
        one = fault(name=f"{number:03}", phase=phase, place=draw.random())
        saboteur = Saboteur([one], 1, tmp_path, instructions)
        count = len(instructions)
        assert saboteur.before(4, gradients()) is None
        assert saboteur.before(6, gradients()) is None
        (place,) = positions(saboteur, 5, count, killed)
        hit.add(place)
        if phase == "optimizer":
            assert isinstance(instructions[place], Step)
        else:
            directions = {one.direction for one in passes_in(instructions[place])}
            assert (Direction.FORWARD if phase == "forward" else Direction.BACKWARD) in directions
        # The step is repeated, by the same process and by one that replaces it.
        assert positions(saboteur, 5, count, killed) == []
        assert positions(Saboteur([one], 1, tmp_path, instructions), 5, count, killed) == []
        assert abs(fired_at(tmp_path / FOLDER, one.name) - time.time()) < 60
    assert killed == [signal.SIGKILL] * 30
    assert len(hit) == 1 if phase == "optimizer" else len(hit) > 1


def test_without_a_step_it_comes_when_it_is_called(
    tmp_path: Path, instructions: tuple[Instruction, ...], killed: list[int]
) -> None:
    saboteur = Saboteur([fault(step=None), fault(name="001", step=None)], 1, tmp_path, instructions)
    assert saboteur.before(5, gradients()) is None
    call(tmp_path / FOLDER, "000")
    assert len(positions(saboteur, 6, len(instructions), killed)) == 1
    assert (tmp_path / FOLDER / "000").exists()
    assert not (tmp_path / FOLDER / "001").exists(), "another one was called"
    assert positions(saboteur, 7, len(instructions), killed) == []
    assert Saboteur([fault(step=None)], 0, tmp_path, instructions).before(7, gradients()) is None


def test_a_save_is_hit_when_it_is_called(
    tmp_path: Path, instructions: tuple[Instruction, ...], killed: list[int]
) -> None:
    saboteur = Saboteur([fault(step=None, phase="save")], 1, tmp_path, instructions)
    folder = tmp_path / "step-6.tmp-1"
    folder.mkdir()
    (folder / "__1_0.distcp").write_bytes(b"half")
    saboteur.during_save(6, folder)
    assert not [thread for thread in threading.enumerate() if thread.name == "saboteur"], "a save too early"
    call(tmp_path / FOLDER, "000")
    saboteur.during_save(12, folder)
    for thread in threading.enumerate():
        if thread.name == "saboteur":
            thread.join(10)
    assert killed == [signal.SIGKILL]


def test_other_ranks_are_spared(
    tmp_path: Path, instructions: tuple[Instruction, ...], killed: list[int]
) -> None:
    assert Saboteur([fault()], 0, tmp_path, instructions).before(5, gradients()) is None
    assert not (tmp_path / FOLDER).exists()


def test_a_stop_is_no_kill(tmp_path: Path, instructions: tuple[Instruction, ...], killed: list[int]) -> None:
    saboteur = Saboteur([fault(kind="stop", phase="backward")], 1, tmp_path, instructions)
    assert len(positions(saboteur, 5, len(instructions), killed)) == 1
    assert killed == [signal.SIGSTOP]


@pytest.mark.parametrize("parallel", [{"pp": 2, "dp": 2}, {}], ids=["replicas", "one rank"])
def test_a_gradient_that_is_no_number(tmp_path: Path, killed: list[int], parallel: dict[str, int]) -> None:
    """When all gradients are there and none is summed or squared yet, or it would not be seen."""
    instructions = of_first_stage(tmp_path, parallel)
    saboteur = Saboteur([fault(kind="nan", phase="backward")], 1, tmp_path, instructions)
    held = gradients()
    look = saboteur.before(5, held)
    assert look is not None
    first = next(n for n, one in enumerate(instructions) if isinstance(one, Reduce | Norm))
    for position in range(first):
        look(position)
    assert not held.buckets[0].share.isnan().any()
    look(first)
    assert held.buckets[0].share.isnan().sum() == 1
    assert not held.buckets[1].share.isnan().any()
    assert killed == []


def test_a_save_is_hit_while_it_writes(
    tmp_path: Path, instructions: tuple[Instruction, ...], killed: list[int]
) -> None:
    saboteur = Saboteur([fault(phase="save")], 1, tmp_path, instructions)
    assert saboteur.before(5, gradients()) is None
    folder = tmp_path / "step-6.tmp-1"
    folder.mkdir()
    saboteur.during_save(5, folder)
    assert not [thread for thread in threading.enumerate() if thread.name == "saboteur"], "a save too early"
    saboteur.during_save(6, folder)
    (waiting,) = [thread for thread in threading.enumerate() if thread.name == "saboteur"]
    assert killed == [], "nothing is written yet"
    (folder / "__1_0.distcp").write_bytes(b"half")
    waiting.join(10)
    assert killed == [signal.SIGKILL]
    saboteur.during_save(12, folder)
    assert not [thread for thread in threading.enumerate() if thread.name == "saboteur"], "it has fired"
    assert killed == [signal.SIGKILL]


def test_of_many_who_fire_one_does(tmp_path: Path) -> None:
    fired: list[bool] = []
    barrier = threading.Barrier(8)

    def shoot() -> None:
        barrier.wait()
        fired.append(fire(tmp_path / FOLDER, "000"))

    threads = [threading.Thread(target=shoot) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(fired) == [False] * 7 + [True]
