"""What `validate` accepts runs, and what it refuses does not: compared with a model of the executor.

The model follows `braid.actors.stage.executor` on names alone: inputs are handed from block to block, slots
are opened and closed, the n-th message sent on a channel meets the n-th that is asked for. What that executor
does not run yet follows the rules of `braid.scheduling.schedule`: both blocks of a pair are there at once, a
split backward pass hands its output on and closes its slot later, gathered parameters are absent before.
"""

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from braid.scheduling.lowering.named import SCHEDULES
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
    WaitGather,
    WaitReceive,
    WaitReduce,
    WaitSend,
)
from braid.scheduling.spec import ParallelLayout
from braid.scheduling.validate import ScheduleError, validate
from tests.scheduling.cases import (
    exists,
    layout_for,
    model_parts,
    named_schedule,
    valid_schedules,
    with_stage,
)

Channel = tuple[int, int, Direction]


class CannotRunError(Exception):
    """The model of the executor cannot go on."""


def demand(condition: bool, cause: str) -> None:
    """Fail unless the condition holds."""
    if not condition:
        raise CannotRunError(cause)


class Rank:
    """One stage's executor on names."""

    def __init__(self, stage: int, layout: ParallelLayout, schedule: Schedule, network: "Network") -> None:
        self.stage, self.layout, self.network = stage, layout, network
        self.instructions = schedule.stages[stage]
        self.cursor = 0
        self.inputs: set[Block] = set()
        self.slots: set[Block] = set()
        self.owed: set[Block] = set()
        whole = not any(isinstance(i, Gather) for stage in schedule.stages for i in stage)
        self.ungathered = set() if whole else set(layout.chunks_of(stage))
        self.gathering: set[int] = set()
        self.absent = set(self.ungathered)
        self.ran: list[Block] = []
        self.sending: dict[Block, tuple[Channel, int]] = {}
        self.receiving: dict[Block, tuple[Channel, int]] = {}
        self.gradients = set(layout.chunks_of(stage))
        self.reducing: set[int] = set()
        self.steps = 0

    def advance(self) -> bool:
        """Run until something is to be waited for; whether anything ran."""
        start = self.cursor
        while self.cursor < len(self.instructions) and self.run(self.instructions[self.cursor]):
            self.cursor += 1
        return self.cursor > start

    def run(self, instruction: Instruction) -> bool:
        """Run one instruction; False where it has to wait."""
        match instruction:
            case Block():
                self.block(instruction)
            case Pair(forward, backward):
                demand(forward.direction is Direction.FORWARD, "not a forward pass")
                demand(backward.direction is Direction.BACKWARD and backward.travels, "not a backward pass")
                demand(forward.strand is not backward.strand, "both on one strand")
                self.block(backward)
                self.block(forward)
            case Gather(chunk):
                demand(chunk in self.ungathered, "nothing to gather")
                self.ungathered.remove(chunk)
                self.gathering.add(chunk)
            case WaitGather(chunk):
                demand(chunk in self.gathering, "no such gather")
                self.gathering.remove(chunk)
                self.absent.remove(chunk)
            case Send(block, target):
                demand(block in self.inputs, "nothing to send")
                self.inputs.remove(block)
                channel = (self.stage, target, block.direction)
                self.sending[block] = channel, self.network.send(channel, block)
            case Receive(block, source):
                demand(block not in self.receiving and block not in self.inputs, "received twice")
                channel = (source, self.stage, block.direction)
                self.receiving[block] = channel, self.network.ask(channel, block)
            case WaitSend(block):
                demand(block in self.sending, "no such send")
                if not self.network.meet(*self.sending[block]):
                    return False
                del self.sending[block]
            case WaitReceive(block):
                demand(block in self.receiving, "no such receive")
                if not self.network.meet(*self.receiving[block]):
                    return False
                del self.receiving[block]
                self.inputs.add(block)
            case Reduce(chunk):
                demand(chunk in self.gradients, "nothing to reduce")
                self.gradients.remove(chunk)
                self.reducing.add(chunk)
            case WaitReduce(chunk):
                demand(chunk in self.reducing, "no such reduction")
                self.reducing.remove(chunk)
            case Step():
                demand(not self.gradients and not self.reducing and not self.steps, "step too early")
                self.steps = 1
        return True

    def block(self, block: Block) -> None:
        """Run a block and hand on what it makes."""
        demand(block.chunk in self.gradients, "not here, or its gradients are on their way")
        demand(block.chunk not in self.absent, "no parameters")
        if block.gradients is Gradients.WEIGHT:
            demand(block.whole in self.owed, "no such input gradients")
            self.owed.remove(block.whole)
            return
        forward = block.direction is Direction.FORWARD
        slot = replace(block.whole, direction=Direction.FORWARD)
        demand(forward != (slot in self.slots), "slot")
        self.slots ^= {slot}
        if block.gradients is Gradients.INPUT:
            self.owed.add(block.whole)
        size = self.layout.chunks_per_copy
        place, step = (block.chunk % size, 1) if forward else (size - 1 - block.chunk % size, -1)
        if place > 0:
            demand(block.whole in self.inputs, "no input")
            self.inputs.remove(block.whole)
        if place < size - 1:
            self.inputs.add(replace(block.whole, chunk=block.chunk + step))
        self.ran.append(block.whole)

    def finish(self) -> None:
        """Check that everything ran and nothing is left."""
        demand(self.cursor == len(self.instructions), "deadlock")
        demand(not (self.inputs or self.slots or self.sending or self.receiving), "left over")
        demand(not (self.owed or self.gathering), "weight gradients or parameters left over")
        demand(self.steps == 1, "no step")


