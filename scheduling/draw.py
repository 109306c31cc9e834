"""Schedules as text grids: stages downwards, time to the right."""

from dataclasses import dataclass

from braid.scheduling.schedule import Block, Direction, Schedule
from braid.scheduling.timeline import Timeline, unit_timeline


@dataclass(frozen=True)
class Cell:
    """One character column group of a grid: a block, or nothing."""

    text: str
    block: Block | None


def grid(schedule: Schedule, timeline: Timeline | None = None, width: int = 4) -> list[list[Cell]]:
    """Rows of cells, one row per stage, one cell per slot of a `unit_timeline` (forward 1, backward 2)."""
    drawn = timeline or unit_timeline(schedule)
    rows = []
    for stage in drawn.stages:
        cells: list[Cell] = []
        time = 0
        for timed in stage:
            if timed.start > time:
                cells.append(Cell("·".center(width) * (timed.start - time), None))
            cells.append(Cell(_label(timed.block, width * (timed.end - timed.start)), timed.block))
            time = timed.end
        if drawn.length > time:
            cells.append(Cell("·".center(width) * (drawn.length - time), None))
        rows.append(cells)
    return rows


def _label(block: Block, width: int) -> str:
    text = f"{block.direction.value}{block.micro_batch}.{block.chunk}"
    return (text if len(text) < width else f"{block.micro_batch}.{block.chunk}").center(width)[:width]


def cell_width(schedule: Schedule) -> int:
    """Columns per slot that keep every label legible."""
    return 3 + len(f"{max(schedule.micro_batches - 1, 0)}{max(schedule.chunks - 1, 0)}")


def draw(schedule: Schedule) -> str:
    """The whole schedule as plain text."""
    width = cell_width(schedule)
    rows = grid(schedule, width=width)
    return "\n".join(
        f"stage {number} |{''.join(cell.text for cell in cells)}|" for number, cells in enumerate(rows)
    )


def draw_around(schedule: Schedule, stage: int, position: int, reach: int = 4) -> str:
    """The blocks around an instruction, a row per stage, with the fault's stage and place marked."""
    lines = []
    for number, instructions in enumerate(schedule.stages):
        centre = min(position, len(instructions) - 1)
        shown = []
        for n in range(max(0, centre - reach), min(len(instructions), centre + reach + 1)):
            text = str(instructions[n])
            shown.append(f">>{text}<<" if number == stage and n == position else text)
        if number == stage and position >= len(instructions):
            shown.append(">>end<<")
        lines.append(f"  {'*' if number == stage else ' '} stage {number} | {' '.join(shown)}")
    return "\n".join(lines)


def summary(schedule: Schedule) -> str:
    """One line: slots, idle share, micro-batches in flight per stage."""
    timeline = unit_timeline(schedule)
    stages = range(len(schedule.stages))
    idle = sum(timeline.idle(s) for s in stages) / max(1, timeline.length * len(schedule.stages))
    alive = [_peak(schedule, s) for s in stages]
    return (
        f"{schedule.name}: {len(schedule.stages)} stages, {schedule.chunks} chunks, "
        f"{schedule.micro_batches} micro-batches; {timeline.length} slots (forward 1, backward 2), "
        f"idle {idle:.1%}; blocks in flight {', '.join(map(str, alive))}"
    )


def _peak(schedule: Schedule, stage: int) -> int:
    peak = alive = 0
    for block in schedule.blocks(stage):
        alive += 1 if block.direction is Direction.FORWARD else -1
        peak = max(peak, alive)
    return peak
