"""Ways to break the lists of a schedule, for `test_validate`: blocks, messages, the update.

A damage is a function that breaks a valid schedule at a place that hypothesis chooses. It is written so that
the result is never valid; where a schedule offers no place for it, hypothesis tries another schedule. Those
of blocks of several passes, ends, split backward passes and what is gathered and summed in blocks stand in
`damages_of_overlap`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import assume
from hypothesis import strategies as st

from braid.scheduling.lowering.lower import with_gathering
from braid.scheduling.schedule import (
    Await,
    Block,
    Direction,
    Instruction,
    Norm,
    Pass,
    PassKind,
    Prefetch,
    Receive,
    Reduce,
    Schedule,
    Send,
    Step,
    Strand,
    passes_in,
    sums_in,
)
from braid.scheduling.spec import ParallelLayout
from braid.scheduling.validate import ScheduleError
from tests.scheduling.cases import LOWERED, code_of, model_for, model_parts, prefetches_behind

PARTS = model_parts(tp=2)


def message_of(schedule: Schedule, layout: ParallelLayout) -> str:
    """The message with which a schedule is refused."""
    with pytest.raises(ScheduleError) as error:
        code_of(schedule, layout)
    return str(error.value)


def alone(instruction: Instruction) -> bool:
    """Whether an instruction is a block of one pass."""
    return len(passes_in(instruction)) == 1


def only(block: Block) -> Pass:
    """The pass of a block of one."""
    (one,) = block.passes
    return one


def of(kind: type[Any]) -> Callable[[Any], bool]:
    """Whether an instruction waits for a transfer of a kind."""
    return lambda i: isinstance(i, Await) and isinstance(i.transfer, kind)


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

    def wait(self, *kinds: type) -> int:
        """The position of some wait for a transfer of one of the kinds."""
        return self.find(Await, where=lambda i: isinstance(i.transfer, kinds))

    def single(self, where: Callable[[Pass], bool] = lambda _: True) -> int:
        """The position of some block of one pass."""
        return self.find(Block, where=lambda i: alone(i) and where(only(i)))

    def sum(self, norm: bool = False) -> int:
        """The position of some start to sum gradients, or the norm."""
        return self.find(Reduce, where=lambda i: (i.chunk is None) is norm)

    def summed(self, reduce: Reduce) -> int:
        """The position of what starts a sum, of gradients perhaps a block."""
        return next(n for n, i in enumerate(self.list) if reduce == i or reduce in sums_in(i))

    def position(self, instruction: Instruction | None) -> int:
        """The position of an instruction that must be there."""
        return self.list.index(instruction)

    def running(self, one: Pass | None) -> int:
        """The position of the block that runs a pass (of a split one, its input gradients)."""
        assert one is not None
        return next(
            n
            for n, i in enumerate(self.list)
            for here in passes_in(i)
            if here.kind.travels and here.whole == one.whole
        )

    def last_of(self, chunk: int) -> int:
        """The position of the last block that runs a pass of a chunk."""
        found = [n for n, i in enumerate(self.list) for one in passes_in(i) if one.chunk == chunk]
        assume(found)
        return found[-1]

    def foreign_chunk(self) -> int:
        """A chunk that another stage holds, or none."""
        chunks = [c for c in range(self.layout.chunks + 2) if c not in self.layout.chunks_of(self.stage)]
        return chunks[self.number(0, len(chunks) - 1)]

    def elsewhere(self, stage: int) -> int:
        """Another stage than the one given, possibly one that does not exist."""
        return (stage + self.number(1, self.layout.pp)) % (self.layout.pp + 1)

    def without(self, *instructions: Instruction) -> None:
        """Leave instructions out."""
        self.list = [i for i in self.list if i not in instructions]


@dataclass(frozen=True, kw_only=True)
class Damage:
    """A way to break one stage's list, and the cause (a pattern) that the message must give."""

    breaks: Callable[[Place], None]
    cause: str
    names: tuple[str, ...]
    """Schedules that offer a place for it."""
    zero: tuple[int, ...]
    """ZeRO stages that it is tried under."""
    ends: bool | None
    """Whether ends are left; None: either."""
    of_gathers: bool
    """Whether it breaks gathers. Where it breaks something else, all blocks have the parameters they use."""

    def list_of(self, at: Place) -> tuple[Instruction, ...]:
        """A stage's list, broken."""
        self.breaks(at)
        if self.of_gathers or not at.layout.zero:
            return tuple(at.list)
        plain = [replace(i, gathers=()) if isinstance(i, Block) else i for i in at.list]
        (stage,) = with_gathering(
            (tuple(i for i in plain if not isinstance(i, Prefetch)),),
            model_for(at.layout),
            at.layout,
            early=prefetches_behind(at.schedule) and Step() in plain,
        )
        return stage


