"""When each block of a schedule runs if a forward and a backward take fixed times and links take none.

Used to draw schedules and to find deadlocks; costs of operators and links are the simulator's business.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from braid.scheduling.schedule import Block, Direction, Instruction, Receive, Schedule, Send, WaitReceive


@dataclass(frozen=True)
class TimedBlock:
    """A block with the slots it occupies on its stage."""

    block: Block
    start: int
    end: int


@dataclass(frozen=True)
class Timeline:
    """All blocks of all stages; ``stuck`` holds, per stage, the instruction it could not pass, if any."""

    stages: tuple[tuple[TimedBlock, ...], ...]
    stuck: Mapping[int, Instruction]

    @property
    def length(self) -> int:
        """The slot at which the last block ends."""
        return max((timed.end for stage in self.stages for timed in stage), default=0)

    def idle(self, stage: int) -> int:
        """Slots in which a stage runs no block."""
        return self.length - sum(timed.end - timed.start for timed in self.stages[stage])


def unit_timeline(schedule: Schedule, forward: int = 1, backward: int = 2) -> Timeline:
    """Run every stage's instructions as soon as what they need is there."""
    arrivals: dict[tuple[int, Block], int] = {}
    clocks = [0] * len(schedule.stages)
    cursors = [0] * len(schedule.stages)
    timed: list[list[TimedBlock]] = [[] for _ in schedule.stages]
    moved = True
    while moved:
        moved = False
        for stage, instructions in enumerate(schedule.stages):
            while cursors[stage] < len(instructions):
                instruction = instructions[cursors[stage]]
                if not _ready(instruction, stage, arrivals):
                    break
                match instruction:
                    case Block():
                        duration = forward if instruction.direction is Direction.FORWARD else backward
                        end = clocks[stage] + duration
                        timed[stage].append(TimedBlock(instruction, clocks[stage], end))
                        clocks[stage] = end
                    case Send(block, target):
                        arrivals[target, block] = clocks[stage]
                    case WaitReceive(block):
                        clocks[stage] = max(clocks[stage], arrivals[stage, block])
                cursors[stage] += 1
                moved = True
    stuck = {
        stage: instructions[cursors[stage]]
        for stage, instructions in enumerate(schedule.stages)
        if cursors[stage] < len(instructions)
    }
    return Timeline(stages=tuple(tuple(blocks) for blocks in timed), stuck=stuck)


def _ready(instruction: Instruction, stage: int, arrivals: Mapping[tuple[int, Block], int]) -> bool:
    return not isinstance(instruction, WaitReceive) or (stage, instruction.block) in arrivals


def in_flight(schedule: Schedule, stage: int) -> int:
    """The largest number of forward blocks of a stage whose backward has not run yet."""
    peak = alive = 0
    for block in schedule.blocks(stage):
        alive += 1 if block.direction is Direction.FORWARD else -1
        peak = max(peak, alive)
    return peak


def sent_blocks(instructions: tuple[Instruction, ...]) -> tuple[tuple[Block, int], ...]:
    """Blocks whose input a stage sends, with the stage it goes to, in order."""
    return tuple((i.block, i.stage) for i in instructions if isinstance(i, Send))


def received_blocks(instructions: tuple[Instruction, ...]) -> tuple[tuple[Block, int], ...]:
    """Blocks whose input a stage receives, with the stage it comes from, in order."""
    return tuple((i.block, i.stage) for i in instructions if isinstance(i, Receive))