class Network:
    """Channels between stages: no message passes another, none is buffered."""

    def __init__(self) -> None:
        self.sent: dict[Channel, list[Block]] = defaultdict(list)
        self.asked: dict[Channel, list[Block]] = defaultdict(list)

    def send(self, channel: Channel, block: Block) -> int:
        """Offer a message; returns its number on the channel."""
        self.sent[channel].append(block)
        return len(self.sent[channel]) - 1

    def ask(self, channel: Channel, block: Block) -> int:
        """Ask for a message; returns its number on the channel."""
        self.asked[channel].append(block)
        return len(self.asked[channel]) - 1

    def meet(self, channel: Channel, number: int) -> bool:
        """Whether both sides of a message are there; they must mean the same block."""
        sent, asked = self.sent[channel], self.asked[channel]
        if number >= min(len(sent), len(asked)):
            return False
        demand(sent[: number + 1] == asked[: number + 1], "messages mixed up")
        return True


def runs(schedule: Schedule, layout: ParallelLayout) -> str | None:
    """Why the model of the executor cannot run a schedule, or None."""
    network = Network()
    ranks = [Rank(stage, layout, schedule, network) for stage in range(layout.pp)]
    try:
        while any(rank.advance() for rank in ranks):
            pass
        for rank in ranks:
            rank.finish()
        demand_all_passes([block for rank in ranks for block in rank.ran], schedule, layout)
    except CannotRunError as failure:
        return str(failure)
    return None


