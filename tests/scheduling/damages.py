"""Ways to break the lists of a schedule, for `test_validate`: blocks, messages, the update.

A damage is a function that breaks a valid schedule at a place that hypothesis chooses. It is written so that
the result is never valid; where a schedule offers no place for it, hypothesis tries another schedule. Those
of paired blocks, split backward passes and gathered parameters stand in `damages_of_overlap`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import assume
from hypothesis import strategies as st

from braid.scheduling.lowering.lower import predecessor, successor
from braid.scheduling.lowering.named import SCHEDULES
from braid.scheduling.schedule import (
    Block,
    Direction,
    Instruction,
    Pair,
    Receive,
    Reduce,
    Schedule,
    Send,
    Step,
    Strand,
    WaitReceive,
    WaitReduce,
    WaitSend,
    blocks_in,
)
from braid.scheduling.spec import ParallelLayout
from braid.scheduling.validate import ScheduleError, validate
from tests.scheduling.cases import model_parts

PARTS = model_parts(tp=2)


def message_of(schedule: Schedule, layout: ParallelLayout) -> str:
    """The message with which a schedule is refused."""
    with pytest.raises(ScheduleError) as error:
        validate(schedule, layout, PARTS)
    return str(error.value)


class Place:
    """A stage of a valid schedule, with what a damage needs: its list, and choices."""

    def __init__(
        self, draw: Callable[[st.SearchStrategy[int]], int], schedule: Schedule, layout: ParallelLayout
    ) -> None:
        self._draw = draw
        self.schedule, self.layout = schedule, layout
        self.stage = self.number(0, layout.pp - 1)
        self.list: list[Any] = [*schedule.stages[self.stage]]

    def number(self, low: int, high: int) -> int:
        """A number between two, both included."""
        return self._draw(st.integers(low, high))

    def find(self, *kinds: type, where: Callable[[Any], bool] = lambda _: True) -> int:
        """The position of some instruction of one of the kinds."""
        found = [n for n, i in enumerate(self.list) if isinstance(i, kinds) and where(i)]
        assume(found)
        return found[self.number(0, len(found) - 1)]

    def position(self, instruction: Instruction | None) -> int:
        """The position of an instruction that must be there."""
        return self.list.index(instruction)

    def running(self, block: Block | None) -> int:
        """The position of the instruction that runs a pass (of a split one, its input gradients)."""
        assert block is not None
        return next(
            n for n, i in enumerate(self.list) for b in blocks_in(i) if b.travels and b.whole == block.whole
        )

    def last_of(self, chunk: int) -> int:
        """The position of the last instruction that runs a block of a chunk."""
        found = [n for n, i in enumerate(self.list) for b in blocks_in(i) if b.chunk == chunk]
        assume(found)
        return found[-1]

    def foreign_chunk(self) -> int:
        """A chunk that another stage holds, or none."""
        chunks = [c for c in range(self.layout.chunks + 2) if c not in self.layout.chunks_of(self.stage)]
        return chunks[self.number(0, len(chunks) - 1)]

    def about(self, kind: type[Any], block: Block) -> int:
        """The position of the instruction of a kind that moves a block's input."""
        return next(n for n, i in enumerate(self.list) if type(i) is kind and i.block == block)

    def elsewhere(self, stage: int) -> int:
        """Another stage than the one given, possibly one that does not exist."""
        return (stage + self.number(1, self.layout.pp)) % (self.layout.pp + 1)


@dataclass(frozen=True)
class Damage:
    """A way to break one stage's list, and the cause (a pattern) that the message must give."""

    breaks: Callable[[Place], None]
    cause: str
    names: tuple[str, ...]
    """Schedules that offer a place for it."""


DAMAGES: dict[str, Damage] = {}


def damage(
    cause: str, names: tuple[str, ...] = tuple(SCHEDULES)
) -> Callable[[Callable[[Place], None]], Callable[[Place], None]]:
    """Register a damage."""

    def register(function: Callable[[Place], None]) -> Callable[[Place], None]:
        DAMAGES[function.__name__] = Damage(function, cause, names)
        return function

    return register


def other_strand(block: Block) -> Block:
    """The block on the strand that it is not on."""
    return replace(block, strand=Strand.BETA if block.strand is Strand.ALPHA else Strand.ALPHA)


NOT_HERE = "has not run|has not arrived|never run|takes nothing|no send of|is under way"


# -- blocks ------------------------------------------------------------------------------------------------


@damage(NOT_HERE)
def drop_a_block(at: Place) -> None:
    del at.list[at.find(Block)]


@damage("runs twice")
def run_a_block_twice(at: Place) -> None:
    n = at.find(Block, Pair)
    at.list.insert(n + 1, at.list[n])


@damage("its forward F.* has not run|its input .* has not|has not run yet, its output")
def swap_a_forward_with_its_backward(at: Place) -> None:
    n = at.find(Block, where=lambda i: replace(i, direction=Direction.BACKWARD) in at.list)
    assume(at.list[n].direction is Direction.FORWARD)
    m = at.position(replace(at.list[n], direction=Direction.BACKWARD))
    at.list[n], at.list[m] = at.list[m], at.list[n]


