"""Adds to stages what follows backward passes: gradient sums, norm, update, and with ZeRO parameter
gathers."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.mesh.mesh import is_tensor
from braid.scheduling.schedule.buckets import SUMMED, Buckets, norm_axes
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
    """Return the stages with gradient sums, the sum of the gradients' squared norm, and the update added.

    If gradients are sharded (ZeRO 2), the sums are in every block with a backward pass. Otherwise they stand
    at the end of the step; or, with ``early``, in the last block of a chunk (bucket by bucket) if there are
    replicas, and behind that block if not, and sums over replicas overlap passes of other chunks. A chunk
    with an embedding table that another stage also holds is always summed at the end of the step.
    """
    updated = []
    for number, stage in enumerate(stages):
        axes = {chunk: buckets.axes(chunk) for chunk in layout.chunks_of(number)}
        if layout.zero > 1:
            instructions, remaining = _sums_of_all(stage, axes)
        else:
            instructions, remaining = _sums_of_last(stage, axes, early=early)
        for index in range(max(map(len, remaining.values()), default=0)):  # one axis of all chunks at a time
            sums = [Reduce(chunk, order[index]) for chunk, order in remaining.items() if index < len(order)]
            instructions += [*map(Start, sums), *map(Wait, sums)]
        instructions.append(Compute(Norm()))
        for axis in norm_axes(layout):
            instructions += [Start(Reduce(None, axis)), Wait(Reduce(None, axis))]
        updated.append((*instructions, Compute(Step())))
    return tuple(updated)


_Axes = Mapping[int, tuple[str, ...]]
"""Chunk -> axes over which its gradients are summed."""


def _sums_of_all(stage: Sequence[Instruction], axes: _Axes) -> tuple[list[Instruction], _Axes]:
    """Add gradient sums to every block with a backward pass (ZeRO 2).

    Returns the instructions, and the axes over which chunks are still to be summed.
    """
    instructions: list[Instruction] = []
    within = {
        c: tuple(axis for axis in all_ if is_tensor(axis) or axis in SUMMED) for c, all_ in axes.items()
    }
    last = {p.chunk: position for position, i in enumerate(stage) for p in passes_in(i)}
    for position, instruction in enumerate(stage):
        backward = dict.fromkeys(p.chunk for p in passes_in(instruction) if p.kind in ENDING)
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
    remaining = {c: tuple(axis for axis in all_ if axis not in within[c]) for c, all_ in axes.items()}
    return instructions, remaining


def _sums_of_last(
    stage: Sequence[Instruction], axes: _Axes, *, early: bool
) -> tuple[list[Instruction], _Axes]:
    """Add gradient sums to or behind the last block of each chunk if ``early``, else none.

    Returns the instructions, and the axes over which chunks are still to be summed.
    """
    remaining = dict(axes)
    last = {p.chunk: position for position, i in enumerate(stage) for p in passes_in(i)}
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
            sums = [Reduce(chunk, axis) for chunk in within for axis in remaining.pop(chunk)]
            instruction = replace(instruction, sums=tuple(sums))
            under_way += [Wait(reduce) for reduce in sums if not is_tensor(reduce.axis)]
        instructions.append(instruction)
        for chunk in [c for c in ended if c not in within]:
            for axis in remaining.pop(chunk):
                instructions.append(Start(Reduce(chunk, axis)))
                waits = under_way if axis in SUMMED else instructions
                waits.append(Wait(Reduce(chunk, axis)))
    return [*instructions, *under_way], remaining


def with_gathering(
    stages: Stages, layout: ParallelLayout, buckets: Buckets, *, early: bool = False
) -> Stages:
    """Return the stages with parameter gathers added: in each chunk's first block, with ZeRO 3 in every
    block.

    Without ZeRO the stages are returned unchanged. ``early``: if parameters are gathered once a step (ZeRO 1
    and 2), this happens at the end of the previous step, behind their update.
    """
    early = early and layout.zero < 3
    if not layout.zero:
        return stages
    gathered = []
    for stage in stages:
        instructions: list[Instruction] = [] if early else [Prefetch()]
        present: set[int] = set()
        for instruction in stage:
            if isinstance(instruction, Block):
                reading = (
                    p for p in instruction.passes if p.kind is not PassKind.WEIGHT or buckets.read_late
                )
                chunks = dict.fromkeys(p.chunk for p in reading)
                gathers = tuple(
                    Gather(chunk, axis)
                    for chunk in chunks
                    if chunk not in present
                    for axis in buckets.gathered(chunk)
                )
                instruction = replace(instruction, gathers=gathers)
                present.update(chunks if layout.zero < 3 else ())
            instructions.append(instruction)
        gathered.append((*instructions, Prefetch()) if early else tuple(instructions))
    return tuple(gathered)