def demand_all_passes(ran: list[Block], schedule: Schedule, layout: ParallelLayout) -> None:
    """Every micro-batch goes forward and backward through all chunks of one copy of the model, once."""
    size = layout.chunks_per_copy
    demand(len(set(ran)) == len(ran) == 2 * size * schedule.micro_batches, "too few blocks, or too many")
    for m in range(schedule.micro_batches):
        here = [block for block in ran if block.micro_batch == m]
        demand(len(here) == 2 * size, "too few blocks of a micro-batch")
        demand(len({(block.strand, block.chunk // size) for block in here}) == 1, "on two strands or copies")


def refusal(schedule: Schedule, layout: ParallelLayout) -> str | None:
    """Why `validate` refuses a schedule, or None."""
    try:
        validate(schedule, layout, model_parts(tp=2))
    except ScheduleError as error:
        return str(error)
    return None


def changed(instruction: Instruction, data: st.DataObject) -> list[Instruction]:
    """Other instructions in the place of one: pairs taken apart or mixed up, gradients split otherwise."""
    match instruction:
        case Pair(forward, backward):
            other = {Strand.ALPHA: Strand.BETA, Strand.BETA: Strand.ALPHA}
            options: list[list[Instruction]] = [
                [forward, backward],
                [backward, forward],
                [Pair(backward, forward)],
                [Pair(replace(forward, strand=other[forward.strand]), backward)],
                [forward],
                [backward],
            ]
            return data.draw(st.sampled_from(options))
        case Block():
            letters = list(Gradients)
            split = [
                replace(instruction, gradients=letter)
                for letter in data.draw(st.lists(st.sampled_from(letters), min_size=1, max_size=2))
            ]
            return [instruction, instruction] if instruction.direction is Direction.FORWARD else [*split]
        case _:
            return [instruction]


def edited(schedule: Schedule, data: st.DataObject) -> Schedule:
    """The schedule after a random change of one stage's list."""
    stage = data.draw(st.integers(0, len(schedule.stages) - 1))
    instructions = [*schedule.stages[stage]]
    place = st.integers(0, len(instructions) - 1)
    n, m = data.draw(place), data.draw(place)
    match data.draw(st.sampled_from(["move", "move near", "swap", "delete", "repeat", "change", "join"])):
        case "move":
            instructions.insert(m, instructions.pop(n))
        case "move near":
            instructions.insert(max(0, n + data.draw(st.integers(-3, 3))), instructions.pop(n))
        case "swap":
            instructions[n], instructions[m] = instructions[m], instructions[n]
        case "delete":
            del instructions[n]
        case "repeat":
            instructions.insert(m, instructions[n])
        case "change":
            instructions[n : n + 1] = changed(instructions[n], data)
        case _:
            blocks = [k for k, i in enumerate(instructions[:-1]) if isinstance(i, Block)]
            k = data.draw(st.sampled_from(blocks)) if blocks else len(instructions)
            pair = instructions[k : k + 2]
            match pair:
                case [Block() as one, Block() as two]:
                    instructions[k : k + 2] = [Pair(one, two) if data.draw(st.booleans()) else Pair(two, one)]
    return with_stage(schedule, stage, instructions)


@given(valid_schedules(max_stages=3), st.data())
@settings(max_examples=400, deadline=None)
def test_accepted_is_what_runs(case: tuple[Schedule, ParallelLayout], data: st.DataObject) -> None:
    schedule, layout = case
    for _ in range(data.draw(st.integers(0, 3))):
        schedule = edited(schedule, data)
    schedule = with_needed_programs(schedule)
    refused, cause = refusal(schedule, layout), runs(schedule, layout)
    event("refused" if refused else "accepted")
    assert bool(refused) == bool(cause), f"validate: {refused}\nthe model: {cause}\n{schedule.to_text()}"


def with_needed_programs(schedule: Schedule) -> Schedule:
    """The schedule with programs of pairs and split passes where its blocks need them, and only there."""
    instructions = [i for stage in schedule.stages for i in stage]
    split = any(
        b.gradients is not Gradients.BOTH for s in range(len(schedule.stages)) for b in schedule.blocks(s)
    )
    paired = any(isinstance(i, Pair) for i in instructions)
    all_programs = named_schedule("dualpipev", 1, 2, 2)
    return replace(
        schedule,
        splits=all_programs.splits if split else {},
        pairs=all_programs.pairs if paired else {},
    )


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("gathers", [False, True])
def test_every_named_schedule_runs(name: str, gathers: bool) -> None:
    for p in range(1, 5):
        for m in range(1, 2 * p + 3):
            if exists(name, p, m):
                schedule = named_schedule(name, p, m, 2, early_reduction=True, gathers=gathers)
                assert runs(schedule, layout_for(name, p, 2)) is None
