"""Faults that a rank does to itself, at an exact place: for drills (`braid drill`) and for nothing else.

A fault fires once in a run, whatever is repeated: firing leaves a file in ``runs/NAME/faults``, made before
anything else happens, which is also the proof that it fired and when. One that has no step of its own waits
there for the file that calls it.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from braid.actors.stage.gradients import GradientBuckets
from braid.actors.stage.messages import Fault
from braid.scheduling.schedule import Direction, Instruction, Norm, Step, passes_in, sums_in

FOLDER = "faults"
"""Of a run's directory, where fired faults leave their marks."""


def fire(folder: Path, name: str) -> bool:
    """Mark a fault as fired, at the mark's time of change; False if it was before.

    The mark is empty: it has to come on a full disk as well.
    """
    folder.mkdir(exist_ok=True)
    now = time.time_ns()
    try:
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    os.utime(folder / name, ns=(now, now))  # the kernel's own is some milliseconds old
    return True


def fired_at(folder: Path, name: str) -> float:
    """When a fault has fired, seconds since 1970."""
    return (folder / name).stat().st_mtime


def call(folder: Path, name: str) -> None:
    """Let a fault come that has no step of its own."""
    folder.mkdir(exist_ok=True)
    _called(folder, name).touch()


def _called(folder: Path, name: str) -> Path:
    return folder / f"{name}.called"


class Saboteur:
    """The faults of one rank."""

    def __init__(
        self, faults: Sequence[Fault], rank: int, run: Path, instructions: Sequence[Instruction]
    ) -> None:
        self._folder = run / FOLDER
        self._faults = [fault for fault in faults if fault.rank == rank]
        self._places = {fault: _place(fault, instructions) for fault in self._faults}

    def before(self, step: int, gradients: GradientBuckets) -> Callable[[int], None] | None:
        """What the executor calls before every instruction of a step, with its position; None: nothing."""
        due = [
            fault
            for fault in self._faults
            if fault.phase != "save"
            and (self._is_called(fault) if fault.step is None else fault.step == step)
        ]
        if not due:
            return None

        def look(position: int) -> None:
            for fault in due:
                if position == self._places[fault] and fire(self._folder, fault.name):
                    self._do(fault, gradients)

        return look

    def during_save(self, steps_done: int, folder: Path) -> None:
        """Kill this process once the save has begun to write into its folder."""
        for fault in self._faults:
            due = self._is_called(fault) if fault.step is None else fault.step < steps_done
            if fault.phase == "save" and due and not (self._folder / fault.name).exists():
                threading.Thread(
                    target=self._when_written, args=(fault, folder), name="saboteur", daemon=True
                ).start()
                return

    def _is_called(self, fault: Fault) -> bool:
        return _called(self._folder, fault.name).exists()

    def _when_written(self, fault: Fault, folder: Path) -> None:
        deadline = time.monotonic() + 5.0
        while not any(folder.glob("__*")) and time.monotonic() < deadline:
            time.sleep(0.0005)
        if fire(self._folder, fault.name):
            os.kill(os.getpid(), signal.SIGKILL)

    @staticmethod
    def _do(fault: Fault, gradients: GradientBuckets) -> None:
        if fault.kind == "nan":
            gradients.buckets[0].share[0] = float("nan")
        else:
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)


def _place(fault: Fault, instructions: Sequence[Instruction]) -> int:
    """The position of the instruction before which a fault fires."""

    def fits(instruction: Instruction) -> bool:
        directions = {one.direction for one in passes_in(instruction)}
        if fault.phase == "optimizer":
            return isinstance(instruction, Step)
        if fault.kind == "nan":  # it reaches all ranks that sum it
            return isinstance(instruction, Norm) or bool(sums_in(instruction))
        return (Direction.FORWARD if fault.phase == "forward" else Direction.BACKWARD) in directions

    places = [place for place, instruction in enumerate(instructions) if fits(instruction)]
    if not places:
        return -1
    return places[0] if fault.kind == "nan" else places[int(fault.place * len(places))]
