"""Checks a schedule before a step runs: order, data, transfers, deadlock, programs.

`validate` raises `ScheduleError`, whose message names stage, instruction and cause and draws the grid around
the fault.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from braid.scheduling.draw import draw_around
from braid.scheduling.lowering.lower import predecessor, successor
from braid.scheduling.operators import Graph, Part
from braid.scheduling.schedule import (
    Block,
    Compute,
    Direction,
    Instruction,
    Program,
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
    instruction_kind,
)
from braid.scheduling.spec import ParallelLayout
from braid.scheduling.timeline import received_blocks, sent_blocks, unit_timeline


class ScheduleError(ValueError):
    """A schedule that must not run."""


def validate(schedule: Schedule, layout: ParallelLayout, parts: Mapping[str, Part]) -> None:
    """Raise `ScheduleError` unless the schedule is complete and safe for the layout and the model's parts."""
    if len(schedule.stages) != layout.pp or schedule.chunks != layout.chunks:
        raise ScheduleError(
            f"schedule {schedule.name} has {len(schedule.stages)} stages and {schedule.chunks} chunks, "
            f"the layout {layout.describe()} has {layout.pp} and {layout.chunks}"
        )
    for stage, instructions in enumerate(schedule.stages):
        for position, cause in _stage_faults(schedule, stage, layout):
            _fail(schedule, stage, position, instructions, cause)
    _check_channels(schedule)
    _check_deadlock(schedule)
    _check_programs(schedule, parts)


def _fail(
    schedule: Schedule, stage: int, position: int, instructions: tuple[Instruction, ...], cause: str
) -> None:
    at = str(instructions[position]) if position < len(instructions) else "end"
    grid = draw_around(schedule, stage, position)
    raise ScheduleError(f"schedule {schedule.name}, stage {stage}, at {at}: {cause}\n{grid}")


def _stage_faults(schedule: Schedule, stage: int, layout: ParallelLayout) -> Iterator[tuple[int, str]]:
    """Faults that one stage's list shows by itself, with their positions."""
    instructions = schedule.stages[stage]
    expected = _expected_blocks(schedule, stage, layout)
    done: set[Block] = set()
    asked: set[Block] = set()
    here: set[Block] = set()
    sending: set[Block] = set()
    started: set[int] = set()
    reduced: set[int] = set()
    last_backward = max(
        (n for n, i in enumerate(instructions) if isinstance(i, Block) and i.direction is Direction.BACKWARD),
        default=-1,
    )
    for position, instruction in enumerate(instructions):
        match instruction:
            case Block():
                if instruction not in expected:
                    yield (
                        position,
                        f"chunk {instruction.chunk} or micro-batch {instruction.micro_batch} is not this stage's",
                    )
                if instruction in done:
                    yield position, "the block runs twice"
                cause = _missing_input(instruction, stage, layout, done, here)
                if cause:
                    yield position, cause
                done.add(instruction)
            case Receive(block, source):
                before = predecessor(block, layout)
                if before is None or layout.stage_of(before.chunk) != source or source == stage:
                    yield position, f"nothing for {block} comes from stage {source}"
                if block not in expected:
                    yield position, f"{block} does not run on this stage"
                if block in asked:
                    yield position, "the same input is received twice"
                asked.add(block)
            case WaitReceive(block):
                if block not in asked or block in here:
                    yield position, f"no receive of {block} is under way"
                here.add(block)
            case Send(block, target):
                before = predecessor(block, layout)
                if before not in done:
                    yield position, f"{before} has not run yet, its output cannot be sent"
                if layout.stage_of(block.chunk) != target or target == stage:
                    yield position, f"{block} does not run on stage {target}"
                if block in sending:
                    yield position, "the same output is sent twice"
                sending.add(block)
            case WaitSend(block):
                if block not in sending:
                    yield position, f"no send of {block} is under way"
            case Reduce(chunk):
                if chunk not in layout.chunks_of(stage) or chunk in started:
                    yield position, f"chunk {chunk} is not this stage's, or is reduced twice"
                if any(i.chunk == chunk for i in instructions[position:] if isinstance(i, Block)):
                    yield position, f"chunk {chunk} still has blocks to run"
                started.add(chunk)
            case WaitReduce(chunk):
                if chunk not in started or chunk in reduced:
                    yield position, f"no reduction of chunk {chunk} is under way"
                reduced.add(chunk)
            case Step():
                if reduced != set(layout.chunks_of(stage)):
                    yield position, f"chunks {sorted(set(layout.chunks_of(stage)) - reduced)} are not reduced"
                if position < last_backward:
                    yield position, "backward blocks follow"
    yield from _end_faults(schedule, stage, layout, expected - done)


def _end_faults(
    schedule: Schedule, stage: int, layout: ParallelLayout, missing: set[Block]
) -> Iterator[tuple[int, str]]:
    instructions = schedule.stages[stage]
    end = len(instructions)
    if missing:
        yield end, f"{', '.join(str(b) for b in sorted(missing)[:4])} never run: slots are never freed"
    steps = sum(isinstance(i, Step) for i in instructions)
    if steps != (1 if schedule.trains else 0):
        yield end, f"{steps} STEP instructions, expected {1 if schedule.trains else 0}"
    for kind, start, wait in (("send", Send, WaitSend), ("receive", Receive, WaitReceive)):
        begun = Counter(i.block for i in instructions if isinstance(i, start))
        ended = Counter(i.block for i in instructions if isinstance(i, wait))
        if begun != ended:
            block = next(iter((begun - ended) or (ended - begun)))
            yield end, f"the {kind} of {block} is started {begun[block]} and waited for {ended[block]} times"
    for block in schedule.blocks(stage):
        after = successor(block, layout)
        if after and layout.stage_of(after.chunk) != stage and after not in dict(sent_blocks(instructions)):
            yield end, f"the output of {block} is never sent to stage {layout.stage_of(after.chunk)}"


