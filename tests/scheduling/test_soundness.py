"""What `validate` accepts runs, and what it refuses does not: compared with a model of the executor.

The model follows `braid.actors.stage.executor` on names alone: inputs are handed from block to block, slots
are opened and closed, the n-th message sent on a channel meets the n-th that is asked for.
"""

from collections import defaultdict
from dataclasses import replace

from hypothesis import event, given, settings
from hypothesis import strategies as st

from braid.scheduling.schedule import (
    Block,
    Direction,
    Instruction,
    Receive,
    Reduce,
    Schedule,
    Send,
    Step,
    WaitReceive,
    WaitReduce,
    WaitSend,
)
from braid.scheduling.spec import ParallelLayout
from braid.scheduling.validate import ScheduleError, validate
from tests.scheduling.cases import model_parts, valid_schedules, with_stage

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
        self.last = schedule.chunks - 1
        self.cursor = 0
        self.inputs: set[Block] = set()
        self.slots: set[Block] = set()
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
        forward = block.direction is Direction.FORWARD
        slot = replace(block, direction=Direction.FORWARD)
        demand(forward != (slot in self.slots), "slot")
        self.slots ^= {slot}
        first, step = (0, 1) if forward else (self.last, -1)
        if block.chunk != first:
            demand(block in self.inputs, "no input")
            self.inputs.remove(block)
        if block.chunk != self.last - first:
            self.inputs.add(replace(block, chunk=block.chunk + step))
        self.ran.append(block)

    def finish(self, expected: set[tuple[Direction, int, int]]) -> None:
        """Check that everything ran and nothing is left."""
        demand(self.cursor == len(self.instructions), "deadlock")
        demand(not (self.inputs or self.slots or self.sending or self.receiving), "left over")
        demand(self.steps == 1, "no step")
        ran = [(block.direction, block.micro_batch, block.chunk) for block in self.ran]
        demand(len(ran) == len(expected) and set(ran) == expected, "other blocks")


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
            micro_batches = range(schedule.micro_batches)
            chunks = layout.chunks_of(rank.stage)
            rank.finish({(d, m, c) for d in Direction for m in micro_batches for c in chunks})
    except CannotRunError as failure:
        return str(failure)
    return None


def refusal(schedule: Schedule, layout: ParallelLayout) -> str | None:
    """Why `validate` refuses a schedule, or None."""
    try:
        validate(schedule, layout, model_parts(tp=2))
    except ScheduleError as error:
        return str(error)
    return None


def edited(schedule: Schedule, data: st.DataObject) -> Schedule:
    """The schedule after a random change of one stage's list."""
    stage = data.draw(st.integers(0, len(schedule.stages) - 1))
    instructions = [*schedule.stages[stage]]
    place = st.integers(0, len(instructions) - 1)
    n, m = data.draw(place), data.draw(place)
    match data.draw(st.sampled_from(["move", "move near", "swap", "delete", "repeat"])):
        case "move":
            instructions.insert(m, instructions.pop(n))
        case "move near":
            instructions.insert(max(0, n + data.draw(st.integers(-3, 3))), instructions.pop(n))
        case "swap":
            instructions[n], instructions[m] = instructions[m], instructions[n]
        case "delete":
            del instructions[n]
        case _:
            instructions.insert(m, instructions[n])
    return with_stage(schedule, stage, instructions)


@given(valid_schedules(), st.data())
@settings(max_examples=300, deadline=None)
def test_accepted_is_what_runs(case: tuple[Schedule, ParallelLayout], data: st.DataObject) -> None:
    schedule, layout = case
    for _ in range(data.draw(st.integers(0, 3))):
        schedule = edited(schedule, data)
    refused, cause = refusal(schedule, layout), runs(schedule, layout)
    event("refused" if refused else "accepted")
    assert bool(refused) == bool(cause), f"validate: {refused}\nthe model: {cause}\n{schedule.to_text()}"
