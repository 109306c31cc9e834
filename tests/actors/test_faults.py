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

from braid.actors.stage.rank.faults import FOLDER, Saboteur, fired_at, let_go
from braid.actors.stage.rank.messages import Fault, FaultKind, FaultPhase
from braid.scheduling.schedule.code import Stretch
from braid.scheduling.schedule.operations import Compute, Direction, Gather, Norm, Reduce, Start, Step
from braid.scheduling.schedule.schedule import passes_in
from tests.actors.test_bytes_of_shares import code_of
from tests.end_to_end.runs import run_plan, small_config
from tests.waiting import within


def of_first_stage(
    tmp_path: Path, parallel: dict[str, int], schedule: str | None = None
) -> tuple[Stretch, ...]:
    """The code of a pipeline's first stage."""
    overlap = {} if schedule is None else {"overlap": {"schedule": schedule}}
    plan = run_plan(small_config(tmp_path / "runs", parallel=parallel, **overlap))
    return code_of(plan).stages[0]


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Signals that this process would have sent to itself."""
    signals: list[int] = []

    def kill(process: int, number: int) -> None:
        assert process == os.getpid()
        signals.append(number)

    monkeypatch.setattr(os, "kill", kill)
    return signals


@pytest.mark.parametrize(("phase", "zero"), [("reduce", 0), ("reduce", 3), ("gather", 1)])
def test_a_rank_is_held_before_a_transfer(tmp_path: Path, phase: FaultPhase, zero: int) -> None:
    """Before any of its phase, whichever is drawn, until it is let go; and once only."""
    stretches = of_first_stage(tmp_path, {"dp": 2, "zero": zero}, "ddp")
    starts = [one.what for each in stretches for one in each.operations if isinstance(one, Start)]
    begun = [one for one in starts if isinstance(one, Reduce | Gather) and one.chunk is not None]
    wanted = [one for one in begun if isinstance(one, Gather if phase == "gather" else Reduce)]
    draw, hit = random.Random(), set()

    def transfer(look: Any, passed: list[Reduce | Gather]) -> None:
        for what in begun:
            look(what)
            passed.append(what)

    for number in range(8):
        one = fault(name=f"{number:03}", kind="hold", phase=phase, place=draw.random())
        saboteur, passed = Saboteur([one], 1, tmp_path, stretches), list[Reduce | Gather]()
        assert saboteur.before(5, gradients()) is None
        assert saboteur.transfers(4) is None
        thread = threading.Thread(target=transfer, args=(saboteur.transfers(5), passed))
        thread.start()
        assert within(10, (tmp_path / FOLDER / one.name).exists)
        assert begun[len(passed)] in wanted
        hit.add(len(passed))
        let_go(tmp_path / FOLDER, one.name)
        thread.join(10)
        assert passed == begun
        transfer(saboteur.transfers(5), [])  # the step is repeated, and nothing comes
    assert len(hit) > 1 or len(wanted) < 2


def gradients() -> Any:
    return SimpleNamespace(
        buckets=[SimpleNamespace(gradients=SimpleNamespace(shard=torch.zeros(4))) for _ in range(2)]
    )


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


KILL, STOP = signal.SIGKILL, signal.SIGSTOP


@pytest.mark.parametrize(
    ("phase", "kind", "sent"),
    [("forward", "kill", KILL), ("backward", "stop", STOP), ("optimizer", "kill", KILL)],
)
def test_it_comes_once_at_its_place(
    tmp_path: Path,
    killed: list[int],
    phase: str,
    kind: FaultKind,
    sent: signal.Signals,
) -> None:
    stretches, draw, hit = of_first_stage(tmp_path, {"pp": 2, "dp": 2}), random.Random(), set()
    for number in range(30):
        one = fault(name=f"{number:03}", kind=kind, phase=phase, place=draw.random())
        saboteur = Saboteur([one], 1, tmp_path, stretches)
        count = len(stretches)
        assert saboteur.before(4, gradients()) is None
        assert saboteur.before(6, gradients()) is None
        (place,) = positions(saboteur, 5, count, killed)
        hit.add(place)
        if phase == "optimizer":
            assert stretches[place].instruction == Compute(Step())
        else:
            directions = {one.direction for one in passes_in(stretches[place].instruction)}
            assert (Direction.FORWARD if phase == "forward" else Direction.BACKWARD) in directions
        # The step is repeated, by the same process and by one that replaces it.
        assert positions(saboteur, 5, count, killed) == []
        assert positions(Saboteur([one], 1, tmp_path, stretches), 5, count, killed) == []
        assert abs(fired_at(tmp_path / FOLDER, one.name) - time.time()) < 60
    assert killed == [sent] * 30
    assert len(hit) == 1 if phase == "optimizer" else len(hit) > 1


@pytest.mark.parametrize(("kind", "parallel"), [("nan", {"pp": 2, "dp": 2}), ("skip", {})], ids=str)
def test_a_gradient_that_is_no_number(
    tmp_path: Path, killed: list[int], parallel: dict[str, int], kind: FaultKind
) -> None:
    """When all gradients are there and none is summed or squared yet, or it would not be seen. A step that is
    to be left out has it each time that it is done."""
    stretches = of_first_stage(tmp_path, parallel)
    saboteur = Saboteur([fault(kind=kind, phase="backward")], 1, tmp_path, stretches)
    held = gradients()
    look = saboteur.before(5, held)
    assert look is not None
    first = next(
        n
        for n, one in enumerate(stretches)
        if isinstance(getattr(one.instruction, "what", None), Reduce | Norm)
    )
    for position in range(first):
        look(position)
    assert not held.buckets[0].gradients.shard.isnan().any()
    look(first)
    assert held.buckets[0].gradients.shard.isnan().sum() == 1
    assert not held.buckets[1].gradients.shard.isnan().any()
    assert killed == []
    held.buckets[0].gradients.shard[0] = 0.0
    look(first)
    assert held.buckets[0].gradients.shard.isnan().any() == (kind == "skip")
