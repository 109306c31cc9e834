"""Passes from an order of blocks to a complete `Schedule`; each is pure."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from braid.scheduling.lowering.pipelines import GENERATORS, BlockOrder, forward_only
from braid.scheduling.operators import Graph, Part
from braid.scheduling.schedule import (
    Action,
    Block,
    Compute,
    Direction,
    Instruction,
    Program,
    ProgramKey,
    Receive,
    Reduce,
    Schedule,
    Send,
    Start,
    Step,
    Wait,
    WaitReceive,
    WaitReduce,
    WaitSend,
)
from braid.scheduling.spec import ParallelLayout


def successor(block: Block, layout: ParallelLayout) -> Block | None:
    """The block that takes what this one produces; None at the end of the pass."""
    return _neighbour(block, layout, 1 if block.direction is Direction.FORWARD else -1)


def predecessor(block: Block, layout: ParallelLayout) -> Block | None:
    """The block whose output this one takes; None at the beginning of the pass."""
    return _neighbour(block, layout, -1 if block.direction is Direction.FORWARD else 1)


def _neighbour(block: Block, layout: ParallelLayout, distance: int) -> Block | None:
    chunk = layout.neighbour(block.chunk, distance)
    return None if chunk is None else replace(block, chunk=chunk)


def with_transfers(order: BlockOrder, layout: ParallelLayout) -> tuple[tuple[Instruction, ...], ...]:
    """Receive before a block, send after it; wait for a send when its answer is back, or at the end."""
    return tuple(tuple(_stage_transfers(blocks, stage, layout)) for stage, blocks in enumerate(order))


def _stage_transfers(blocks: tuple[Block, ...], stage: int, layout: ParallelLayout) -> Iterator[Instruction]:
    sent: list[Block] = []
    for block in blocks:
        before = predecessor(block, layout)
        if before is not None and layout.stage_of(before.chunk) != stage:
            yield Receive(block, layout.stage_of(before.chunk))
            yield WaitReceive(block)
            activation = replace(before, direction=Direction.FORWARD)
            if block.direction is Direction.BACKWARD and activation in sent:
                # The gradient is back, so the activation arrived long ago: let go of it without waiting.
                sent.remove(activation)
                yield WaitSend(activation)
        yield block
        after = successor(block, layout)
        if after is not None and layout.stage_of(after.chunk) != stage:
            yield Send(after, layout.stage_of(after.chunk))
            sent.append(after)
    for block in sent:
        yield WaitSend(block)


def with_update(
    stages: tuple[tuple[Instruction, ...], ...], layout: ParallelLayout
) -> tuple[tuple[Instruction, ...], ...]:
    """Reduce the gradients of every chunk after the last block, then step."""
    return tuple(
        (
            *stage,
            *(Reduce(chunk) for chunk in layout.chunks_of(number)),
            *(WaitReduce(chunk) for chunk in layout.chunks_of(number)),
            Step(),
        )
        for number, stage in enumerate(stages)
    )


def serial_program(graph: Graph) -> Program:
    """Operators one after the other, every collective waited for at once."""
    actions: list[Action] = []
    for op in graph.operators:
        if op.kind.communicates:
            actions += [Start(op.name, op.stream), Wait(op.name)]
        else:
            actions.append(Compute(op.name))
    return tuple(actions)


def serial_programs(parts: Mapping[str, Part], trains: bool) -> dict[ProgramKey, Program]:
    """The serial program of every part and pass."""
    programs = {(name, Direction.FORWARD): serial_program(part.forward) for name, part in parts.items()}
    if trains:
        programs |= {
            (name, Direction.BACKWARD): serial_program(part.backward) for name, part in parts.items()
        }
    return programs


def training_schedule(
    name: str, layout: ParallelLayout, micro_batches: int, parts: Mapping[str, Part]
) -> Schedule:
    """Lower one of the named training schedules; `ValueError` for a name that does not exist."""
    if name not in GENERATORS:
        raise ValueError(
            f"overlap.schedule={name!r} is not known; use one of {', '.join(sorted(GENERATORS))}"
        )
    order = GENERATORS[name](layout, micro_batches)
    return Schedule(
        name=name,
        chunks=layout.chunks,
        micro_batches=micro_batches,
        stages=with_update(with_transfers(order, layout), layout),
        programs=serial_programs(parts, trains=True),
    )


def validation_schedule(layout: ParallelLayout, micro_batches: int, parts: Mapping[str, Part]) -> Schedule:
    """Forward passes alone over the same layout."""
    return Schedule(
        name="validation",
        chunks=layout.chunks,
        micro_batches=micro_batches,
        stages=with_transfers(forward_only(layout, micro_batches), layout),
        programs=serial_programs(parts, trains=False),
    )
