"""What the end of a step needs: sums of gradients, their norm, the update; and with ZeRO gathers."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

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
from braid.scheduling.schedule.schedule import Block, Instruction, Prefetch, passes_in

Stages = tuple[tuple[Instruction, ...], ...]


def with_update(stages: Stages, layout: ParallelLayout, buckets: Buckets, *, early: bool = False) -> Stages:
    """Sum the gradients of every chunk over its axes, then their squares over the model's, then step.

    Where gradients are in shares (ZeRO 2) every backward pass begins its sums. Else those of the last one do,
    or what stands behind it: ``early``: begin in the last block of a chunk, bucket by bucket, where there are
    replicas, and behind it where not; sums over replicas stay under way beside what still runs on others. Not
    of a chunk with a table that another stage has, too, and comes to later.
    """
    updated = []
    for number, stage in enumerate(stages):
        axes = {chunk: buckets.axes(chunk) for chunk in layout.chunks_of(number)}
        if layout.zero > 1:
            instructions, left = _sums_of_all(stage, axes)
        else:
            instructions, left = _sums_of_last(stage, axes, early=early)
        for place in range(max(map(len, left.values()), default=0)):  # one axis of all chunks after the other
            sums = [Reduce(chunk, own[place]) for chunk, own in left.items() if place < len(own)]
            instructions += [*map(Start, sums), *map(Wait, sums)]
        instructions.append(Compute(Norm()))
        for axis in norm_axes(layout):
            instructions += [Start(Reduce(None, axis)), Wait(Reduce(None, axis))]
        updated.append((*instructions, Compute(Step())))
    return tuple(updated)


_Axes = Mapping[int, tuple[str, ...]]
"""Of chunks, axes over which their gradients are summed."""


def _sums_of_all(stage: Sequence[Instruction], axes: _Axes) -> tuple[list[Instruction], _Axes]:
    """Instructions with sums in every block that ends a bucket's gradients, and what is left to be summed."""
    instructions: list[Instruction] = []
    within = {c: tuple(axis for axis in own if is_tensor(axis) or axis in SUMMED) for c, own in axes.items()}
    last = {one.chunk: position for position, i in enumerate(stage) for one in passes_in(i)}
    for position, instruction in enumerate(stage):
        backward = dict.fromkeys(one.chunk for one in passes_in(instruction) if one.kind in ENDING)
        if backward:
            assert isinstance(instruction, Block)
            sums = [
                Reduce(chunk, axis)
                for chunk in backward
                for axis in within[chunk]
                if axis != "replica" or last[chunk] == position  # shares are summed once a step
            ]
            instruction = replace(instruction, sums=tuple(sums))
        instructions.append(instruction)
    instructions += [Wait(Reduce(c, axis)) for c in last for axis in within[c] if not is_tensor(axis)]
    left = {c: tuple(axis for axis in own if axis not in within[c]) for c, own in axes.items()}
    return instructions, left


def _sums_of_last(
    stage: Sequence[Instruction], axes: _Axes, *, early: bool
) -> tuple[list[Instruction], _Axes]:
    """Instructions with the sums that begin ``early``, and what is left to be summed."""
    left = dict(axes)
    last = {one.chunk: position for position, i in enumerate(stage) for one in passes_in(i)}
    instructions: list[Instruction] = []
    under_way: list[Instruction] = []
    ends: dict[int, list[int]] = defaultdict(list)
    for chunk, position in last.items() if early else ():
        if "ends" not in axes[chunk]:
            ends[position].append(chunk)
    for position, instruction in enumerate(stage):
        if position not in ends:
            instructions.append(instruction)
            continue
        ended = ends[position]
        within = [c for c in ended if any(axis in SUMMED for axis in axes[c])]
        if within:
            assert isinstance(instruction, Block)
            sums = [Reduce(chunk, axis) for chunk in within for axis in left.pop(chunk)]
            instruction = replace(instruction, sums=tuple(sums))
            under_way += [Wait(one) for one in sums if not is_tensor(one.axis)]
        instructions.append(instruction)
        for chunk in [c for c in ended if c not in within]:
            for axis in left.pop(chunk):
                instructions.append(Start(Reduce(chunk, axis)))
                waits = under_way if axis in SUMMED else instructions
                waits.append(Wait(Reduce(chunk, axis)))
    return [*instructions, *under_way], left


def with_gathering(
    stages: Stages, layout: ParallelLayout, buckets: Buckets, *, early: bool = False
) -> Stages:
    """Gather every chunk's parameters before they are used: in the first block, with ZeRO 3 in every one.

    Nothing where ranks hold all of them. ``early``: those that are gathered once a step, in the step before,
    behind their update.
    """
    early = early and layout.zero < 3
    if not layout.zero:
        return stages
    gathered = []
    for stage in stages:
        instructions: list[Instruction] = [] if early else [Prefetch()]
        there: set[int] = set()
        for instruction in stage:
            if isinstance(instruction, Block):
                reading = (one for one in instruction.passes if one.kind is not PassKind.WEIGHT)
                chunks = dict.fromkeys(one.chunk for one in reading)
                gathers = tuple(
                    Gather(chunk, axis)
                    for chunk in chunks
                    if chunk not in there
                    for axis in buckets.axes(chunk)
                    if axis in SHARDED
                )
                instruction = replace(instruction, gathers=gathers)
                there.update(chunks if layout.zero < 3 else ())
            instructions.append(instruction)
        gathered.append((*instructions, Prefetch()) if early else tuple(instructions))
    return tuple(gathered)
