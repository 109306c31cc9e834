"""Checks a schedule before a step runs: order, data, transfers, deadlock, memory.

Most checks are one sweep over the linked code: every operator runs once, after its inputs, and every message
is produced, sent, received and freed. Other stages and the update, which a stage's code does not show, are
checked on the instructions. `ScheduleError` names stage, instruction and cause and draws the instructions.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import NoReturn

from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.operators import Part
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.schedule.code import Code, Stretch
from braid.scheduling.schedule.draw import draw_around
from braid.scheduling.schedule.link import link
from braid.scheduling.schedule.memory import DTYPE_BYTES, held_during, rank_memory
from braid.scheduling.schedule.operations import (
    Compute,
    Direction,
    Message,
    Node,
    Pass,
    PassKind,
    Receive,
    Send,
    Start,
    Strand,
    Wait,
)
from braid.scheduling.schedule.schedule import Block, Schedule, Side, passes_in
from braid.scheduling.schedule.sharing import LinkError
from braid.scheduling.schedule.states import ADAMW, OptimizerStates
from braid.scheduling.schedule.sweep import histories, unfinished
from braid.scheduling.schedule.text import write_sides
from braid.scheduling.schedule.timeline import unit_timeline
from braid.scheduling.schedule.validate_update import update_faults

Faults = Iterator[tuple[int, str]]
"""Errors of one stage: (position in its list of instructions, cause); the list's length stands for its
end."""


class ScheduleError(ValueError):
    """Error that a schedule is incomplete or unsafe, so that it must not run."""


def linked(
    schedule: Schedule, layout: ParallelLayout, kinds: tuple[str, ...], parts: Mapping[str, Part]
) -> Code:
    """Link and check a schedule; raise `ScheduleError` if it is incomplete or unsafe for the layout and
    parts.

    ``kinds``: kind of each model layer; ``parts``: the units that programs run, by name.
    """
    if len(schedule.stages) != layout.pp or schedule.chunks != layout.chunks:
        raise ScheduleError(
            f"schedule {schedule.name} has {len(schedule.stages)} stages and {schedule.chunks} chunks, the "
            f"layout {layout.describe()} {layout.pp} and {layout.chunks}; set overlap.schedule to its own"
        )
    if schedule.micro_batches < 1:
        raise ScheduleError(f"schedule {schedule.name} has no micro-batches")
    _check_programs(schedule, parts)
    homes = _homes(schedule)
    for stage in range(layout.pp):
        for position, cause in _misplaced(schedule, stage, layout, homes):
            _fail(schedule, stage, position, cause)
    try:
        code = link(schedule, layout, kinds, parts)
    except LinkError as error:
        _fail(schedule, error.stage, error.position, str(error))
    check(code)
    return code


def check(code: Code) -> None:
    """Raise `ScheduleError` if linked code computes a step incompletely or wrongly, or runs into a
    deadlock."""
    schedule, layout = code.schedule, code.layout
    for stage, stretches in enumerate(code.stages):
        for faults in (
            _never(schedule, stage, layout),
            _data(code, stage),
            _summation(stretches),
        ):
            for position, cause in faults:
                _fail(schedule, stage, position, cause)
    for stage, position, cause in chain(update_faults(schedule, layout, code.buckets), _channels(schedule)):
        _fail(schedule, stage, position, cause)
    stuck = unit_timeline(schedule).stuck
    for stage, position in stuck.items():
        waits = "; ".join(f"stage {s} waits at {schedule.stages[s][n]}" for s, n in stuck.items())
        _fail(schedule, stage, position, f"deadlock: {waits}")


def check_memory(
    code: Code,
    shape: ModelShape,
    dtype: str,
    limit_bytes: int,
    reduce_dtype: str | None = None,
    states: OptimizerStates = ADAMW,
) -> None:
    """Raise `ScheduleError` if a rank would need more than ``limit_bytes``; it names the instruction with the
    peak."""
    for stage in range(code.layout.pp):
        needed = rank_memory(code, shape, dtype, stage, reduce_dtype=reduce_dtype, states=states).total_bytes
        if needed > limit_bytes:
            during = held_during(code, stage, DTYPE_BYTES[dtype], reduce_dtype=reduce_dtype)
            cause = (
                f"memory: a rank of this stage needs {needed / 2**30:.2f} GiB here, "
                f"{(needed - limit_bytes) / 2**30:.2f} GiB over the limit of {limit_bytes / 2**30:.2f} GiB"
            )
            _fail(code.schedule, stage, during.index(max(during)), cause)


def _fail(schedule: Schedule, stage: int, position: int, cause: str) -> NoReturn:
    instructions = schedule.stages[stage]
    at = instructions[position] if position < len(instructions) else "the end"
    grid = draw_around(schedule, stage, position)
    raise ScheduleError(f"schedule {schedule.name}, stage {stage}, at {at}: {cause}\n{grid}")


# -- programs ------------------------------------------------------------------------------------------------


def _check_programs(schedule: Schedule, parts: Mapping[str, Part]) -> None:
    """Raise `ScheduleError` if a program is for unknown units, or if no block can use it."""
    blocks = {_movers(i.passes) for stage in schedule.stages for i in stage if isinstance(i, Block)}
    kinds = {*blocks, *((kind,) for together in blocks for kind in together)}
    for sides, program in schedule.programs.items():
        label = f"schedule {schedule.name}: program {write_sides(sides)}"
        if any(side.unit not in parts for side in sides):
            remedy = "set train.recompute and parallel.tensor_degrees to what it was made with"
            raise ScheduleError(f"{label} is for no part of the model; {remedy}")
        for side in sides:
            if side.kind is PassKind.END and Side(PassKind.BACKWARD, side.unit) not in sides:
                raise ScheduleError(f"{label} takes up {side}, but has no B:{side.unit}")
        if _movers(sides) not in kinds:
            raise ScheduleError(f"{label} is used by no block")
        for operation in program:
            if not 0 <= operation.turn < len(sides):
                raise ScheduleError(
                    f"{label}: {operation.turn}:{operation} is of none of its {len(sides)} passes"
                )


def _movers(passes: Iterable[Pass | Side]) -> tuple[PassKind, ...]:
    return tuple(p.kind for p in passes if p.kind is not PassKind.END)


# -- misplaced passes and messages -----------------------------------------------------------------------

Homes = Mapping[int, Strand]
"""Micro-batch -> strand on which most of its passes run."""


def _homes(schedule: Schedule) -> Homes:
    counts: dict[int, Counter[Strand]] = defaultdict(Counter)
    for stage in schedule.passes:
        for pass_ in stage:
            counts[pass_.micro_batch][pass_.strand] += 1
    return {micro_batch: strands.most_common(1)[0][0] for micro_batch, strands in counts.items()}


def _misplaced(schedule: Schedule, stage: int, layout: ParallelLayout, homes: Homes) -> Faults:
    """Yield errors for passes and messages that are on a wrong stage, or on another strand than most passes
    of their micro-batch, and for passes that cannot form a block."""
    on_stage, last = layout.chunks_of(stage), schedule.micro_batches - 1
    together = {_movers(sides) for sides in schedule.programs}
    for position, instruction in enumerate(schedule.stages[stage]):
        transfer = instruction.what if isinstance(instruction, Start | Wait) else None
        runs = [transfer.moved] if isinstance(transfer, Receive) else [*passes_in(instruction)]
        for pass_ in runs:
            if pass_.chunk not in on_stage or pass_.micro_batch > last:
                chunks = " and ".join(map(str, on_stage))
                facts = f"it has chunk {chunks}, micro-batches 0 to {last}"
                yield position, f"{pass_} does not run on this stage: {facts}"
        if isinstance(transfer, Message) and (cause := _astray(transfer, stage, layout)):
            yield position, cause
        for pass_ in [*runs, transfer.moved] if isinstance(transfer, Send) else runs:
            strand = homes.get(pass_.micro_batch, pass_.strand)
            if pass_.strand is not strand:
                yield position, f"micro-batch {pass_.micro_batch} is on strand {strand} elsewhere"
        if isinstance(instruction, Block) and (cause := _unfit(instruction, together, schedule.trains)):
            yield position, cause


def _astray(transfer: Message, stage: int, layout: ParallelLayout) -> str | None:
    """Return an error text if a stage cannot send or receive a message on this layout; None if it can."""
    moved, partner = transfer.moved, transfer.stage
    before = moved.before(layout)
    source = None if before is None else layout.stage_of(before.chunk)
    if moved != moved.whole:
        return f"messages are of whole passes: {moved.whole}"
    if isinstance(transfer, Receive):
        return (
            f"nothing for {moved} comes from stage {partner}"
            if source != partner or partner == stage
            else None
        )
    home = layout.stage_of(moved.chunk)
    if source != stage:
        return f"{moved} takes nothing from this stage"
    if home == stage:
        return f"{moved} runs on this stage, there is nothing to send"
    return f"{moved} runs on stage {home}" if home != partner else None


def _unfit(block: Block, together: Collection[tuple[PassKind, ...]], trains: bool) -> str | None:
    """Return an error text if a block's passes cannot run together; None if they can.

    ``together``: combinations of pass kinds that have a program; ``trains``: whether backward passes may run.
    """
    passes = block.passes
    strands = {
        forward: {p.strand for p in passes if p.kind is not PassKind.END and p.forward is forward}
        for forward in (True, False)
    }
    if len({p.whole for p in passes}) < len(passes):
        return "a block has a pass twice"
    if not any(strands.values()):
        return "an end has nothing to run beside"
    if both := strands[True] & strands[False]:
        return f"both directions are on strand {min(both)}; each is on strands of its own"
    if not trains and any(not p.forward for p in passes):
        return "the schedule has no backward passes"
    kinds = _movers(passes)
    if len(set(kinds)) > 1 and kinds not in together:
        # Passes of one kind may run one after the other; different kinds must run side by side.
        return f"no program is for {kinds[0]} beside {' and '.join(kinds[1:])}"
    return None


# -- one stage -----------------------------------------------------------------------------------------------


def _never(schedule: Schedule, stage: int, layout: ParallelLayout) -> Faults:
    """Yield an error if a stage's list lacks passes that the stage has to run."""
    run = {(p.whole.kind, p.micro_batch, p.chunk) for p in schedule.passes[stage]}
    kinds = (PassKind.FORWARD, PassKind.BACKWARD) if schedule.trains else (PassKind.FORWARD,)
    missing = [
        f"{kind.value}{micro_batch}.{chunk}"
        for micro_batch in range(schedule.micro_batches)
        for kind in kinds
        for chunk in layout.chunks_of(stage)
        if (kind, micro_batch, chunk) not in run
    ]
    if missing:
        further = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        runs = "runs" if len(missing) == 1 else "run"
        yield len(schedule.stages[stage]), f"{', '.join(missing[:4])}{further} never {runs}"


