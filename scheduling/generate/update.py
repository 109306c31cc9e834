"""Adds to stages what follows backward passes: gradient sums, norm, update, and with ZeRO parameter
gathers."""

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
        instructions, remaining = _with_sums(stage, axes, of_all=layout.zero > 1, early=early)
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


def _with_sums(
    stage: Sequence[Instruction], axes: _Axes, *, of_all: bool, early: bool
) -> tuple[list[Instruction], _Axes]:
    """Add gradient sums to every block with a backward pass (``of_all``, ZeRO 2) or, if ``early``, to or
    behind the last block of each chunk.

    Returns the instructions, and the axes over which chunks are still to be summed.
    """
    last = {p.chunk: position for position, i in enumerate(stage) for p in passes_in(i)}
    remaining, instructions = dict(axes), list[Instruction]()
    within: dict[int, list[str]] = {}
    """Chunk -> axes over which blocks sum its gradients."""
    for position, instruction in enumerate(stage):
        if not isinstance(instruction, Block):
            instructions.append(instruction)
            continue
        sums: list[Reduce] = []
        behind: list[Reduce] = []
        for chunk in dict.fromkeys(p.chunk for p in instruction.passes if p.kind in ENDING):
            final = last[chunk] == position
            if of_all:
                within[chunk] = [axis for axis in axes[chunk] if is_tensor(axis) or axis in SUMMED]
                remaining[chunk] = tuple(axis for axis in axes[chunk] if axis not in within[chunk])
                # Shares are summed over replicas once a step.
                sums += [Reduce(chunk, axis) for axis in within[chunk] if axis != "replica" or final]
            elif early and final and "ends" not in axes[chunk]:
                reduces = [Reduce(chunk, axis) for axis in remaining.pop(chunk)]
                if any(axis in SUMMED for axis in axes[chunk]):
                    within[chunk] = [*axes[chunk]]
                    sums += reduces
                else:
                    behind += reduces
        block = replace(instruction, sums=tuple(sums)) if sums else instruction
        instructions += [block, *(kind(reduce) for reduce in behind for kind in (Start, Wait))]
    order = last if of_all else within
    waits = [Wait(Reduce(c, axis)) for c in order for axis in within.get(c, ()) if not is_tensor(axis)]
    return [*instructions, *waits], remaining


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
