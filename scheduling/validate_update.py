"""The end of a step, checked: gradients summed over every axis, the norm of what is summed, one update.

Nothing of it shows in the data of passes: a sum that is missing gives other gradients on every rank.
"""

from collections.abc import Iterator, Set

from braid.scheduling.schedule import (
    Await,
    Block,
    Gather,
    Instruction,
    Norm,
    Reduce,
    Schedule,
    Step,
    passes_in,
    sums_in,
)
from braid.scheduling.spec import ParallelLayout


def update_faults(schedule: Schedule, layout: ParallelLayout) -> Iterator[tuple[int, int, str]]:
    """Sums of gradients after the last pass of a chunk, gathers before the first, one step at the end.

    Stages, positions in their lists (their length: the end) and causes.
    """
    everywhere = {one for own in schedule.stages for i in own for one in _shared(i)}
    for stage in range(len(schedule.stages)):
        for position, cause in _of_stage(schedule, stage, layout, everywhere):
            yield stage, position, cause
    places = [
        [(one.chunk or 0) % layout.chunks_per_copy for i in own for one in sums_in(i) if one.axis == "copies"]
        for own in schedule.stages
    ]
    for stage, (here, there) in enumerate(zip(places, places[::-1], strict=True)):
        if here != there:
            cause = f"copies are not summed in the order of stage {len(places) - 1 - stage}"
            yield stage, len(schedule.stages[stage]), f"{cause}, which has the others"


def _of_stage(
    schedule: Schedule, stage: int, layout: ParallelLayout, everywhere: Set[Reduce | Gather]
) -> Iterator[tuple[int, str]]:
    walk = _Walk(schedule, stage, layout, everywhere)
    for position, instruction in enumerate(schedule.stages[stage]):
        if not schedule.trains and isinstance(_transfer(instruction), Reduce | Norm | Step):
            yield position, "the schedule has no backward passes, nothing to reduce and no step to take"
        elif cause := walk.fault(position, instruction):
            yield position, cause
    if schedule.trains and (cause := walk.at_end()):
        yield len(schedule.stages[stage]), cause


def _shared(instruction: Instruction) -> tuple[Reduce | Gather, ...]:
    """The sums of gradients and the gathers that an instruction starts."""
    return (instruction,) if isinstance(instruction, Gather) else sums_in(instruction)


def _transfer(instruction: Instruction) -> object:
    return instruction.transfer if isinstance(instruction, Await) else instruction


class _Walk:
    """Goes through a stage's list and keeps what has happened so far."""

    def __init__(
        self, schedule: Schedule, stage: int, layout: ParallelLayout, everywhere: Set[Reduce | Gather]
    ) -> None:
        self._layout = layout
        self._instructions = schedule.stages[stage]
        self._last = {one.chunk: n for n, i in enumerate(self._instructions) for one in passes_in(i)}
        summed = {one.axis for one in everywhere}
        self._axes = {chunk: _axes(layout, chunk, summed) for chunk in layout.chunks_of(stage)}
        differs = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp * layout.cp if layout.zero else 1}
        self._norm_axes = tuple(axis for axis, ranks in differs.items() if ranks > 1)
        self._under_way: list[Reduce | Gather] = []
        self._done: set[Reduce | Gather] = set()
        self._normed = self._stepped = False

    def fault(self, position: int, instruction: Instruction) -> str | None:
        """What is wrong with an instruction behind those before it; None: nothing, and it has happened."""
        match instruction:
            case Reduce() | Gather():
                return self._start(position, instruction)
            case Await(Reduce() | Gather() as transfer):
                if transfer not in self._under_way:
                    return f"no {transfer} is under way"
                self._under_way.remove(transfer)
                self._done.add(transfer)
            case Norm():
                return self._norm(position)
            case Step():
                return self._step()
            case Block(passes, sums, gathers):
                if missing := [one for one in gathers if one not in self._under_way]:
                    return f"no {missing[0]} is under way"
                for one in gathers:
                    self._under_way.remove(one)
                self._done.update(gathers)
                for chunk in dict.fromkeys(one.chunk for one in passes):
                    if cause := self._parameters(chunk):
                        return cause
                return next(filter(None, (self._start(position, one) for one in sums)), None)
        return None

    def at_end(self) -> str | None:
        """What is missing."""
        if not self._stepped:
            return "the STEP is missing"
        return f"{self._under_way[0]} is never waited for" if self._under_way else None

    def _start(self, position: int, transfer: Reduce | Gather) -> str | None:
        chunk, axis = transfer.chunk, transfer.axis
        if transfer in self._under_way or transfer in self._done:
            return f"{transfer} stands twice"
        if chunk is not None and chunk not in self._axes:
            return f"chunk {chunk} is not on this stage"
        known = self._norm_axes if chunk is None else self._axes[chunk]
        if isinstance(transfer, Gather):
            known = self._cut(known)
        if axis not in known:
            return f"over {axis} there is nothing to do here (but over {', '.join(known) or 'no axis'})"
        if isinstance(transfer, Reduce):
            if chunk is None and not self._normed:
                return "the squares are not there yet: NORM comes first"
            if chunk is not None and self._normed:
                return "too late: NORM has squared the gradients"
            if chunk is not None and self._last.get(chunk, -1) > position:
                return f"chunk {chunk} still has passes to run"
            for other in self._under_way:
                replicas = {axis, other.axis} == {"dp", "edp"}  # dense parameters and experts: not the same
                if isinstance(other, Reduce) and other.chunk == chunk and not replicas:
                    return f"{other} is not waited for, and sums of the same come one after the other"
        if isinstance(self._instructions[position], Block) and axis == "tp":
            self._done.add(transfer)  # waited for in the block
        else:
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

    def _parameters(self, chunk: int) -> str | None:
        for axis in self._cut(self._axes.get(chunk, ())):
            if Gather(chunk, axis) in self._under_way:
                return f"the parameters of chunk {chunk} have not been waited for"
            if Gather(chunk, axis) not in self._done:
                return f"the parameters of chunk {chunk} have not been gathered (ZeRO {self._layout.zero})"
        return None

    def _cut(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Of the axes that gradients are summed over, those that states are cut over."""
        return tuple(axis for axis in axes if axis in ("dp", "edp")) if self._layout.zero else ()


def _axes(layout: ParallelLayout, chunk: int, summed: Set[str]) -> tuple[str, ...]:
    """Axes over which the gradients of a chunk must be summed.

    Some depend on the model (`gradient_axes`), which is not known here: if one chunk is, all are.
    """
    at_end = layout.is_first(chunk) or layout.is_last(chunk)
    wanted = {
        "tp": layout.tp > 1,
        "ends": "ends" in summed and at_end and layout.ends_apart,
        "copies": layout.copies > 1,
        "dp": layout.dp * layout.cp > 1,
        "edp": "edp" in summed and layout.dp > 1,
    }
    return tuple(axis for axis, needed in wanted.items() if needed)
