"""Checks the end of a step: sums of gradients over every axis, sums of the norm's squares, one update.

The data of passes show none of this: a missing sum gives other gradients on every rank.
"""

from collections.abc import Iterator

from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.mesh.mesh import is_tensor
from braid.scheduling.schedule.buckets import SHARDED, SUMMED, Buckets, norm_axes
from braid.scheduling.schedule.operations import (
    ENDING,
    Compute,
    Gather,
    Norm,
    PassKind,
    Reduce,
    Start,
    Step,
    Wait,
)
from braid.scheduling.schedule.schedule import Block, Instruction, Prefetch, Schedule, passes_in


def update_faults(
    schedule: Schedule, layout: ParallelLayout, buckets: Buckets
) -> Iterator[tuple[int, int, str]]:
    """Yield errors (stage, position, cause) in gradient sums, parameter gathers and the update.

    Gradients must be summed after a chunk's last pass (ZeRO 2: after every pass), parameters gathered before
    its first pass (ZeRO 3: before every pass), and one update must come at the end. A position equal to the
    length of the stage's list stands for its end.
    """
    for stage in range(len(schedule.stages)):
        for position, cause in _of_stage(schedule, stage, layout, buckets):
            yield stage, position, cause


def _of_stage(
    schedule: Schedule, stage: int, layout: ParallelLayout, buckets: Buckets
) -> Iterator[tuple[int, str]]:
    walk = _Walk(schedule, stage, layout, buckets)
    for position, instruction in enumerate(schedule.stages[stage]):
        if not schedule.trains and isinstance(getattr(instruction, "what", None), Reduce | Norm | Step):
            yield position, "the schedule has no backward passes, nothing to reduce and no step to take"
        elif cause := walk.fault(position, instruction):
            yield position, cause
    if schedule.trains and (cause := walk.at_end()):
        yield len(schedule.stages[stage]), cause


