"""A model of the executor that runs a schedule's instructions on names alone, for `test_soundness`.

By the rules of `braid.scheduling.schedule`: inputs are handed from pass to pass, slots are opened and closed,
the n-th message sent on a channel meets the n-th that is asked for. All passes of a block are there at once,
a split backward pass hands its output on and closes its slot later, an end is there once its block has run,
parameters are absent until a block gathers them: for good, or (ZeRO 3) for that block alone. Their gathers
have begun at the begin of the list, or at the end of the step before. Gradients are summed over one axis
after the other, once, or (ZeRO 2) in every block that ends a pass's; then their squares.
"""

from collections import defaultdict

from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.schedule.operations import (
    Compute,
    Direction,
    Gather,
    Message,
    Norm,
    Pass,
    PassKind,
    Receive,
    Reduce,
    Send,
    Start,
    Step,
    Wait,
)
from braid.scheduling.schedule.schedule import Block, Instruction, Prefetch, Schedule
from tests.scheduling.cases import LLAMA, model_for

Channel = tuple[int, int, Direction]


class CannotRunError(Exception):
    """The model of the executor cannot go on."""


def demand(condition: bool, cause: str) -> None:
    """Fail unless the condition holds."""
    if not condition:
        raise CannotRunError(cause)


class Rank:
    """One stage's executor on names."""

    def __init__(
        self, stage: int, layout: ParallelLayout, schedule: Schedule, network: "Network", begun: set[Gather]
    ) -> None:
        """``begun``: what the step before has begun to gather."""
        self.stage, self.layout, self.network = stage, layout, network
        self.instructions = schedule.stages[stage]
        self.together = {
            tuple(side.kind for side in sides if side.kind is not PassKind.END) for sides in schedule.programs
        }
        self.cursor = 0
        self.inputs: set[Pass] = set()
        self.slots: set[Pass] = set()
        self.owed: set[Pass] = set()
        self.named = {one.whole for one in schedule.passes[stage] if one.kind is PassKind.END}
        self.ends: set[Pass] = set()
        chunks = layout.chunks_of(stage)
        shared = layout.zero and layout.dp > 1
        self.absent = {Gather(chunk, "dp") for chunk in chunks} if shared else set()
        self.everywhere = set(self.absent)
        reading = {one.chunk for one in schedule.passes[stage] if one.kind is not PassKind.WEIGHT}
        self.used = {one for one in self.everywhere if one.chunk in reading}
        self.begun = set(begun)
        self.ran: list[Pass] = []
        self.messages: dict[Message, tuple[Channel, int]] = {}
        axes = {"tp": layout.tp, "dp": layout.dp}
        self.unsummed = {Reduce(c, axis) for c in chunks for axis, degree in axes.items() if degree > 1}
        self.left_to_sum = set(self.unsummed)
        differing = ("tp", "pp", "dp") if layout.zero else ("tp", "pp")
        self.norm = {Reduce(None, axis) for axis in differing if layout.degree(axis) > 1}
        self.under_way: set[Reduce] = set()
        self.norms = self.steps = 0

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
            case Start(Send(moved, target) as message):
                demand(moved in self.inputs, "nothing to send")
                self.inputs.remove(moved)
                channel = (self.stage, target, moved.direction)
                self.messages[message] = channel, self.network.send(channel, moved)
            case Start(Receive(moved, source) as message):
                demand(message not in self.messages and moved not in self.inputs, "received twice")
                channel = (source, self.stage, moved.direction)
                self.messages[message] = channel, self.network.ask(channel, moved)
            case Wait(Send() | Receive() as transfer):
                demand(transfer in self.messages, "no such message")
                if not self.network.meet(*self.messages[transfer]):
                    return False
                del self.messages[transfer]
                if isinstance(transfer, Receive):
                    self.inputs.add(transfer.moved)
            case Prefetch():
                behind = (
                    self.cursor == len(self.instructions) - 1 and self.steps == 1 and self.layout.zero < 3
                )
                demand(self.layout.zero > 0 and (self.cursor == 0 or behind), "nothing to prefetch")
                demand(not self.begun, "prefetched twice")
                demand(not behind or not self.absent & self.used, "updated while they are gathered")
                self.begun = set(self.used)
            case Start(Reduce(chunk) as reduce):
                demand(chunk is None or not self.in_blocks(reduce), "to be summed in blocks")
                alike = {one for one in self.under_way if one.chunk == chunk}
                demand(not alike, "sums of the same at once")
                waiting = self.unsummed if chunk is not None else self.norm if self.norms else set()
                demand(reduce in waiting, "nothing to reduce")
                waiting.remove(reduce)
                self.under_way.add(reduce)
            case Wait(Reduce() as transfer):
                demand(transfer in self.under_way, "not under way")
                self.under_way.remove(transfer)
            case Compute(Norm()):
                demand(not (self.unsummed or self.under_way or self.norms), "norm too early")
                self.norms = 1
            case Compute(Step()):
                demand(self.norms == 1 and not (self.norm or self.under_way or self.steps), "step too early")
                self.steps = 1
        return True

    def block(self, block: Block) -> None:
        """Run the passes of a block and hand on what they make."""
        passes = block.passes
        reading = {one.chunk for one in passes if one.kind is not PassKind.WEIGHT}
        for gather in block.gathers:
            demand(gather in self.absent and gather.chunk in reading, "nothing to gather")
            demand(gather in self.begun, "never prefetched")
            self.absent.remove(gather)
            if self.layout.zero < 3:
                self.begun.remove(gather)
        movers = [one for one in passes if one.kind is not PassKind.END]
        kinds = [one.kind for one in movers]
        demand(bool(movers), "an end alone")
        demand(len({one.whole for one in passes}) == len(passes), "a pass twice")
        strands = [{one.strand for one in movers if one.forward is forward} for forward in (True, False)]
        demand(not strands[0] & strands[1], "both directions on one strand")
        demand(len(set(kinds)) == 1 or tuple(kinds) in self.together, "no such program")
        leaving = [
            one for one in movers if kinds == [PassKind.FORWARD, PassKind.BACKWARD] and self.leaves(*movers)
        ]
        for one in passes:
            if one.kind is PassKind.END:
                demand(one.whole in self.ends, "no such end")
                self.ends.remove(one.whole)
                whole = [other for other in movers if other not in leaving and other.chunk == one.chunk]
                whole = [other for other in whole if other.kind in (PassKind.BACKWARD, PassKind.WEIGHT)]
                demand(all(one.micro_batch < other.micro_batch for other in whole), "sums out of order")
        if len(movers) > 1 and len(set(kinds)) == 1 and len({one.chunk for one in movers}) == 1:
            gives = not movers[0].forward or self.layout.is_last(movers[0].chunk)
            order = [one.micro_batch for one in movers]
            demand(not gives or order == sorted(order), "sums out of order")
        for one in passes:
            demand(not self.norms, "behind the norm")
            demand(self.layout.stage_of(one.chunk) == self.stage, "not here")
            summing = any(r.chunk == one.chunk for r in self.left_to_sum)
            demand(summing, "no gradients")
            once = {r for r in self.left_to_sum if r.chunk == one.chunk and not self.in_blocks(r)}
            demand(once <= self.unsummed, "its gradients are on their way")
            present = one.kind is PassKind.WEIGHT or Gather(one.chunk, "dp") not in self.absent
            demand(present, "no parameters")
        made = [one for mover in movers for one in self.one_pass(mover)]
        self.inputs |= set(made)
        self.ends |= {one for one in leaving if not one.forward and one in self.named}
        if self.layout.zero > 2:
            self.absent = set(self.everywhere)
        ended = {one.chunk for one in passes if one.kind.value in "BWL"}
        every = {one for one in self.left_to_sum if one.chunk in ended and self.in_blocks(one)}
        demand(every <= set(block.sums), "gradients stay behind")
        for place, one in enumerate(block.sums):
            if self.in_blocks(one):
                before = block.sums[:place]
                demand(one in self.left_to_sum and one not in before, "nothing to reduce")
                demand(one.axis == "dp" or Reduce(one.chunk, "dp") not in before, "replicas come first")
                self.unsummed.discard(one)
                self.under_way.add(one)
            else:
                self.run(Start(one))
            if one.axis == "tp":
                self.under_way.remove(one)

    def in_blocks(self, one: Reduce) -> bool:
        """Whether a sum belongs into every block that ends a pass's gradients."""
        return self.layout.zero > 1 and one.axis in ("tp", "dp")

    def leaves(self, forward: Pass, backward: Pass) -> bool:
        """Whether a paired block ends with a layer beside a layer, so that an end may be left."""
        layers = model_for(self.layout, LLAMA).layers
        held = {len(self.layout.layers_of(one.chunk, layers)) for one in (forward, backward)}
        ends = self.layout.is_last(forward.chunk) or self.layout.is_first(backward.chunk)
        return len(held) == 1 and not ends

    def one_pass(self, one: Pass) -> list[Pass]:
        """Run a pass; the passes that can go on with what it made, once the block is through."""
        if one.kind is PassKind.WEIGHT:
            demand(one.whole in self.owed, "no such input gradients")
            self.owed.remove(one.whole)
            return []
        slot = one._replace(kind=PassKind.FORWARD)
        demand(one.forward != (slot in self.slots), "slot")
        self.slots ^= {slot}
        if one.kind is PassKind.INPUT:
            self.owed.add(one.whole)
        size = self.layout.chunks
        place, step = (one.chunk, 1) if one.forward else (size - 1 - one.chunk, -1)
        if place > 0:
            demand(one.whole in self.inputs, "no input")
            self.inputs.remove(one.whole)
        self.ran.append(one.whole)
        return [one.whole._replace(chunk=one.chunk + step)] if place < size - 1 else []

    def finish(self) -> None:
        """Check that everything ran and nothing is left."""
        demand(self.cursor == len(self.instructions), "deadlock")
        demand(not (self.inputs or self.slots or self.messages), "left over")
        demand(not (self.owed or self.ends or self.under_way), "weight gradients or parameters left over")
        demand(self.steps == 1, "no step")