DAMAGES: dict[str, Damage] = {}


def damage(
    cause: str,
    names: tuple[str, ...] = LOWERED,
    zero: tuple[int, ...] = (0, 1, 2, 3),
    ends: bool | None = None,
    of_gathers: bool = False,
) -> Callable[[Callable[[Place], None]], Callable[[Place], None]]:
    """Register a damage."""

    def register(function: Callable[[Place], None]) -> Callable[[Place], None]:
        DAMAGES[function.__name__] = Damage(
            breaks=function, cause=cause, names=names, zero=zero, ends=ends, of_gathers=of_gathers
        )
        return function

    return register


def other_strand(one: Pass) -> Pass:
    """The pass on the strand that it is not on."""
    return one._replace(strand=Strand.BETA if one.strand is Strand.ALPHA else Strand.ALPHA)


def turned(one: Pass) -> Pass:
    """The whole pass the other way, of the same micro-batch and chunk."""
    return one._replace(kind=PassKind.BACKWARD if one.forward else PassKind.FORWARD)


def block_of(*passes: Pass) -> Block:
    """A block of some passes."""
    return Block(passes)


NOT_GATHERED = "the parameters of chunk . are not gathered"
"""A backward pass does not read all that its forward pass does: the first block may gather too little."""
NOT_HERE = f"has not run|has not arrived|never run|{NOT_GATHERED}"


# -- blocks ------------------------------------------------------------------------------------------------


@damage(f"{NOT_HERE}|is not done yet")
def drop_a_block(at: Place) -> None:
    del at.list[at.single()]


@damage("runs twice|has left an end of")
def run_a_block_twice(at: Place) -> None:
    n = at.find(Block)
    at.list.insert(n + 1, at.list[n])


@damage(f"{NOT_HERE}|of its forward pass has not run|its input .* has not|has not run yet, its output")
def swap_a_forward_with_its_backward(at: Place) -> None:
    alone_too = {only(i) for i in at.list if isinstance(i, Block) and alone(i)}
    n = at.single(lambda one: one.forward and turned(one) in alone_too)
    m = at.running(turned(only(at.list[n])))
    at.list[n], at.list[m] = at.list[m], at.list[n]


@damage("its input from stage . has not arrived|of its forward pass has not run")
def swap_blocks_of_two_micro_batches(at: Place) -> None:
    received = {i.moved for i in at.list if isinstance(i, Receive)}
    n = at.single(lambda one: one.kind.travels and one.whole in received)
    first = only(at.list[n])
    m = at.single(
        lambda one: (
            one.kind.travels and (one.direction, one.chunk) == (first.direction, first.chunk) and one != first
        )
    )
    at.list[n], at.list[m] = at.list[m], at.list[n]


@damage("does not run on this stage: it has chunk")
def run_a_block_of_another_chunk(at: Place) -> None:
    n = at.single()
    at.list[n] = block_of(only(at.list[n])._replace(chunk=at.foreign_chunk()))


@damage("does not run on this stage: .*micro-batches 0 to")
def run_a_micro_batch_that_does_not_exist(at: Place) -> None:
    n = at.single()
    number = at.schedule.micro_batches + at.number(0, 3)
    at.list[n] = block_of(only(at.list[n])._replace(micro_batch=number))


@damage("is on strand (alpha|beta) elsewhere")
def run_a_block_on_the_other_strand(at: Place) -> None:
    n = at.single()
    at.list[n] = block_of(other_strand(only(at.list[n])))


