"""Draws schedules as text grids: stages downwards, time to the right."""

from braid.scheduling.schedule.operations import Pass, Receive, Send, Start, Wait
from braid.scheduling.schedule.schedule import Block, Instruction, Schedule
from braid.scheduling.schedule.timeline import in_flight, unit_timeline

Cell = tuple[str, Block | None]
"""Cell of a grid: its text, and the block that it shows (None if the stage is idle)."""


def grid(schedule: Schedule) -> list[list[Cell]]:
    """Draw a schedule: return one row of cells per stage, with equally wide time slots (`unit_timeline`)."""
    timeline = unit_timeline(schedule)
    blocks = [timed for stage in timeline.stages for timed in stage]
    width = 1 + max((-(-len(_label(b.block)) // (b.end - b.start)) for b in blocks), default=0)
    rows = []
    for stage in timeline.stages:
        cells: list[Cell] = []
        time = 0
        for timed in stage:
            if timed.start > time:
                cells.append(("·".center(width) * (timed.start - time), None))
            text = _label(timed.block).center(width * (timed.end - timed.start))
            cells.append((text, timed.block))
            time = timed.end
        if timeline.length > time:
            cells.append(("·".center(width) * (timeline.length - time), None))
        rows.append(cells)
    return rows


def _label(block: Block) -> str:
    return str(Block(block.passes))


def draw_around(schedule: Schedule, stage: int, position: int, reach: int = 3) -> str:
    """Draw the instructions around ``position`` of a stage, and the matching instructions of other stages.

    The middle column shows the marked instruction (or the end, behind the last one) and, in the rows of other
    stages, the instruction closest to it.
    """
    lists = [[str(i) for i in instructions] + ["end"] for instructions in schedule.stages]
    middles = [_counterpart(schedule, stage, position, other_stage) for other_stage in range(len(lists))]
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


def _counterpart(schedule: Schedule, stage: int, position: int, other_stage: int) -> int:
    """Return the position in another stage's list that corresponds to ``position`` in the list of ``stage``.

    That instruction runs the same micro-batch in the same direction on the nearest chunk; if there is none,
    the same fraction of the list is taken.
    """
    instructions, counterparts = schedule.stages[stage], schedule.stages[other_stage]
    if other_stage == stage:
        return position
    marked = _pass_of(instructions[position]) if position < len(instructions) else None
    distances = [
        (abs(near.chunk - marked.chunk), n)
        for n, instruction in enumerate(counterparts)
        if marked is not None
        and (near := _pass_of(instruction)) is not None
        and (near.direction, near.micro_batch) == (marked.direction, marked.micro_batch)
    ]
    _, nearest = min(distances, default=(0, position * len(counterparts) // max(1, len(instructions))))
    return nearest


def _pass_of(instruction: Instruction) -> Pass | None:
    """Return the first pass of a block, or the pass whose input a message moves; None for other
    instructions."""
    match instruction:
        case Block(passes):
            return passes[0]
        case Start(Send(moved) | Receive(moved)) | Wait(Send(moved) | Receive(moved)):
            return moved
        case _:
            return None


def summary(schedule: Schedule) -> str:
    """Return a one-line summary of a schedule: sizes, time slots, idle share, micro-batches in flight."""
    timeline = unit_timeline(schedule)
    stages = range(len(schedule.stages))
    idle = sum(timeline.idle(s) for s in stages) / max(1, timeline.length * len(schedule.stages))
    alive = [in_flight(schedule, s) for s in stages]
    n, chunks, batches = len(stages), schedule.chunks, schedule.micro_batches
    return (
        f"{schedule.name}: {n} stage{'s' * (n > 1)}, {chunks} chunk{'s' * (chunks > 1)}, "
        f"{batches} micro-batch{'es' * (batches > 1)}; {timeline.length} slots (forward 1, backward 2), "
        f"idle {idle:.1%}; blocks in flight {', '.join(map(str, alive))}"
    )
