"""Times a schedule's blocks as if passes took fixed times and messages none.

These times serve to draw schedules and to find deadlocks; the simulator uses costs of operators and links.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from braid.scheduling.schedule.operations import Message, PassKind, Receive, Send, Start, Wait
from braid.scheduling.schedule.schedule import Block, Schedule, passes_in


@dataclass(frozen=True)
class TimedBlock:
    """A block with the time slots that it occupies on its stage: ``start`` to ``end``, without ``end``."""

    block: Block
    start: int
    end: int


@dataclass(frozen=True)
class Timeline:
    """Timed blocks of all stages. ``stuck``: stage -> position of the instruction that waits for ever."""

    stages: tuple[tuple[TimedBlock, ...], ...]
    stuck: Mapping[int, int]

    @property
    def length(self) -> int:
        """Number of time slots until the last block of all stages ends."""
        return max((timed.end for stage in self.stages for timed in stage), default=0)

    def idle(self, stage: int) -> int:
        """Return the number of time slots in which a stage runs no block."""
        return self.length - sum(timed.end - timed.start for timed in self.stages[stage])


def unit_timeline(schedule: Schedule, forward: int = 1, backward: int = 2) -> Timeline:
    """Time all blocks, if each stage runs its instructions in order, as soon as their inputs are there.

    ``forward``, ``backward``: slots of a pass. A message arrives when it is sent. The wait for a send lasts
    until the receive has started, since no schedule may count on buffering.
    """
    inputs = (backward + 1) // 2
    slots = {
        PassKind.FORWARD: forward,
        PassKind.BACKWARD: backward,
        PassKind.INPUT: inputs,
        PassKind.WEIGHT: backward - inputs,
        PassKind.END: 0,
    }
    queues: dict[int, list[_Task]] = {stage: [] for stage in range(len(schedule.stages))}
    starts: dict[tuple[int, Message], _Task] = {}
    waits: dict[_Task, tuple[int, Message]] = {}
    """Wait for a message -> (stage of the partner, its message), which has to start before."""
    for stage, instructions in enumerate(schedule.stages):
        for n, instruction in enumerate(instructions):
            match instruction:
                case Start(Send() | Receive() as message):
                    starts[stage, message] = stage, n
                case Wait(Send(moved, target)):
                    waits[stage, n] = target, Receive(moved, stage)
                case Wait(Receive(moved, source)):
                    waits[stage, n] = source, Send(moved, stage)
                case Block():
                    pass
                case _:
                    continue  # sums and updates delay neither blocks nor messages
            queues[stage].append((stage, n))
    after = {task: [starts.get(partner, _NEVER)] for task, partner in waits.items()}

    def length(task: _Task) -> int:
        return sum(slots[pass_.kind] for pass_ in passes_in(schedule.stages[task[0]][task[1]]))

    times, stuck = run_in_order(queues, lambda task: after.get(task, ()), length)
    return Timeline(
        stages=tuple(
            tuple(
                TimedBlock(i, *times[stage, n])
                for n, i in enumerate(instructions)
                if isinstance(i, Block) and (stage, n) in times
            )
            for stage, instructions in enumerate(schedule.stages)
        ),
        stuck={stage: queues[stage][index][1] for stage, index in stuck.items()},
    )


_Task = tuple[int, int]
"""Identifies an instruction: (stage, position in the stage's list)."""
_NEVER: _Task = (-1, -1)


def in_flight(schedule: Schedule, stage: int) -> int:
    """Return the peak number of a stage's forward passes whose backward pass has not run.

    Within a block backward passes count first, since its forward passes use the memory that they free.
    """
    peak = alive = 0
    for instruction in schedule.stages[stage]:
        for pass_ in sorted(passes_in(instruction), key=lambda pass_: pass_.forward):
            if pass_.kind not in (PassKind.INPUT, PassKind.END):
                alive += 1 if pass_.forward else -1
            peak = max(peak, alive)
    return peak


Task = TypeVar("Task", bound=Hashable)
Queue = TypeVar("Queue", bound=Hashable)


def run_in_order(
    queues: Mapping[Queue, Sequence[Task]],
    after: Callable[[Task], Iterable[Task]],
    ns: Callable[[Task], int],
) -> tuple[dict[Task, tuple[int, int]], dict[Queue, int]]:
    """Time tasks, if each queue runs its tasks in order and each task starts after the tasks ``after(task)``.

    ``ns``: duration of a task, in any unit. Returns (begin, end) of each task in that unit, and for every
    queue that cannot finish, the index of the task that waits for ever.
    """
    times: dict[Task, tuple[int, int]] = {}
    positions = dict.fromkeys(queues, 0)
    free = dict.fromkeys(queues, 0)
    moved = True
    while moved:
        moved = False
        for name, tasks in queues.items():
            while positions[name] < len(tasks):
                task = tasks[positions[name]]
                start = free[name]
                for earlier in after(task):
                    if earlier not in times:
                        break
                    start = max(start, times[earlier][1])
                else:
                    times[task] = (start, start + ns(task))
                    free[name] = times[task][1]
                    positions[name] += 1
                    moved = True
                    continue
                break
    return times, {name: position for name, position in positions.items() if position < len(queues[name])}