@damage("still has passes to run|is never sent to the stage that needs it|no REDUCE.* is under way")
def run_a_block_after_the_step(at: Place) -> None:
    """Or after the norm."""
    last = max(n for n, i in enumerate(at.list) if isinstance(i, Block))
    block = at.list.pop(last)
    about = {one.after(at.layout) for one in block.passes if one.kind.travels}
    sent = [i for i in at.list if isinstance(i, Send) and i.moved in about]
    at.without(*sent, *map(Await, sent))
    at.list.insert(at.number(at.position(Norm()) + 1, len(at.list)), block)


# -- messages ----------------------------------------------------------------------------------------------


@damage("SEND.* is not started")
def drop_a_send(at: Place) -> None:
    del at.list[at.find(Send)]


@damage("the output of .* is never sent to the stage that needs it")
def drop_a_send_and_its_wait(at: Place) -> None:
    sent = at.list[at.find(Send)]
    at.without(sent, Await(sent))


@damage("SEND.* is started twice")
def send_twice(at: Place) -> None:
    n = at.find(Send)
    at.list.insert(n + at.number(0, 1), at.list[n])


@damage("F.* runs on stage .$|B.* runs on stage .$|runs on this stage, there is nothing to send")
def send_to_the_wrong_stage(at: Place) -> None:
    n = at.find(Send)
    at.list[n] = replace(at.list[n], stage=at.elsewhere(at.list[n].stage))


@damage("has not run yet, its output cannot be handed on")
def send_before_the_block(at: Place) -> None:
    sent = at.list.pop(at.find(Send))
    at.list.insert(at.number(0, at.running(sent.moved.before(at.layout))), sent)


@damage("takes nothing from this stage|has not run yet|runs on (this )?stage")
def send_for_another_block(at: Place) -> None:
    n = at.find(Send)
    moved = at.list[n].moved
    shifted = moved._replace(chunk=moved.chunk + at.number(1, 3))
    at.list[n] = replace(at.list[n], moved=shifted)
    ran = {one.whole for i in at.list[:n] for one in passes_in(i)}
    assume(shifted.before(at.layout) not in ran)


@damage("messages are of whole passes: B")
def send_by_the_name_of_input_gradients(at: Place) -> None:
    n = at.find(Send, Receive, where=lambda i: not i.moved.forward)
    at.list[n] = replace(at.list[n], moved=at.list[n].moved._replace(kind=PassKind.INPUT))


@damage("RECV.* is not started")
def drop_a_receive(at: Place) -> None:
    del at.list[at.find(Receive)]


@damage("RECV.* is started twice")
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
    at.list[n] = replace(at.list[n], moved=at.list[n].moved._replace(chunk=at.foreign_chunk()))


@damage("the next message that stage . sends is for|RECV.* is not started")
def swap_two_receives(at: Place) -> None:
    n = at.find(Receive)
    one = at.list[n]
    m = at.find(
        Receive,
        where=lambda i: (i.stage, i.moved.direction) == (one.stage, one.moved.direction) and i != one,
    )
    at.list[n], at.list[m] = at.list[m], at.list[n]


@damage("the next message that stage . sends is for|SEND.* is not started")
def swap_two_sends(at: Place) -> None:
    n = at.find(Send)
    one = at.list[n]
    m = at.find(
        Send,
        where=lambda i: (
            (i.stage, i.moved.direction) == (one.stage, one.moved.direction) and at.position(i) > n
        ),
    )
    at.list.insert(m, at.list.pop(n))


@damage("its input from stage . has not arrived")
def do_not_wait_for_a_receive(at: Place) -> None:
    del at.list[at.wait(Receive)]


@damage("RECV.* is waited for twice")
def wait_for_a_receive_twice(at: Place) -> None:
    n = at.wait(Receive)
    at.list.insert(at.number(n, len(at.list)), at.list[n])


@damage("RECV.* is not started")
def wait_before_the_receive(at: Place) -> None:
    wait = at.list.pop(at.wait(Receive))
    at.list.insert(at.number(0, at.position(wait.transfer)), wait)