class Network:
    """Channels between stages: no message passes another, none is buffered."""

    def __init__(self) -> None:
        self.sent: dict[Channel, list[Pass]] = defaultdict(list)
        self.asked: dict[Channel, list[Pass]] = defaultdict(list)

    def send(self, channel: Channel, moved: Pass) -> int:
        """Offer a message; returns its number on the channel."""
        self.sent[channel].append(moved)
        return len(self.sent[channel]) - 1

    def ask(self, channel: Channel, moved: Pass) -> int:
        """Ask for a message; returns its number on the channel."""
        self.asked[channel].append(moved)
        return len(self.asked[channel]) - 1

    def meet(self, channel: Channel, number: int) -> bool:
        """Whether both sides of a message are there; they must mean the same pass."""
        sent, asked = self.sent[channel], self.asked[channel]
        if number >= min(len(sent), len(asked)):
            return False
        demand(sent[: number + 1] == asked[: number + 1], "messages mixed up")
        return True


def runs(schedule: Schedule, layout: ParallelLayout) -> str | None:
    """Why the model of the executor cannot run a schedule, or None."""
    network = Network()
    begun = [begun_at_first(schedule, stage, layout) for stage in range(layout.pp)]
    try:
        for _ in range(STEPS):
            ranks = [Rank(stage, layout, schedule, network, begun[stage]) for stage in range(layout.pp)]
            while any(rank.advance() for rank in ranks):
                pass
            for rank in ranks:
                rank.finish()
            demand_all_passes([one for rank in ranks for one in rank.ran], schedule, layout)
            begun = [rank.begun if layout.zero < 3 else set() for rank in ranks]
    except CannotRunError as failure:
        return str(failure)
    return None


STEPS = 2
"""The second one goes on with what the first one has begun."""


def begun_at_first(schedule: Schedule, stage: int, layout: ParallelLayout) -> set[Gather]:
    """What is begun before the first step, where lists leave that to the step before."""
    *_, last = schedule.stages[stage]
    reading = {one.chunk for one in schedule.passes[stage] if one.kind is not PassKind.WEIGHT}
    behind = isinstance(last, Prefetch) and layout.zero in (1, 2) and layout.dp > 1
    return {Gather(chunk, "dp") for chunk in reading & {*layout.chunks_of(stage)}} if behind else set()


def demand_all_passes(ran: list[Pass], schedule: Schedule, layout: ParallelLayout) -> None:
    """Every micro-batch goes forward and backward through all chunks, once."""
    size = layout.chunks
    demand(len(set(ran)) == len(ran) == 2 * size * schedule.micro_batches, "too few passes, or too many")
    for m in range(schedule.micro_batches):
        here = [one for one in ran if one.micro_batch == m]
        demand(len(here) == 2 * size, "too few passes of a micro-batch")
        demand(len({one.strand for one in here}) == 1, "on two strands")
