"""Schedules as text grids: stages downwards, time to the right."""

from dataclasses import dataclass

from braid.scheduling.operations import Pass, PassKind, Receive, Send, Start, Wait
from braid.scheduling.schedule import Block, Instruction, Schedule
from braid.scheduling.timeline import in_flight, unit_timeline


@dataclass(frozen=True)
class Cell:
    """One character column group of a grid: a block, or nothing."""

    text: str
    block: Block | None


def grid(schedule: Schedule, width: int) -> list[list[Cell]]:
    """Rows of cells, one per stage; a slot of `unit_timeline` (forward 1, backward 2) takes ``width``."""
    timeline = unit_timeline(schedule)
    rows = []
    for stage in timeline.stages:
        cells: list[Cell] = []
        time = 0
        for timed in stage:
            cells += _idle(timed.start - time, width)
            text = str(Block(timed.block.passes)).center(width * (timed.end - timed.start))
            cells.append(Cell(text, timed.block))
            time = timed.end
        rows.append(cells + _idle(timeline.length - time, width))
    return rows


def _idle(slots: int, width: int) -> list[Cell]:
    return [Cell("·".center(width) * slots, None)] if slots else []


def cell_width(schedule: Schedule) -> int:
    """Columns per slot that keep every label legible and apart."""
    widths = [
        -(-len(str(Block(i.passes))) // _slots(i))
        for stage in schedule.stages
        for i in stage
        if isinstance(i, Block)
    ]
    return 1 + max(widths, default=0)


def _slots(block: Block) -> int:
    """Slots that a label has at least."""
    slots = {
        PassKind.FORWARD: 1,
        PassKind.BACKWARD: 2,
        PassKind.INPUT: 1,
        PassKind.WEIGHT: 1,
        PassKind.END: 0,
    }
    return sum(slots[one.kind] for one in block.passes)


def draw(schedule: Schedule) -> str:
    """The whole schedule as plain text."""
    width = cell_width(schedule)
    rows = grid(schedule, width=width)
    return "\n".join(
        f"stage {number} |{''.join(cell.text for cell in cells)}|" for number, cells in enumerate(rows)
    )


def draw_around(schedule: Schedule, stage: int, position: int, reach: int = 3) -> str:
    """The instructions around one of a stage, which is marked, beside those of the other stages.

    The middle column is the instruction at ``position`` (behind the last one: the end), and in the other
    stages' rows what comes closest to it.
    """
    lists = [[str(i) for i in instructions] + ["end"] for instructions in schedule.stages]
    middles = [_counterpart(schedule, stage, position, other) for other in range(len(lists))]
    lists[stage][position] = f">>{lists[stage][position]}<<"
    rows = [
        [texts[n] if 0 <= n < len(texts) else "" for n in range(middle - reach, middle + reach + 1)]
        for texts, middle in zip(lists, middles, strict=True)
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for number, row in enumerate(rows):
        cells = "  ".join(text.center(width) for text, width in zip(row, widths, strict=True))
        lines.append(f"{'*' if number == stage else ' '} stage {number} | {cells}".rstrip())
    return "\n".join(lines)


def _counterpart(schedule: Schedule, stage: int, position: int, other: int) -> int:
    """The position in another stage's list that is closest to an instruction of a stage.

    That is the same pass of the same micro-batch on the nearest chunk; without one, as far along the list.
    """
    here, there = schedule.stages[stage], schedule.stages[other]
    if other == stage:
        return position
    own = _pass_of(here[position]) if position < len(here) else None
    distances = [
        (abs(near.chunk - own.chunk), n)
        for n, instruction in enumerate(there)
        if own is not None
        and (near := _pass_of(instruction)) is not None
        and (near.direction, near.micro_batch) == (own.direction, own.micro_batch)
    ]
    _, nearest = min(distances, default=(0, position * len(there) // max(1, len(here))))
    return nearest


def _pass_of(instruction: Instruction) -> Pass | None:
    """The first pass of a block, or that whose input a message moves."""
    match instruction:
        case Block(passes):
            return passes[0]
        case Start(Send(moved) | Receive(moved)) | Wait(Send(moved) | Receive(moved)):
            return moved
        case _:
            return None


def summary(schedule: Schedule) -> str:
    """One line: slots, idle share, micro-batches in flight per stage."""
    timeline = unit_timeline(schedule)
    stages = range(len(schedule.stages))
    idle = sum(timeline.idle(s) for s in stages) / max(1, timeline.length * len(schedule.stages))
    alive = [in_flight(schedule, s) for s in stages]
    return (
        f"{schedule.name}: {len(schedule.stages)} stages, {schedule.chunks} chunks, "
        f"{schedule.micro_batches} micro-batches; {timeline.length} slots (forward 1, backward 2), "
        f"idle {idle:.1%}; blocks in flight {', '.join(map(str, alive))}"
    )