@damage("its input from stage . has not arrived")
def wait_for_a_receive_after_its_block(at: Place) -> None:
    wait = at.list.pop(at.wait(Receive))
    at.list.insert(at.number(at.running(wait.transfer.moved) + 1, len(at.list)), wait)


@damage("the send of the output of .* is never waited for")
def do_not_wait_for_a_send(at: Place) -> None:
    del at.list[at.wait(Send)]


@damage("SEND.* is waited for twice")
def wait_for_a_send_twice(at: Place) -> None:
    n = at.wait(Send)
    at.list.insert(at.number(n, len(at.list)), at.list[n])


@damage("SEND.* is not started")
def wait_before_the_send(at: Place) -> None:
    wait = at.list.pop(at.wait(Send))
    at.list.insert(at.number(0, at.position(wait.transfer)), wait)


def change_a_wait(at: Place, change: Callable[[Any], Any]) -> None:
    """Wait for another message than the one that was started."""
    n = at.wait(Send, Receive)
    at.list[n] = Await(change(at.list[n].transfer))


@damage("SEND.* is not started|does not run on this stage")
def wait_for_a_message_that_does_not_exist(at: Place) -> None:
    change_a_wait(at, lambda t: replace(t, moved=t.moved._replace(micro_batch=t.moved.micro_batch + 100)))


@damage("runs on (this )?stage|nothing for .* comes from stage")
def wait_for_a_message_of_another_stage(at: Place) -> None:
    change_a_wait(at, lambda t: replace(t, stage=at.elsewhere(t.stage)))


@damage("is on strand (alpha|beta) elsewhere")
def wait_for_a_message_on_the_other_strand(at: Place) -> None:
    change_a_wait(at, lambda t: replace(t, moved=other_strand(t.moved)))


@damage("deadlock: .*stage . waits at")
def wait_in_a_circle(at: Place) -> None:
    """Wait for a micro-batch's gradient before its activation is sent on: the gradient depends on it."""
    n = at.find(
        Receive,
        where=lambda i: i.moved.direction is Direction.BACKWARD and i.stage == at.stage + 1,
    )
    receive = at.list[n]
    moved, wait = receive.moved, Await(receive)
    channel = [i for i in at.list if isinstance(i, Receive) and i.moved.direction is Direction.BACKWARD]
    assume(receive == next(i for i in channel if i.stage == receive.stage))
    at.without(receive, wait)
    activation = moved._replace(kind=PassKind.FORWARD, chunk=moved.chunk + 1)
    sent = next(n for n, i in enumerate(at.list) if isinstance(i, Send) and i.moved == activation)
    later = (n for n, i in enumerate(at.list) if i in channel and i.stage == receive.stage)
    place = at.number(0, min(sent, *later, len(at.list)))
    at.list[place:place] = [receive, wait]


# -- the update --------------------------------------------------------------------------------------------


@damage("still has passes to run")
def reduce_before_the_last_block(at: Place) -> None:
    n = at.sum()
    reduce, wait = at.list[n], Await(at.list[n])
    axes = [i for i in at.list if isinstance(i, Reduce) and i.chunk == reduce.chunk]
    assume(reduce == axes[0])
    last = at.last_of(reduce.chunk)
    at.without(reduce, wait)
    place = at.number(0, last)
    at.list[place:place] = [reduce, wait]


@damage("no REDUCE.* is under way")
def drop_a_reduce(at: Place) -> None:
    del at.list[at.find(Reduce)]


@damage("the gradients of chunk . are not summed over (tp|dp|copies)")
def drop_a_reduce_and_its_wait(at: Place) -> None:
    reduce = at.list[at.sum()]
    at.without(reduce, Await(reduce))


@damage("REDUCE.* stands twice")
def reduce_twice(at: Place) -> None:
    n = at.find(Reduce)
    at.list.insert(at.number(n, len(at.list)), at.list[n])


