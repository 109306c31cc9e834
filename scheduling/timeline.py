"""When each block of a schedule runs if a forward and a backward take fixed times and links take none.

Used to draw schedules and to find deadlocks; costs of operators and links are the simulator's business.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from braid.scheduling.schedule import (
    Block,
    Direction,
    Gradients,
    Instruction,
    Pair,
    Receive,
    Schedule,
    Send,
    Twins,
    WaitReceive,
    WaitSend,
    blocks_in,
)


@dataclass(frozen=True)
class TimedBlock:
    """A block or paired block with the slots it occupies on its stage."""

    block: Block | Pair | Twins
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
    run = _Run(schedule, forward, backward)
    while any(run.advance(stage) for stage in range(len(schedule.stages))):
        pass
    return Timeline(stages=tuple(tuple(blocks) for blocks in run.timed), stuck=run.stuck())


class _Run:
    """How far every stage has come; times are in slots."""

    def __init__(self, schedule: Schedule, forward: int, backward: int) -> None:
        self._forward, self._backward = forward, backward
        self._stages = schedule.stages
        self._clocks = [0] * len(schedule.stages)
        self._cursors = [0] * len(schedule.stages)
        self._sent: dict[Block, int] = {}
        self._asked: dict[Block, int] = {}
        self.timed: list[list[TimedBlock]] = [[] for _ in schedule.stages]

    def advance(self, stage: int) -> bool:
        """Run a stage until it has to wait; whether it came any further."""
        start = self._cursors[stage]
        instructions = self._stages[stage]
        while self._cursors[stage] < len(instructions) and self._try(
            stage, instructions[self._cursors[stage]]
        ):
            self._cursors[stage] += 1
        return self._cursors[stage] > start

    def _try(self, stage: int, instruction: Instruction) -> bool:
        """Run an instruction; False where it has to wait for another stage."""
        now = self._clocks[stage]
        match instruction:
            case Block() | Pair() | Twins():
                self._clocks[stage] = now + sum(map(self._duration, blocks_in(instruction)))
                self.timed[stage].append(TimedBlock(instruction, now, self._clocks[stage]))
            case Send(block):
                self._sent[block] = now
            case Receive(block):
                self._asked[block] = now
            case WaitSend(block) | WaitReceive(block):
                other_side = self._asked if isinstance(instruction, WaitSend) else self._sent
                if block not in other_side:
                    return False
                self._clocks[stage] = max(now, other_side[block])
        return True

    def _duration(self, block: Block) -> int:
        if block.direction is Direction.FORWARD:
            return self._forward
        if block.gradients is Gradients.BOTH:
            return self._backward
        input_share = (self._backward + 1) // 2
        return input_share if block.gradients is Gradients.INPUT else self._backward - input_share

    def stuck(self) -> dict[int, int]:
        """Stages that could not run to their end, with the position at which they wait."""
        return {
            stage: cursor for stage, cursor in enumerate(self._cursors) if cursor < len(self._stages[stage])
        }


def in_flight(schedule: Schedule, stage: int) -> int:
    """The largest number of forward blocks of a stage whose backward has not run yet."""
    peak = alive = 0
    for block in schedule.blocks(stage):
        if block.gradients is not Gradients.INPUT:
            alive += 1 if block.direction is Direction.FORWARD else -1
        peak = max(peak, alive)
    return peak
