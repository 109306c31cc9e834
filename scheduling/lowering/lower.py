"""Passes from an order of blocks to a complete `Schedule`; each is pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from braid.scheduling.fusion import fused_parts
from braid.scheduling.lowering.named import SCHEDULES, PairMethod, PipelineKind
from braid.scheduling.lowering.pipelines import BlockOrder, forward_only
from braid.scheduling.lowering.programs import (
    PairingDecision,
    chunked_program,
    ordered_program,
    pair_program,
    serial_program,
    split_programs,
    twin_program,
)
from braid.scheduling.lowering.split import with_split_layers
from braid.scheduling.operators import Part
from braid.scheduling.schedule import (
    Block,
    Direction,
    Gather,
    Gradients,
    Instruction,
    Pair,
    Program,
    ProgramKey,
    Receive,
    Reduce,
    Schedule,
    Send,
    Step,
    Twins,
    WaitGather,
    WaitReceive,
    WaitReduce,
    WaitSend,
    blocks_in,
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
    """Receive before a block, send after it; wait for a send when its answer is back or two more went."""
    return tuple(tuple(_stage_transfers(blocks, stage, layout)) for stage, blocks in enumerate(order))


def _stage_transfers(
    blocks: tuple[Block | Pair | Twins, ...], stage: int, layout: ParallelLayout
) -> Iterator[Instruction]:
    sent: list[Block] = []
    for instruction in blocks:
        travelling = [block.whole for block in blocks_in(instruction) if block.travels]
        for block in travelling:
            before = predecessor(block, layout)
            if before is not None and layout.stage_of(before.chunk) != stage:
                yield Receive(block, layout.stage_of(before.chunk))
                yield WaitReceive(block)
                activation = replace(before, direction=Direction.FORWARD)
                if block.direction is Direction.BACKWARD and activation in sent:
                    # The gradient is back, so the activation arrived long ago: let go of it without waiting.
                    sent.remove(activation)
                    yield WaitSend(activation)
        yield instruction
        for block in travelling:
            after = successor(block, layout)
            if after is not None and layout.stage_of(after.chunk) != stage:
                if block.direction is Direction.BACKWARD:
                    # Nothing comes back for a gradient: keep no more than two of a channel under way.
                    channel = [s for s in sent if _same_channel(s, after, layout)]
                    for old in channel[:-1]:
                        sent.remove(old)
                        yield WaitSend(old)
                yield Send(after, layout.stage_of(after.chunk))
                sent.append(after)
    for block in sent:
        yield WaitSend(block)


def _same_channel(first: Block, second: Block, layout: ParallelLayout) -> bool:
    same_stage = layout.stage_of(first.chunk) == layout.stage_of(second.chunk)
    return same_stage and first.direction is second.direction


def with_early_receives(
    stages: tuple[tuple[Instruction, ...], ...], ahead: int = 1
) -> tuple[tuple[Instruction, ...], ...]:
    """Start every receive so many blocks before the block that needs it.

    gloo and NCCL let a message travel only once both sides have asked for it: a receive that is started when
    its result is needed exposes the whole message, however long ago it was sent.
    """
    moved = []
    for stage in stages:
        instructions: list[Instruction] = []
        blocks: list[int] = []  # the places of the last ones
        for instruction in stage:
            if isinstance(instruction, Receive) and blocks:
                instructions.insert(blocks[0], instruction)
                blocks = [place + 1 for place in blocks]
                continue
            if isinstance(instruction, Block | Pair | Twins):
                blocks = [*blocks, len(instructions)][-ahead:]
            instructions.append(instruction)
        moved.append(tuple(instructions))
    return tuple(moved)


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


def with_early_reduction(
    stages: tuple[tuple[Instruction, ...], ...],
) -> tuple[tuple[Instruction, ...], ...]:
    """Start to reduce a chunk's gradients after its last block, beside what still runs on other chunks."""
    moved = []
    for stage in stages:
        last = {block.chunk: position for position, i in enumerate(stage) for block in blocks_in(i)}
        instructions: list[Instruction] = []
        for position, instruction in enumerate(stage):
            if not isinstance(instruction, Reduce) or instruction.chunk not in last:
                instructions.append(instruction)
            instructions += [Reduce(chunk) for chunk, end in last.items() if end == position]
        moved.append(tuple(instructions))
    return tuple(moved)


def with_gathering(
    stages: tuple[tuple[Instruction, ...], ...],
) -> tuple[tuple[Instruction, ...], ...]:
    """Gather every chunk's parameters from the first moment on; wait before its first block (ZeRO)."""
    gathered = []
    for stage in stages:
        chunks = list(dict.fromkeys(block.chunk for i in stage for block in blocks_in(i)))
        instructions: list[Instruction] = [Gather(chunk) for chunk in chunks]
        for instruction in stage:
            for chunk in [block.chunk for block in blocks_in(instruction) if block.chunk in chunks]:
                instructions.append(WaitGather(chunk))
                chunks.remove(chunk)
            instructions.append(instruction)
        gathered.append(tuple(instructions))
    return tuple(gathered)