def _expected_blocks(schedule: Schedule, stage: int, layout: ParallelLayout) -> set[Block]:
    strands = {
        (block.micro_batch, block.strand)
        for blocks in schedule.stages
        for block in blocks
        if isinstance(block, Block)
    }
    strand_of = dict(sorted(strands))
    directions = list(Direction) if schedule.trains else [Direction.FORWARD]
    return {
        Block(direction, m, chunk, strand_of[m])
        for direction in directions
        for m in range(schedule.micro_batches)
        if m in strand_of
        for chunk in layout.chunks_of(stage)
    } | {
        Block(d, m, c)
        for d in directions
        for m in range(schedule.micro_batches)
        if m not in strand_of
        for c in layout.chunks_of(stage)
    }


def _missing_input(
    block: Block, stage: int, layout: ParallelLayout, done: set[Block], here: set[Block]
) -> str | None:
    if block.direction is Direction.BACKWARD:
        twin = Block(Direction.FORWARD, block.micro_batch, block.chunk, block.strand)
        if twin not in done:
            return f"its forward {twin} has not run"
    before = predecessor(block, layout)
    if before is None:
        return None
    source = layout.stage_of(before.chunk)
    if source == stage and before not in done:
        return f"its input comes from {before}, which has not run"
    if source != stage and block not in here:
        return f"its input from stage {source} has not arrived (no RECV and WAIT before it)"
    return None


def _check_channels(schedule: Schedule) -> None:
    """Per pair of stages and direction, messages must be received in the order they are sent."""
    channels: dict[tuple[int, int, Direction], list[Block]] = {}
    for stage, instructions in enumerate(schedule.stages):
        for block, target in sent_blocks(instructions):
            channels.setdefault((stage, target, block.direction), []).append(block)
    for stage, instructions in enumerate(schedule.stages):
        arriving: dict[tuple[int, int, Direction], list[Block]] = {}
        for block, source in received_blocks(instructions):
            arriving.setdefault((source, stage, block.direction), []).append(block)
        for key in set(arriving) | {k for k in channels if k[1] == stage}:
            sent, received = channels.get(key, []), arriving.get(key, [])
            if sent != received:
                n = next((n for n, (a, b) in enumerate(zip(sent, received, strict=False)) if a != b), None)
                what = (
                    f"{len(sent)} are sent and {len(received)} received"
                    if n is None
                    else f"message {n} is sent for {sent[n]} and received for {received[n]}"
                )
                raise ScheduleError(
                    f"schedule {schedule.name}: from stage {key[0]} to stage {key[1]}, {what}; "
                    f"each message needs one SEND and one RECV, in the same order"
                )


def _check_deadlock(schedule: Schedule) -> None:
    stuck = unit_timeline(schedule).stuck
    if stuck:
        waits = "; ".join(f"stage {stage} waits at {instruction}" for stage, instruction in stuck.items())
        stage, instruction = next(iter(stuck.items()))
        position = schedule.stages[stage].index(instruction)
        raise ScheduleError(
            f"schedule {schedule.name} deadlocks in a {instruction_kind(instruction)}: {waits}\n"
            f"{draw_around(schedule, stage, position)}"
        )


def _check_programs(schedule: Schedule, parts: Mapping[str, Part]) -> None:
    directions = list(Direction) if schedule.trains else [Direction.FORWARD]
    expected = {(name, direction) for name in parts for direction in directions}
    if set(schedule.programs) != expected:
        odd = ", ".join(f"{part} {d.value}" for part, d in sorted(set(schedule.programs) ^ expected))
        raise ScheduleError(f"schedule {schedule.name}: programs do not match the model's parts: {odd}")
    for (part, direction), program in schedule.programs.items():
        graph = parts[part].forward if direction is Direction.FORWARD else parts[part].backward
        for cause in _program_faults(program, graph, parts[part], direction):
            raise ScheduleError(f"schedule {schedule.name}, program {part} {direction.value}: {cause}")


def _program_faults(program: Program, graph: Graph, part: Part, direction: Direction) -> Iterator[str]:
    operators = {op.name: op for op in graph.operators}
    given = set(part.inputs) if direction is Direction.FORWARD else {*part.saved(), f"d.{part.output}"}
    available, started, done = set(given) | set(part.constants), set(), set()
    for action in program:
        op = operators.get(action.operator)
        if op is None:
            yield f"the model has no operator {action.operator!r}"
            return
        is_wait = isinstance(action, Wait)
        if op.kind.communicates == isinstance(action, Compute):
            yield f"'{action}': {op.name} is {'a' if op.kind.communicates else 'not a'} collective"
        if isinstance(action, Start) and action.stream is not op.stream:
            yield f"'{action}': {op.name} runs on {op.stream.value}"
        if is_wait != (op.name in started) or op.name in done:
            yield f"'{action}': {'not started' if is_wait else 'runs twice'}"
        missing = [name for name in op.reads if name not in available]
        if missing and not is_wait:
            yield f"'{action}' reads {missing[0]} before it is there"
        if isinstance(action, Start):
            started.add(op.name)
        else:
            available |= set(op.writes)
            done.add(op.name)
    if left := [name for name in operators if name not in done]:
        yield f"operators {', '.join(left[:4])} never finish"