def _data(code: Code, stage: int) -> Faults:
    """Yield an error for the first operator that cannot run at its position, or else for each frame that the
    stage leaves unfinished."""
    # Any width would do; with that of bf16 the count of memory can reuse the cached sweep.
    swept, stretches = histories(code, DTYPE_BYTES["bf16"], 0)[stage], code.stages[stage]
    if swept.fault is not None:
        position, error = swept.fault
        alone = error.pass_ is None or str(error.pass_) == str(stretches[position].instruction)
        yield position, str(error) if alone else f"{error.pass_}: {error}"
        return
    frames = {(p.micro_batch, p.chunk): f for s in stretches for p, f in zip(s.passes, s.frames, strict=True)}
    for key, frame in sorted(frames.items(), key=lambda item: item[0]):
        if unfinished_work := unfinished(*key, frame, swept.states[key]):
            yield len(stretches), unfinished_work


def _summation(stretches: tuple[Stretch, ...]) -> Faults:
    """Yield an error if a block does not add up a parameter's gradients in the order of micro-batches.

    This order makes a block of several passes give the same bits as the passes one after the other.
    """
    checked: set[tuple[object, ...]] = set()
    for position, stretch in enumerate(stretches):
        passes = stretch.block_passes
        if len(passes) < 2:
            continue
        order = sorted(range(len(passes)), key=lambda turn: passes[turn].micro_batch)
        key = (id(stretch.operations), tuple(order), tuple(p.chunk for p in passes))
        if key in checked:
            continue
        checked.add(key)
        done: dict[tuple[int, int], list[int]] = defaultdict(list)
        for operation in stretch.operations:
            if not isinstance(operation, Compute) or not isinstance(operation.what, Node):
                continue
            if operation.what.operator.adds_gradients:
                chunk = stretch.passes[operation.turn].chunk
                done[chunk, operation.what.bit].append(operation.turn)
        for turns in done.values():
            if turns != sorted(turns, key=order.index):
                first, second = (stretch.passes[turn] for turn in turns[:2])
                yield (
                    position,
                    f"gradients are added up in the order of micro-batches: {second} before {first}",
                )
                return