def serial_programs(parts: Mapping[str, Part], trains: bool) -> dict[ProgramKey, Program]:
    """The serial program of every part and pass; of forward passes alone where nothing ``trains``."""
    if not trains:
        return {(name, Direction.FORWARD): serial_program(part.evaluation) for name, part in parts.items()}
    programs = {(name, Direction.FORWARD): serial_program(part.forward) for name, part in parts.items()}
    return programs | {
        (name, Direction.BACKWARD): serial_program(part.backward) for name, part in parts.items()
    }


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Decisions that a schedule is lowered with, beside its name; the defaults need no profile."""

    pairings: Mapping[str, PairingDecision] = field(default_factory=dict)
    """How ``PART|PART`` (usually ``layer|layer``) run together, where blocks are paired."""
    forward_orders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Order of a part's forward operators in blocks that run alone; serial where it is not given."""
    backward_orders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The same of backward operators. ``P:qkv.wgrad`` is of the pass before: it runs there if a paired block
    has put it off, and nowhere else."""
    twin_orders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Order of the operators of two micro-batches, ``1:qkv``, by part and pass: ``PART FF``, ``PART BB``."""
    early_reduction: bool = False
    gathers: bool = False
    """Whether ranks hold only parts of the updated parameters and gather them (ZeRO)."""


def scheduled_parts(
    members: Mapping[str, Part], layout: ParallelLayout, layers: int, *, fused: int = 0, split: int = 1
) -> dict[str, Part]:
    """The graphs that a schedule's programs are of: embedding, layer and head, ``split``, then ``fused``."""
    return fused_parts(with_split_layers(members, split), layout, layers, fused)


def training_schedule(
    name: str,
    layout: ParallelLayout,
    micro_batches: int,
    parts: Mapping[str, Part],
    choices: Choices | None = None,
    fused: int = 0,
    split: int = 1,
    hop: int = 0,
) -> Schedule:
    """Lower one of the named training schedules; `ValueError` for what does not exist or is missing.

    ``parts``: those of `scheduled_parts`, where layers are ``fused`` or ``split``.
    ``hop``: see `PipelineKind.order`.
    """
    if name not in SCHEDULES:
        raise ValueError(f"overlap.schedule={name!r} is not known; use one of {', '.join(sorted(SCHEDULES))}")
    kind, choices = SCHEDULES[name], choices or Choices()
    order = kind.order(layout, micro_batches, hop)
    in_time = with_early_receives(with_transfers(order, layout), max(1, hop - 1))
    stages = with_update(in_time, layout)
    if choices.early_reduction:
        stages = with_early_reduction(stages)
    if choices.gathers:
        stages = with_gathering(stages)
    schedule = Schedule(
        name=name,
        chunks=layout.chunks,
        micro_batches=micro_batches,
        stages=stages,
        programs=serial_programs(parts, trains=True),
        fused=fused,
        split=split,
    )
    return _with_programs(schedule, kind, parts, choices)


def _with_programs(
    schedule: Schedule, kind: PipelineKind, parts: Mapping[str, Part], choices: Choices
) -> Schedule:
    """The schedule with all programs that its blocks need."""
    programs = dict(schedule.programs)
    if kind.splits_collectives:
        layer = parts["layer"]
        programs["layer", Direction.FORWARD] = chunked_program(layer.forward)
        programs["layer", Direction.BACKWARD] = chunked_program(layer.backward)
    for direction, orders in (
        (Direction.FORWARD, choices.forward_orders),
        (Direction.BACKWARD, choices.backward_orders),
    ):
        for name, order in orders.items():
            part = _known(parts, name, "order")
            graph = part.forward if direction is Direction.FORWARD else part.backward
            programs[name, direction] = ordered_program(graph, order)
    splits: dict[tuple[str, Gradients], Program] = {}
    instructions = [i for stage in schedule.stages for i in stage]
    if any(block.gradients is not Gradients.BOTH for i in instructions for block in blocks_in(i)):
        for part in parts.values():
            splits |= split_programs(part)
    pairs = {}
    if any(isinstance(i, Pair) for i in instructions):
        decisions = dict(choices.pairings)
        if not decisions:
            if kind.pairs is not PairMethod.TURNS:
                raise ValueError(
                    f"overlap.schedule={schedule.name} needs a pairing: measure the run with "
                    f"`braid profile`, or make a plan with `braid plan --output plan.yaml` and set "
                    f"overlap.plan"
                )
            decisions = {"layer|layer": PairingDecision(method=PairMethod.TURNS)}
        for key, decision in decisions.items():
            first, _, second = key.partition("|")
            ahead, behind = (_known(parts, name, "pairing") for name in (first, second))
            pairs[first, second] = pair_program(ahead.forward, behind.backward, decision)
    twins = {}
    present = {i.direction for i in instructions if isinstance(i, Twins)}
    for key, order in choices.twin_orders.items():
        name, _, letters = key.partition(" ")
        part, direction = _known(parts, name, "order"), Direction(letters[:1])
        if direction in present:
            graph = part.forward if direction is Direction.FORWARD else part.backward
            twins[name, direction] = twin_program(graph, order)
    return replace(schedule, programs=programs, splits=splits, pairs=pairs, twins=twins)


def _known(parts: Mapping[str, Part], name: str, what: str) -> Part:
    if name not in parts:
        raise ValueError(f"{what}: {name!r} is no part of this model and layout; plan anew")
    return parts[name]


def validation_schedule(layout: ParallelLayout, micro_batches: int, parts: Mapping[str, Part]) -> Schedule:
    """Forward passes alone over the same layout."""
    return Schedule(
        name="validation",
        chunks=layout.chunks,
        micro_batches=micro_batches,
        stages=with_early_receives(with_transfers(forward_only(layout, micro_batches), layout)),
        programs=serial_programs(parts, trains=False),
    )