class _Walk:
    """Walk over a stage's instructions that records which sums, gathers and updates have been seen."""

    def __init__(self, schedule: Schedule, stage: int, layout: ParallelLayout, buckets: Buckets) -> None:
        self._layout = layout
        self._instructions = schedule.stages[stage]
        self._last = {p.chunk: n for n, i in enumerate(self._instructions) for p in passes_in(i)}
        self._axes = {chunk: buckets.axes(chunk) for chunk in layout.chunks_of(stage)}
        self._cut = {chunk: buckets.gathered(chunk) for chunk in self._axes}
        """Axes over which the parameters of every chunk are gathered."""
        self._read_late = buckets.read_late
        self._norm_axes = norm_axes(layout)
        self._under_way: list[Reduce] = []
        self._done: set[Reduce] = set()
        self._gathered: set[Gather] = set()
        self._normed = self._stepped = False

    def fault(self, position: int, instruction: Instruction) -> str | None:
        """Check the next instruction: return the text of its error, or record it and return None."""
        match instruction:
            case Prefetch():
                behind = self._stepped and self._layout.zero < 3 and position == len(self._instructions) - 1
                if not self._layout.zero or (position and not behind):
                    return "it stands at the begin, or at the end unless parameters are in shares (ZeRO 3)"
            case Start(Reduce() as transfer):
                return self._start(position, transfer)
            case Wait(Reduce() as transfer):
                if transfer not in self._under_way:
                    return f"no {transfer} is under way"
                self._under_way.remove(transfer)
                self._done.add(transfer)
            case Compute(Norm()):
                return self._norm(position)
            case Compute(Step()):
                return self._step()
            case Block():
                return self._block(position, instruction)
        return None

    def _block(self, position: int, block: Block) -> str | None:
        if cause := self._gathers(block):
            return cause
        if self._layout.zero > 1:
            for number, reduce in enumerate(block.sums):
                before = (
                    earlier
                    for earlier in block.sums[:number]
                    if earlier.chunk == reduce.chunk and not is_tensor(earlier.axis)
                )
                if block.sums.count(reduce) > 1:
                    return f"{reduce} stands twice"
                if is_tensor(reduce.axis) and (unfinished := next(before, None)):
                    return f"{unfinished} is not waited for, and sums of the same come one after the other"
            for chunk in dict.fromkeys(p.chunk for p in block.passes if p.kind in ENDING):
                for axis in self._axes.get(chunk, ()):
                    if (is_tensor(axis) or axis in SHARDED) and Reduce(chunk, axis) not in block.sums:
                        return f"the gradients of chunk {chunk} are not summed over {axis} (ZeRO 2)"
        return next(filter(None, (self._start(position, reduce) for reduce in block.sums)), None)

    def _gathers(self, block: Block) -> str | None:
        """Return an error text if a block's parameters are not gathered, or with ZeRO 1 and 2 gathered twice;
        else None."""
        read_late = self._read_late
        reading = dict.fromkeys(p.chunk for p in block.passes if p.kind is not PassKind.WEIGHT or read_late)
        for gather in block.gathers:
            if gather.chunk not in reading:
                return f"{gather}: no pass of the block reads the parameters of chunk {gather.chunk}"
            if gather.axis not in (cut := self._cut.get(gather.chunk, ())):
                axes = ", ".join(cut) or "no axis"
                return f"{gather}: over {gather.axis} there is nothing to gather (but over {axes})"
            if gather in self._gathered or block.gathers.count(gather) > 1:
                return f"{gather} stands twice"
        gathered = {*self._gathered, *block.gathers}
        for chunk in reading:
            for axis in self._cut.get(chunk, ()):
                if Gather(chunk, axis) not in gathered:
                    zero = self._layout.zero
                    return f"the parameters of chunk {chunk} are not gathered over {axis} (ZeRO {zero})"
        if block.gathers and self._instructions.count(Prefetch()) != 1:
            return "PREFETCH is missing, or stands twice"
        if self._layout.zero < 3:
            self._gathered = gathered
        return None

    def at_end(self) -> str | None:
        """Return an error text that names what is missing at the end of the list; None if the step is
        complete."""
        if not self._stepped:
            return "the STEP is missing"
        return f"{self._under_way[0]} is never waited for" if self._under_way else None

    def _start(self, position: int, transfer: Reduce) -> str | None:
        chunk, axis = transfer.chunk, transfer.axis
        block = self._instructions[position]
        again = self._layout.zero > 1 and isinstance(block, Block)
        twice = block.sums.count(transfer) > 1 if isinstance(block, Block) else False
        if twice or (not again and (transfer in self._under_way or transfer in self._done)):
            return f"{transfer} stands twice"
        if chunk is not None and chunk not in self._axes:
            return f"chunk {chunk} is not on this stage"
        axes = self._norm_axes if chunk is None else self._axes[chunk]
        if axis not in axes:
            return f"over {axis} there is nothing to do here (but over {', '.join(axes) or 'no axis'})"
        if chunk is None and not self._normed:
            return "the squares are not there yet: NORM comes first"
        if chunk is not None and self._normed:
            return "too late: NORM has squared the gradients"
        if chunk is not None and self._layout.zero > 1 and not again and (is_tensor(axis) or axis in SUMMED):
            return f"sums over {axis} stand in blocks, behind what adds to the gradients (ZeRO 2)"
        if chunk is not None and self._last.get(chunk, -1) > position and not again:
            return f"chunk {chunk} still has passes to run"
        for unfinished in self._under_way:
            # Dense parameters and experts are different; sums of shares follow their own sums.
            replicas = {axis, unfinished.axis} <= set(SUMMED)
            if unfinished.chunk == chunk and not replicas and not again:
                return f"{unfinished} is not waited for, and sums of the same come one after the other"
        if isinstance(block, Block) and is_tensor(axis):
            self._done.add(transfer)  # the block itself waits for it
        elif transfer not in self._under_way:
            self._under_way.append(transfer)
        return None

    def _norm(self, position: int) -> str | None:
        if self._normed:
            return "a second NORM"
        if self._under_way:
            return f"{self._under_way[0]} is not waited for"
        for chunk, axes in self._axes.items():
            if self._last.get(chunk, -1) > position:
                return f"chunk {chunk} still has passes to run"
            for axis in axes:
                if Reduce(chunk, axis) not in self._done:
                    return f"the gradients of chunk {chunk} are not summed over {axis}"
        self._normed = True
        return None

    def _step(self) -> str | None:
        if self._stepped:
            return "a second STEP"
        if not self._normed:
            return "there is no NORM before it"
        for axis in self._norm_axes:
            if Reduce(None, axis) not in self._done:
                return f"the squares of the norm are not summed over {axis}"
        self._stepped = True
        return None
