"""Checks a schedule before a step runs: order, data, transfers, deadlock, programs.

`validate` raises `ScheduleError`, whose message names stage, instruction and cause and draws the instructions
around the fault.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import replace

from braid.scheduling.draw import draw_around
from braid.scheduling.lowering.lower import predecessor, successor
from braid.scheduling.memory import peak_position, rank_memory
from braid.scheduling.operators import Part
from braid.scheduling.schedule import (
    Block,
    Direction,
    Gather,
    Gradients,
    Instruction,
    Pair,
    Receive,
    Reduce,
    Schedule,
    Send,
    Step,
    Strand,
    Twins,
    WaitGather,
    WaitReceive,
    WaitReduce,
    WaitSend,
)
from braid.scheduling.spec import ModelShape, ParallelLayout
from braid.scheduling.timeline import unit_timeline
from braid.scheduling.validate_programs import program_fault


class ScheduleError(ValueError):
    """A schedule that must not run."""


Fault = tuple[int, str]
"""Position in a stage's list (its length: the end) and cause."""


def validate(schedule: Schedule, layout: ParallelLayout, parts: Mapping[str, Part]) -> None:
    """Raise `ScheduleError` unless the schedule is complete and safe for the layout and the model's parts."""
    if len(schedule.stages) != layout.pp or schedule.chunks != layout.chunks:
        raise ScheduleError(
            f"schedule {schedule.name} has {len(schedule.stages)} stages and {schedule.chunks} chunks, "
            f"the layout {layout.describe()} has {layout.pp} and {layout.chunks}"
        )
    if schedule.micro_batches < 1:
        raise ScheduleError(f"schedule {schedule.name} has no micro-batches")
    if cause := program_fault(schedule, parts):
        raise ScheduleError(f"schedule {schedule.name}{cause}")
    homes = _homes(schedule, layout)
    for stage in range(layout.pp):
        _fail_at(schedule, stage, _StageCheck(schedule, stage, layout, homes).fault())
    for stage in range(layout.pp):
        _fail_at(schedule, stage, _channel_fault(schedule, stage))
    _check_deadlock(schedule)


def validate_memory(
    schedule: Schedule,
    layout: ParallelLayout,
    shape: ModelShape,
    parts: Mapping[str, Part],
    dtype: str,
    limit_bytes: int,
    zero: int = 0,
) -> None:
    """Raise `ScheduleError` where a rank would need more than ``limit_bytes``; names the instruction."""
    for stage in range(layout.pp):
        needed = rank_memory(schedule, layout, shape, parts, dtype, stage, zero).total_bytes
        if needed > limit_bytes:
            cause = (
                f"memory: a rank of this stage needs {needed / 2**30:.2f} GiB here, "
                f"{(needed - limit_bytes) / 2**30:.2f} GiB over the limit of {limit_bytes / 2**30:.2f} GiB"
            )
            position = peak_position(schedule, layout, shape, parts, dtype, stage)
            _fail_at(schedule, stage, (position, cause))


def _fail_at(schedule: Schedule, stage: int, fault: Fault | None) -> None:
    if fault is not None:
        position, cause = fault
        instructions = schedule.stages[stage]
        at = instructions[position] if position < len(instructions) else "the end"
        grid = draw_around(schedule, stage, position)
        raise ScheduleError(f"schedule {schedule.name}, stage {stage}, at {at}: {cause}\n{grid}")