@damage("its input from stage . has not arrived|its forward F.* has not run")
def swap_blocks_of_two_micro_batches(at: Place) -> None:
    received = {i.block for i in at.list if isinstance(i, Receive)}
    n = at.find(Block, where=lambda i: i.travels and i.whole in received)
    one = at.list[n]
    m = at.find(
        Block,
        where=lambda i: i.travels and (i.direction, i.chunk) == (one.direction, one.chunk) and i != one,
    )
    at.list[n], at.list[m] = at.list[m], at.list[n]


@damage("does not run on this stage: it has chunk")
def run_a_block_of_another_chunk(at: Place) -> None:
    n = at.find(Block)
    at.list[n] = replace(at.list[n], chunk=at.foreign_chunk())


@damage("does not run on this stage: .* of the other copy|still has blocks to run", ("bidirectional",))
def run_a_block_of_the_other_copy(at: Place) -> None:
    n = at.find(Block)
    chunks = [c for c in at.layout.chunks_of(at.stage) if c != at.list[n].chunk]
    at.list[n] = replace(at.list[n], chunk=chunks[0])


@damage("does not run on this stage: .*micro-batches 0 to")
def run_a_micro_batch_that_does_not_exist(at: Place) -> None:
    n = at.find(Block)
    at.list[n] = replace(at.list[n], micro_batch=at.schedule.micro_batches + at.number(0, 3))


@damage("does not run on this stage: .* on strand (alpha|beta)")
def run_a_block_on_the_other_strand(at: Place) -> None:
    n = at.find(Block)
    at.list[n] = other_strand(at.list[n])


@damage("still has blocks to run")
def run_a_block_after_the_step(at: Place) -> None:
    last = max(n for n, i in enumerate(at.list) if isinstance(i, Block))
    block = at.list.pop(last)
    if block.travels:
        about = successor(block, at.layout)
        at.list = [i for i in at.list if not (isinstance(i, Send | WaitSend) and i.block == about)]
    at.list.append(block)


# -- messages ----------------------------------------------------------------------------------------------


@damage("is never sent|no send of .* is under way")
def drop_a_send(at: Place) -> None:
    del at.list[at.find(Send)]


@damage("the output of .* is never sent to the stage that needs it")
def drop_a_send_and_its_wait(at: Place) -> None:
    block = at.list[at.find(Send)].block
    at.list = [i for i in at.list if not (isinstance(i, Send | WaitSend) and i.block == block)]


@damage("the same output is sent twice")
def send_twice(at: Place) -> None:
    n = at.find(Send)
    at.list.insert(n + at.number(0, 1), at.list[n])


@damage("F.* runs on stage .$|B.* runs on stage .$")
def send_to_the_wrong_stage(at: Place) -> None:
    n = at.find(Send)
    at.list[n] = replace(at.list[n], stage=at.elsewhere(at.list[n].stage))


@damage("has not run yet, its output cannot be sent")
def send_before_the_block(at: Place) -> None:
    n = at.find(Send)
    send = at.list.pop(n)
    at.list.insert(at.number(0, at.running(predecessor(send.block, at.layout))), send)


@damage("takes nothing from this stage|has not run yet")
def send_for_another_block(at: Place) -> None:
    n = at.find(Send)
    block = at.list[n].block
    shifted = replace(block, chunk=block.chunk + at.number(1, 3))
    at.list[n] = replace(at.list[n], block=shifted)
    ran = {b.whole for i in at.list[:n] for b in blocks_in(i)}
    assume(predecessor(shifted, at.layout) not in ran)


@damage("no receive of .* is under way")
def drop_a_receive(at: Place) -> None:
    del at.list[at.find(Receive)]


@damage("the same input is received twice")
def receive_twice(at: Place) -> None:
    n = at.find(Receive)
    at.list.insert(at.number(n, len(at.list)), at.list[n])


@damage("nothing for .* comes from stage")
def receive_from_the_wrong_stage(at: Place) -> None:
    n = at.find(Receive)
    at.list[n] = replace(at.list[n], stage=at.elsewhere(at.list[n].stage))


@damage("does not run on this stage")
def receive_for_another_stage(at: Place) -> None:
    n = at.find(Receive)
    at.list[n] = replace(at.list[n], block=replace(at.list[n].block, chunk=at.foreign_chunk()))


@damage("the next message that stage . sends is for|no receive of .* is under way")
def swap_two_receives(at: Place) -> None:
    n = at.find(Receive)
    one = at.list[n]
    m = at.find(
        Receive,
        where=lambda i: (i.stage, i.block.direction) == (one.stage, one.block.direction) and i != one,
    )
    at.list[n], at.list[m] = at.list[m], at.list[n]


