"""Faults that a rank injects into itself at an exact instruction, for drills (`braid drill`) only.

A fault fires once in a run, even if its step is repeated: before it fires, the rank writes a file in
``runs/NAME/faults``, which also proves the fault and its time. Only ``skip`` fires whenever its step runs.
"""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from braid.actors.stage.rank.messages import Fault
from braid.actors.stage.state.buckets import RankBuckets
from braid.scheduling.schedule.code import Stretch
from braid.scheduling.schedule.operations import Compute, Direction, Gather, Norm, Reduce, Start, Step
from braid.scheduling.schedule.schedule import passes_in, sums_in

FOLDER = "faults"
"""Name of the folder, in a run's directory, of the files that mark faults as fired."""
_HOLD_SECONDS = 30.0
"""Seconds after which a rank that a ``hold`` fault stops continues by itself."""
_SPOILS = ("nan", "skip")
"""Kinds of faults that set a gradient to NaN."""
_TRANSFERS: dict[str, type] = {"reduce": Reduce, "gather": Gather}
"""Type of the transfer before which a fault fires, by the fault's phase."""


def fire(folder: Path, name: str) -> bool:
    """Mark a fault as fired at the present time; return False if it fired before.

    The mark is an empty file, which can be made on a full disk as well.
    """
    folder.mkdir(exist_ok=True)
    now = time.time_ns()
    try:
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    os.utime(folder / name, ns=(now, now))  # the kernel's own time is some milliseconds old
    return True


def fired_at(folder: Path, name: str) -> float:
    """Return when a fault fired, in seconds since 1970."""
    return (folder / name).stat().st_mtime


def let_go(folder: Path, name: str) -> None:
    """Let a rank continue that waits in a ``hold`` fault."""
    (folder / f"{name}.released").touch()


class Saboteur:
    """Injects the faults of one rank."""

    def __init__(self, faults: Sequence[Fault], rank: int, run: Path, stretches: Sequence[Stretch]) -> None:
        """Select the faults of ``rank``; ``stretches``: its code of a step, ``run``: the run's directory."""
        self._folder = run / FOLDER
        self._faults = [fault for fault in faults if fault.rank == rank]
        self._positions = {fault: _position(fault, stretches) for fault in self._faults}

    def before(self, step: int, buckets: RankBuckets) -> Callable[[int], None] | None:
        """Return a callback to call before every instruction of a step; None if no fault is due."""
        due = [fault for fault in self._due(step) if fault.phase not in _TRANSFERS]

        def look(position: int) -> None:
            for fault in due:
                reached = position == self._positions[fault]
                if reached and (fire(self._folder, fault.name) or fault.kind == "skip"):
                    self._do(fault, buckets)

        return look if due else None

    def transfers(self, step: int) -> Callable[[Reduce | Gather], None] | None:
        """Return a callback to call before every gradient sum and gather; None if no fault is due."""
        due = [fault for fault in self._due(step) if fault.phase in _TRANSFERS]
        begun: Counter[type] = Counter()

        def look(transfer: Reduce | Gather) -> None:
            for fault in due:
                matches = isinstance(transfer, _TRANSFERS[fault.phase])
                number = begun[type(transfer)]
                if matches and number == self._positions[fault] and fire(self._folder, fault.name):
                    self._do(fault)
            begun[type(transfer)] += 1

        return look if due else None

    def during_save(self, steps_done: int, folder: Path) -> None:
        """If a fault is due, kill this process as soon as the save has written into ``folder``."""
        for fault in self._faults:
            due = fault.phase == "save" and fault.step < steps_done
            if due and not (self._folder / fault.name).exists():
                hit = partial(self._when_written, fault, folder)
                threading.Thread(target=hit, name="saboteur", daemon=True).start()
                return

    def _due(self, step: int) -> Iterator[Fault]:
        """Yield the faults that are due in a step, except faults of saves."""
        return (fault for fault in self._faults if fault.step == step and fault.phase != "save")

    def _when_written(self, fault: Fault, folder: Path) -> None:
        deadline = time.monotonic() + 5.0
        while not any(folder.glob("__*")) and time.monotonic() < deadline:
            time.sleep(0.0005)
        if fire(self._folder, fault.name):
            os.kill(os.getpid(), signal.SIGKILL)

    def _do(self, fault: Fault, buckets: RankBuckets | None = None) -> None:
        match fault.kind:
            case "nan" | "skip":
                assert buckets is not None
                buckets.buckets[0].gradients.shard[0] = float("nan")
            case "hold":
                deadline = time.monotonic() + _HOLD_SECONDS
                released = self._folder / f"{fault.name}.released"
                while not released.exists() and time.monotonic() < deadline:
                    time.sleep(0.002)
            case _:
                os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)


def _counts(transfer: object) -> bool:
    """Tell whether a transfer moves gradients or parameters; the sum of the gradient norm does not."""
    return isinstance(transfer, Gather) or (isinstance(transfer, Reduce) and transfer.chunk is not None)


def _position(fault: Fault, stretches: Sequence[Stretch]) -> int:
    """Return the index of the instruction, or of the transfer, before which a fault fires."""
    if fault.phase in _TRANSFERS:
        operations = (operation for stretch in stretches for operation in stretch.operations)
        starts = (operation.what for operation in operations if isinstance(operation, Start))
        begun = [type(transfer) for transfer in starts if _counts(transfer)]
        first_sum = begun.index(Reduce) if Reduce in begun else len(begun)
        if fault.phase == "gather" and Gather in begun[:first_sum]:
            begun = begun[:first_sum]  # gathers that the previous step postponed; others run beside sums
        return int(fault.place * begun.count(_TRANSFERS[fault.phase]))

    def fits(stretch: Stretch) -> bool:
        instruction = stretch.instruction
        directions = {each.direction for each in passes_in(instruction)}
        if fault.phase == "optimizer":
            return instruction == Compute(Step())
        if fault.kind in _SPOILS:  # the NaN reaches all ranks that sum this gradient
            return instruction == Compute(Norm()) or bool(sums_in(instruction))
        return (Direction.FORWARD if fault.phase == "forward" else Direction.BACKWARD) in directions

    positions = [position for position, stretch in enumerate(stretches) if fits(stretch)] or [-1]
    return positions[0] if fault.kind in _SPOILS else positions[int(fault.place * len(positions))]