class _StageCheck:
    """Walks one stage's list and keeps what has happened so far; finds what the list shows by itself."""

    def __init__(
        self, schedule: Schedule, stage: int, layout: ParallelLayout, homes: list[tuple[Strand, int]]
    ) -> None:
        self._instructions = schedule.stages[stage]
        self._stage = stage
        self._layout = layout
        self._trains = schedule.trains
        self._expected = _expected_blocks(schedule, layout, stage, homes)
        self._to_run = Counter(
            block.chunk for block in schedule.blocks(stage) if block.gradients is not Gradients.INPUT
        )
        self._done: set[Block] = set()
        self._owed: set[Block] = set()
        self._gathers = any(isinstance(i, Gather) for instructions in schedule.stages for i in instructions)
        self._gathering: set[int] = set()
        self._gathered: set[int] = set()
        self._receives: set[Block] = set()
        self._arrived: set[Block] = set()
        self._sends: set[Block] = set()
        self._sends_done: set[Block] = set()
        self._reductions: set[int] = set()
        self._reduced: set[int] = set()
        self._stepped = False

    def fault(self) -> Fault | None:
        """The first fault, if any."""
        for position, instruction in enumerate(self._instructions):
            if cause := self._next(instruction):
                return position, cause
        cause = self._end()
        return (len(self._instructions), cause) if cause else None

    def _next(self, instruction: Instruction) -> str | None:
        """What is wrong with an instruction after those before it; None: nothing, and it has happened."""
        if not self._trains and isinstance(instruction, Reduce | WaitReduce | Step | Pair | Twins):
            return "the schedule has no backward passes, nothing to reduce and no step to take"
        match instruction:
            case Block():
                return self._block(instruction)
            case Pair():
                return self._pair(instruction)
            case Twins():
                return self._twins(instruction)
            case Receive(block, source):
                return self._receive(block, source)
            case WaitReceive(block):
                return self._wait_receive(block)
            case Send(block, target):
                return self._send(block, target)
            case WaitSend(block):
                return self._wait_send(block)
            case Reduce(chunk):
                return self._reduce(chunk)
            case WaitReduce(chunk):
                return self._wait_reduce(chunk)
            case Gather(chunk):
                return self._gather(chunk)
            case WaitGather(chunk):
                return self._wait_gather(chunk)
            case Step():
                return self._step()

    # -- blocks and messages -------------------------------------------------------------------------------

    def _block(self, block: Block) -> str | None:
        if block.whole not in self._expected:
            return f"{block} does not run on this stage: {self._blocks_here(block)}"
        if self._gathers and block.chunk not in self._gathered:
            return f"the parameters of chunk {block.chunk} have not been gathered, as those of others are"
        if block.chunk in self._gathering:
            return f"the parameters of chunk {block.chunk} have not been waited for"
        if block.gradients is Gradients.WEIGHT:
            return self._weight_gradients(block)
        if block.whole in self._done:
            return "the block runs twice"
        if block.direction is Direction.BACKWARD:
            twin = Block(Direction.FORWARD, block.micro_batch, block.chunk, block.strand)
            if twin not in self._done:
                return f"its forward {twin} has not run"
        before = predecessor(block.whole, self._layout)
        if before is not None:
            source = self._layout.stage_of(before.chunk)
            if source == self._stage and before not in self._done:
                return f"its input comes from {before}, which has not run"
            if source != self._stage and block.whole not in self._arrived:
                return f"its input from stage {source} has not arrived (no RECV and WAIT before it)"
        self._done.add(block.whole)
        if block.gradients is Gradients.INPUT:
            self._owed.add(block.whole)
        else:
            self._to_run[block.chunk] -= 1
        return None

    def _weight_gradients(self, block: Block) -> str | None:
        if block.whole not in self._owed:
            inputs = replace(block, gradients=Gradients.INPUT)
            return f"it runs twice or {inputs} has not run before it"
        self._owed.remove(block.whole)
        self._to_run[block.chunk] -= 1
        return None

    def _pair(self, pair: Pair) -> str | None:
        if pair.forward.direction is not Direction.FORWARD:
            return f"{pair.forward} is not a forward pass; the first of a paired block is"
        if pair.backward.direction is not Direction.BACKWARD:
            return f"{pair.backward} is not a backward pass; the second of a paired block is"
        if pair.backward.gradients is Gradients.WEIGHT:
            return "weight gradients alone have nothing to be paired for"
        return self._side_by_side(pair)

    def _twins(self, twins: Twins) -> str | None:
        first, second = twins.blocks
        if first.chunk != second.chunk or first.gradients is not second.gradients:
            return "twins are the same pass over the same chunk"
        if first.micro_batch >= second.micro_batch:
            return (
                f"{first} does not come before {second}: gradients are added up in the order of micro-batches"
            )
        if first.gradients is not Gradients.BOTH:
            return "twins compute all gradients at once"
        return self._side_by_side(twins)

    def _side_by_side(self, both: Pair | Twins) -> str | None:
        first, second = both.blocks
        if first.strand is second.strand:
            return (
                f"both are on strand {first.strand}: they would issue on the same groups in an order "
                f"that nothing fixes"
            )
        for block in both.blocks:
            if cause := self._block(block):
                return f"{block}: {cause}"
        return None

    def _blocks_here(self, block: Block) -> str:
        block, here = block.whole, self._layout.chunks_of(self._stage)
        chunks = " and ".join(map(str, here))
        last = max((b.micro_batch for b in self._expected), default=0)
        facts = [f"it has chunk {chunks}", f"micro-batches 0 to {last}"]
        if not self._trains:
            facts.append("no backward passes")
        for twin in self._expected:
            if twin == replace(block, strand=twin.strand):
                facts.append(f"micro-batch {block.micro_batch} on strand {twin.strand}")
            elif block.chunk in here and self._layout.copies > 1 and twin == replace(block, chunk=twin.chunk):
                facts.append(f"micro-batch {block.micro_batch} on chunk {twin.chunk} of the other copy")
        return ", ".join(facts)

    def _gather(self, chunk: int) -> str | None:
        if chunk not in self._layout.chunks_of(self._stage):
            return f"chunk {chunk} is not on this stage"
        if chunk in self._gathered:
            return f"chunk {chunk} is gathered twice"
        self._gathered.add(chunk)
        self._gathering.add(chunk)
        return None

    def _wait_gather(self, chunk: int) -> str | None:
        if chunk not in self._gathering:
            return f"no gather of chunk {chunk} is under way"
        self._gathering.remove(chunk)
        return None

    def _receive(self, block: Block, source: int) -> str | None:
        before = predecessor(block, self._layout)
        if block not in self._expected:
            return f"{block} does not run on this stage: {self._blocks_here(block)}"
        if before is None or self._layout.stage_of(before.chunk) != source or source == self._stage:
            return f"nothing for {block} comes from stage {source}"
        if block in self._receives:
            return "the same input is received twice"
        self._receives.add(block)
        return None

    def _wait_receive(self, block: Block) -> str | None:
        if block not in self._receives or block in self._arrived:
            return f"no receive of {block} is under way"
        self._arrived.add(block)
        return None

    def _send(self, block: Block, target: int) -> str | None:
        before = predecessor(block, self._layout)
        if before is None or before.chunk not in self._layout.chunks_of(self._stage):
            return f"{block} takes nothing from this stage"
        if before not in self._done:
            return f"{before} has not run yet, its output cannot be sent"
        home = self._layout.stage_of(block.chunk)
        if home == self._stage:
            return f"{block} runs on this stage, there is nothing to send"
        if home != target:
            return f"{block} runs on stage {home}"
        if block in self._sends:
            return "the same output is sent twice"
        self._sends.add(block)
        return None

    def _wait_send(self, block: Block) -> str | None:
        if block not in self._sends or block in self._sends_done:
            return f"no send of {block} is under way"
        self._sends_done.add(block)
        return None

    # -- the update ----------------------------------------------------------------------------------------

    def _reduce(self, chunk: int) -> str | None:
        if chunk not in self._layout.chunks_of(self._stage):
            return f"chunk {chunk} is not on this stage"
        if chunk in self._reductions:
            return f"chunk {chunk} is reduced twice"
        if self._to_run[chunk]:
            return f"chunk {chunk} still has blocks to run"
        self._reductions.add(chunk)
        return None

    def _wait_reduce(self, chunk: int) -> str | None:
        if chunk not in self._reductions or chunk in self._reduced:
            return f"no reduction of chunk {chunk} is under way"
        self._reduced.add(chunk)
        return None

    def _step(self) -> str | None:
        if self._stepped:
            return "a second STEP"
        if left := set(self._layout.chunks_of(self._stage)) - self._reduced:
            return f"chunks {', '.join(map(str, sorted(left)))} are not reduced"
        self._stepped = True
        return None

    # -- the end -------------------------------------------------------------------------------------------

    def _end(self) -> str | None:
        if missing := self._expected - self._done:
            return f"{_some(missing)} never run"
        if self._owed:
            return f"the weight gradients of {_some(self._owed)} never run"
        if self._gathering:
            return f"the gather of chunk {min(self._gathering)} is never waited for"
        if self._trains and not self._stepped:
            return "the STEP is missing"
        unsent = set()
        for block in self._done:
            after = successor(block, self._layout)
            if after and self._layout.stage_of(after.chunk) != self._stage and after not in self._sends:
                unsent.add(block)
        if unsent:
            return f"the output of {_some(unsent)} is never sent to the stage that needs it"
        if waiting := self._sends - self._sends_done:
            return f"the send of {_some(waiting)} is never waited for"
        return None


