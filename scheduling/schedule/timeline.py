"""When each block of a schedule runs if a forward and a backward take fixed times and links take none.

Used to draw schedules and to find deadlocks; costs of operators and links are the simulator's business.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from braid.scheduling.schedule.operations import Message, PassKind, Receive, Send, Start, Wait
from braid.scheduling.schedule.schedule import Block, Instruction, Schedule, passes_in


@dataclass(frozen=True)
class TimedBlock:
    """A block with the slots it occupies on its stage."""

    block: Block
    start: int
    end: int


@dataclass(frozen=True)
class Timeline:
    """All blocks of all stages; ``stuck`` holds, per stage, the position it could not pass, if any."""

    stages: tuple[tuple[TimedBlock, ...], ...]
    stuck: Mapping[int, int]

    @property
    def length(self) -> int:
        """The slot at which the last block ends."""
        return max((timed.end for stage in self.stages for timed in stage), default=0)

    def idle(self, stage: int) -> int:
        """Slots in which a stage runs no block."""
        return self.length - sum(timed.end - timed.start for timed in self.stages[stage])


def unit_timeline(schedule: Schedule, forward: int = 1, backward: int = 2) -> Timeline:
    """Run every stage's instructions as soon as what they need is there.

    A message arrives when it is sent. To wait for a send takes until its receive is asked for: more would be
    buffering, on which no schedule may count.
    """
    inputs = (backward + 1) // 2
    slots = {
        PassKind.FORWARD: forward,
        PassKind.BACKWARD: backward,
        PassKind.INPUT: inputs,
        PassKind.WEIGHT: backward - inputs,
        PassKind.END: 0,
    }
    queues: dict[int, list[_Task]] = {
        stage: [(stage, n) for n, i in enumerate(own) if _waits(i)]
        for stage, own in enumerate(schedule.stages)
    }
    messages = {
        (stage, one.what): (stage, n)
        for stage, own in enumerate(schedule.stages)
        for n, one in enumerate(own)
        if isinstance(one, Start) and isinstance(one.what, Message)
    }

    def after(task: _Task) -> Iterator[_Task]:
        stage, position = task
        match schedule.stages[stage][position]:
            case Wait(Send(moved, target)):
                yield messages.get((target, Receive(moved, stage)), _NEVER)
            case Wait(Receive(moved, source)):
                yield messages.get((source, Send(moved, stage)), _NEVER)

    def length(task: _Task) -> int:
        return sum(slots[one.kind] for one in passes_in(schedule.stages[task[0]][task[1]]))

    times, stuck = run_in_order(queues, after, length)
    return Timeline(
        stages=tuple(
            tuple(
                TimedBlock(one, *times[stage, n])
                for n, one in enumerate(own)
                if isinstance(one, Block) and (stage, n) in times
            )
            for stage, own in enumerate(schedule.stages)
        ),
        stuck={stage: queues[stage][place][1] for stage, place in stuck.items()},
    )


def _waits(instruction: Instruction) -> bool:
    """Whether an instruction takes part in the order of blocks and messages: sums never hold them up."""
    return isinstance(instruction, Block) or (
        isinstance(instruction, Start | Wait) and isinstance(instruction.what, Message)
    )


_Task = tuple[int, int]
"""Stage, and position in its list."""
_NEVER: _Task = (-1, -1)


def in_flight(schedule: Schedule, stage: int) -> int:
    """The largest number of forward passes of a stage whose backward pass has not run yet.

    Of a block, the backward passes count first: what they let go, the forward passes beside them take.
    """
    peak = alive = 0
    for instruction in schedule.stages[stage]:
        for one in sorted(passes_in(instruction), key=lambda one: one.forward):
            if one.kind not in (PassKind.INPUT, PassKind.END):
                alive += 1 if one.forward else -1
            peak = max(peak, alive)
    return peak


Task = TypeVar("Task", bound=Hashable)
Queue = TypeVar("Queue", bound=Hashable)


def run_in_order(
    queues: Mapping[Queue, Sequence[Task]],
    after: Callable[[Task], Iterable[Task]],
    ns: Callable[[Task], int],
) -> tuple[dict[Task, tuple[int, int]], dict[Queue, int]]:
    """When every task begins and ends if each queue serves its own in order, each after some others.

    Returns begin and end of each task, and the queues that cannot run to their end, with the place of the
    task that waits for ever.
    """
    times: dict[Task, tuple[int, int]] = {}
    places = dict.fromkeys(queues, 0)
    free = dict.fromkeys(queues, 0)
    moved = True
    while moved:
        moved = False
        for name, tasks in queues.items():
            while places[name] < len(tasks):
                task = tasks[places[name]]
                start = free[name]
                for other in after(task):
                    if other not in times:
                        break
                    start = max(start, times[other][1])
                else:
                    times[task] = (start, start + ns(task))
                    free[name] = times[task][1]
                    places[name] += 1
                    moved = True
                    continue
                break
    return times, {name: place for name, place in places.items() if place < len(queues[name])}