# -- all stages together -------------------------------------------------------------------------------------


def _channels(schedule: Schedule) -> Iterator[tuple[int, int, str]]:
    """Yield errors (stage, position, cause) for messages that are not received in the order of sending.

    Order matters within a channel: a sending stage, a receiving stage and a direction of passes.
    """
    sent: dict[tuple[int, int, Direction], deque[Pass]] = defaultdict(deque)
    for source, instructions in enumerate(schedule.stages):
        for instruction in instructions:
            if isinstance(instruction, Start) and isinstance(message := instruction.what, Send):
                sent[source, message.stage, message.moved.direction].append(message.moved)
    for stage, instructions in enumerate(schedule.stages):
        for position, instruction in enumerate(instructions):
            if isinstance(instruction, Start) and isinstance(message := instruction.what, Receive):
                channel = sent[message.stage, stage, message.moved.direction]
                coming = channel.popleft() if channel else None
                if coming is None:
                    yield stage, position, f"stage {message.stage} sends nothing more for it"
                elif coming != message.moved:
                    text = f"the next message that stage {message.stage} sends is for {coming}"
                    yield stage, position, text
    for (source, stage, _), channel in sent.items():
        if channel:
            end = len(schedule.stages[stage])
            yield stage, end, f"what stage {source} sends for {channel[0]} is never received"