def _some(blocks: set[Block]) -> str:
    order = sorted(blocks, key=lambda b: (b.micro_batch, b.direction is Direction.BACKWARD, b.chunk))
    names = [str(block) for block in order]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _homes(schedule: Schedule, layout: ParallelLayout) -> list[tuple[Strand, int]]:
    """The strand and the copy of the model that every micro-batch is on: those of most of its blocks."""
    strands: Counter[tuple[int, Strand]] = Counter()
    copies: Counter[tuple[int, int]] = Counter()
    for number in range(len(schedule.stages)):
        for block in schedule.blocks(number):
            strands[block.micro_batch, block.strand] += 1
            copies[block.micro_batch, block.chunk // layout.chunks_per_copy] += 1
    homes = []
    for m in range(schedule.micro_batches):
        on = {strand: strands[m, strand] for strand in Strand}
        within = {copy: copies[m, copy] for copy in range(layout.copies)}
        homes.append((max(on, key=on.__getitem__), max(within, key=within.__getitem__)))
    return homes


def _expected_blocks(
    schedule: Schedule, layout: ParallelLayout, stage: int, homes: list[tuple[Strand, int]]
) -> set[Block]:
    """What a stage has to run, weight gradients that come later as part of their backward pass."""
    return {
        Block(direction, m, chunk, strand)
        for m, (strand, copy) in enumerate(homes)
        for direction in (Direction if schedule.trains else [Direction.FORWARD])
        for chunk in layout.chunks_of(stage)
        if chunk // layout.chunks_per_copy == copy
    }


# -- all stages together -----------------------------------------------------------------------------------


def _channel_fault(schedule: Schedule, stage: int) -> Fault | None:
    """Messages to a stage must be received in the order they are sent, each channel by itself.

    A channel is a pair of stages and a direction. That every message has one SEND and one RECV, the checks of
    single stages have shown.
    """
    sent: dict[tuple[int, Direction], deque[Block]] = defaultdict(deque)
    for source, instructions in enumerate(schedule.stages):
        for instruction in instructions:
            if isinstance(instruction, Send) and instruction.stage == stage:
                sent[source, instruction.block.direction].append(instruction.block)
    for position, instruction in enumerate(schedule.stages[stage]):
        if isinstance(instruction, Receive):
            coming = sent[instruction.stage, instruction.block.direction].popleft()
            if coming != instruction.block:
                return position, f"the next message that stage {instruction.stage} sends is for {coming}"
    return None


def _check_deadlock(schedule: Schedule) -> None:
    stuck = unit_timeline(schedule).stuck
    for stage, position in stuck.items():
        waits = "; ".join(f"stage {s} waits at {schedule.stages[s][n]}" for s, n in stuck.items())
        _fail_at(schedule, stage, (position, f"deadlock: {waits}"))