@damage("REDUCE.* stands twice")
def reduce_twice_and_wait_for_it(at: Place) -> None:
    """Gradients that are summed over an axis twice are multiplied by its degree."""
    n = at.wait(Reduce)
    place = at.number(n + 1, len(at.list))
    at.list[place:place] = [at.list[n].transfer, at.list[n]]


@damage("is not waited for, and sums of the same come one after the other|is not waited for")
def sum_over_two_axes_at_once(at: Place) -> None:
    chunks = [i.chunk for i in at.list if isinstance(i, Reduce)]
    n = at.find(Reduce, where=lambda i: chunks.count(i.chunk) > 1)
    first, *others = [i for i in at.list if isinstance(i, Reduce) and i.chunk == at.list[n].chunk]
    at.without(Await(first))
    at.list.insert(at.number(at.position(others[0]) + 1, len(at.list)), Await(first))


@damage("is not on this stage")
def reduce_a_foreign_chunk(at: Place) -> None:
    n = at.sum()
    at.list[n] = replace(at.list[n], chunk=at.foreign_chunk())


@damage("over (cp|pp|dq) there is nothing to do here")
def reduce_over_another_axis(at: Place) -> None:
    n = at.sum()
    at.list[n] = replace(at.list[n], axis=["cp", "pp", "dq"][at.number(0, 2)])


@damage("is not waited for|are not summed")
def do_not_wait_for_a_reduce(at: Place) -> None:
    del at.list[at.wait(Reduce)]


@damage("no REDUCE.* is under way")
def wait_for_a_reduce_twice(at: Place) -> None:
    n = at.wait(Reduce)
    at.list.insert(at.number(n, len(at.list)), at.list[n])


@damage("no REDUCE.* is under way")
def wait_before_the_reduce(at: Place) -> None:
    wait = at.list.pop(at.wait(Reduce))
    at.list.insert(at.number(0, at.summed(wait.transfer)), wait)


@damage("is not waited for|are not summed|still has passes to run")
def take_the_norm_before_the_sums(at: Place) -> None:
    at.list.remove(Norm())
    waits = [n for n, i in enumerate(at.list) if of(Reduce)(i) and i.transfer.chunk is not None]
    at.list.insert(at.number(0, waits[-1]), Norm())


@damage("the gradients of chunk . are not summed over")
def sum_gradients_after_the_norm(at: Place) -> None:
    reduce = at.list[at.sum()]
    at.without(reduce, Await(reduce))
    place = at.number(at.position(Norm()) + 1, len(at.list))
    at.list[place:place] = [reduce, Await(reduce)]


@damage("NORM comes first|there is no NORM before it")
def drop_the_norm(at: Place) -> None:
    at.list.remove(Norm())


@damage("a second NORM")
def take_the_norm_twice(at: Place) -> None:
    at.list.insert(at.number(at.position(Norm()), len(at.list)), Norm())


@damage("NORM comes first")
def sum_the_norm_before_it_is_taken(at: Place) -> None:
    n = at.sum(norm=True)
    reduce = at.list[n]
    at.without(reduce, Await(reduce))
    place = at.number(0, at.position(Norm()))
    at.list[place:place] = [reduce, Await(reduce)]


@damage("the squares of the norm are not summed over (tp|pp|dp)")
def drop_a_sum_of_the_norm(at: Place) -> None:
    reduce = at.list[at.sum(norm=True)]
    at.without(reduce, Await(reduce))


@damage("over (dp|cp|ends) there is nothing to do here", zero=(0,))
def sum_the_norm_over_another_axis(at: Place) -> None:
    n = at.sum(norm=True)
    at.list[n] = replace(at.list[n], axis=["dp", "cp", "ends"][at.number(0, 2)])


@damage("the STEP is missing")
def drop_the_step(at: Place) -> None:
    at.list.remove(Step())


@damage("a second STEP")
def step_twice(at: Place) -> None:
    at.list.insert(at.number(at.position(Step()), len(at.list)), Step())


@damage("there is no NORM before it|the squares of the norm are not summed over")
def step_early(at: Place) -> None:
    at.list.remove(Step())
    last = max(n for n, i in enumerate(at.list) if of(Reduce)(i))
    at.list.insert(at.number(0, last), Step())