@damage("the next message that stage . sends is for|no send of .* is under way")
def swap_two_sends(at: Place) -> None:
    n = at.find(Send)
    one = at.list[n]
    m = at.find(
        Send,
        where=lambda i: (
            (i.stage, i.block.direction) == (one.stage, one.block.direction) and at.position(i) > n
        ),
    )
    at.list.insert(m, at.list.pop(n))


@damage("its input from stage . has not arrived")
def do_not_wait_for_a_receive(at: Place) -> None:
    del at.list[at.find(WaitReceive)]


@damage("no receive of .* is under way")
def wait_for_a_receive_twice(at: Place) -> None:
    n = at.find(WaitReceive)
    at.list.insert(at.number(n, len(at.list)), at.list[n])


@damage("no receive of .* is under way")
def wait_before_the_receive(at: Place) -> None:
    n = at.find(WaitReceive)
    wait = at.list.pop(n)
    at.list.insert(at.number(0, at.about(Receive, wait.block)), wait)


@damage("its input from stage . has not arrived")
def wait_for_a_receive_after_its_block(at: Place) -> None:
    n = at.find(WaitReceive)
    wait = at.list.pop(n)
    at.list.insert(at.number(at.running(wait.block) + 1, len(at.list)), wait)


@damage("the send of .* is never waited for")
def do_not_wait_for_a_send(at: Place) -> None:
    del at.list[at.find(WaitSend)]


@damage("no send of .* is under way")
def wait_for_a_send_twice(at: Place) -> None:
    n = at.find(WaitSend)
    at.list.insert(at.number(n, len(at.list)), at.list[n])


@damage("no send of .* is under way")
def wait_before_the_send(at: Place) -> None:
    n = at.find(WaitSend)
    wait = at.list.pop(n)
    at.list.insert(at.number(0, at.about(Send, wait.block)), wait)


@damage("no (send|receive) of .* is under way")
def wait_for_a_message_that_does_not_exist(at: Place) -> None:
    n = at.find(WaitSend, WaitReceive)
    block = at.list[n].block
    at.list[n] = replace(at.list[n], block=replace(block, micro_batch=block.micro_batch + 100))


@damage("deadlock: .*stage . waits at")
def wait_in_a_circle(at: Place) -> None:
    """Wait for a micro-batch's gradient before its activation is sent on: the gradient depends on it."""
    n = at.find(
        Receive,
        where=lambda i: i.block.direction is Direction.BACKWARD and i.stage == at.stage + 1,
    )
    receive = at.list[n]
    block, wait = receive.block, WaitReceive(receive.block)
    channel = [i for i in at.list if isinstance(i, Receive) and i.block.direction is Direction.BACKWARD]
    assume(receive == next(i for i in channel if i.stage == receive.stage))
    at.list = [i for i in at.list if i not in (receive, wait)]
    activation = replace(block, direction=Direction.FORWARD, chunk=block.chunk + 1)
    later = (n for n, i in enumerate(at.list) if i in channel and i.stage == receive.stage)
    place = at.number(0, min(at.about(Send, activation), *later, len(at.list)))
    at.list[place:place] = [receive, wait]


# -- the update --------------------------------------------------------------------------------------------


@damage("still has blocks to run")
def reduce_before_the_last_block(at: Place) -> None:
    reduce = at.list.pop(at.find(Reduce))
    at.list.insert(at.number(0, at.last_of(reduce.chunk)), reduce)


@damage("no reduction of chunk . is under way")
def drop_a_reduce(at: Place) -> None:
    del at.list[at.find(Reduce)]


@damage("is reduced twice")
def reduce_twice(at: Place) -> None:
    n = at.find(Reduce)
    at.list.insert(at.number(n, len(at.list)), at.list[n])


@damage("is not on this stage")
def reduce_a_foreign_chunk(at: Place) -> None:
    at.list[at.find(Reduce)] = Reduce(at.foreign_chunk())


@damage("chunks .* are not reduced")
def do_not_wait_for_a_reduce(at: Place) -> None:
    del at.list[at.find(WaitReduce)]


@damage("no reduction of chunk . is under way")
def wait_for_a_reduce_twice(at: Place) -> None:
    n = at.find(WaitReduce)
    at.list.insert(at.number(n, len(at.list)), at.list[n])


@damage("no reduction of chunk . is under way")
def wait_before_the_reduce(at: Place) -> None:
    wait = at.list.pop(at.find(WaitReduce))
    at.list.insert(at.number(0, at.position(Reduce(wait.chunk))), wait)


@damage("the STEP is missing")
def drop_the_step(at: Place) -> None:
    at.list.remove(Step())


@damage("a second STEP")
def step_twice(at: Place) -> None:
    at.list.insert(at.number(at.position(Step()), len(at.list)), Step())


@damage("chunks .* are not reduced")
def step_early(at: Place) -> None:
    at.list.remove(Step())
    last = max(n for n, i in enumerate(at.list) if isinstance(i, WaitReduce))
    at.list.insert(at.number(0, last), Step())
