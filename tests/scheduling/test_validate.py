"""Damaged schedules: whatever is broken, `validate` finds it and says where and why.

A damage is a function that breaks a valid schedule at a place that hypothesis chooses. It is written so that
the result is never valid; where a schedule offers no place for it, hypothesis tries another schedule.
"""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from braid.scheduling.lowering.lower import predecessor, successor, validation_schedule
from braid.scheduling.operators import Stream
from braid.scheduling.schedule import (
    Block,
    Compute,
    Direction,
    Instruction,
    Receive,
    Reduce,
    Schedule,
    Send,
    Start,
    Step,
    Strand,
    Wait,
    WaitReceive,
    WaitReduce,
    WaitSend,
    parse_instruction,
)
from braid.scheduling.spec import ParallelLayout
from braid.scheduling.validate import ScheduleError, validate
from tests.scheduling.cases import layout_for, model_parts, named_schedule, valid_schedules, with_stage

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
        self.list = [*schedule.stages[self.stage]]

    def number(self, low: int, high: int) -> int:
        """A number between two, both included."""
        return self._draw(st.integers(low, high))

    def find(self, *kinds: type, where: Callable[[Instruction], bool] = lambda _: True) -> int:
        """The position of some instruction of one of the kinds."""
        found = [n for n, i in enumerate(self.list) if isinstance(i, kinds) and where(i)]
        assume(found)
        return found[self.number(0, len(found) - 1)]

    def position(self, instruction: Instruction) -> int:
        """The position of an instruction that must be there."""
        return self.list.index(instruction)

    def elsewhere(self, stage: int) -> int:
        """Another stage than the one given, possibly one that does not exist."""
        return (stage + self.number(1, self.layout.pp)) % (self.layout.pp + 1)


DAMAGES: dict[str, tuple[Callable[[Place], None], str]] = {}


def damage(cause: str) -> Callable[[Callable[[Place], None]], Callable[[Place], None]]:
    """Register a damage of one stage's list with the cause (a pattern) that the message must give."""

    def register(function: Callable[[Place], None]) -> Callable[[Place], None]:
        DAMAGES[function.__name__] = function, cause
        return function

    return register


NOT_HERE = "has not run|has not arrived|never runs?|takes nothing|no send of|is under way"


# -- blocks ------------------------------------------------------------------------------------------------


@damage(NOT_HERE)
def drop_a_block(at: Place) -> None:
    del at.list[at.find(Block)]


@damage("the block runs twice")
def run_a_block_twice(at: Place) -> None:
    n = at.find(Block)
    at.list.insert(n + 1, at.list[n])


@damage("its forward F.* has not run|its input .* has not|has not run yet, its output")
def swap_a_forward_with_its_backward(at: Place) -> None:
    n = at.find(Block, where=lambda i: i.direction is Direction.FORWARD)
    m = at.position(replace(at.list[n], direction=Direction.BACKWARD))
    at.list[n], at.list[m] = at.list[m], at.list[n]


@damage("its input from stage . has not arrived|its forward F.* has not run")
def swap_blocks_of_two_micro_batches(at: Place) -> None:
    received = {i.block for i in at.list if isinstance(i, Receive)}
    n = at.find(Block, where=lambda i: i in received)
    one = at.list[n]
    m = at.find(
        Block,
        where=lambda i: (i.direction, i.chunk) == (one.direction, one.chunk) and i != one,
    )
    at.list[n], at.list[m] = at.list[m], at.list[n]


@damage("does not run on this stage: it has chunk")
def run_a_block_of_another_chunk(at: Place) -> None:
    n = at.find(Block)
    chunks = [c for c in range(at.layout.chunks + 2) if c not in at.layout.chunks_of(at.stage)]
    at.list[n] = replace(at.list[n], chunk=chunks[at.number(0, len(chunks) - 1)])


@damage("does not run on this stage: .*micro-batches 0 to")
def run_a_micro_batch_that_does_not_exist(at: Place) -> None:
    n = at.find(Block)
    at.list[n] = replace(at.list[n], micro_batch=at.schedule.micro_batches + at.number(0, 3))


@damage("does not run on this stage: .* on strand (alpha|beta)")
def run_a_block_on_the_other_strand(at: Place) -> None:
    n = at.find(Block)
    other = {Strand.ALPHA: Strand.BETA, Strand.BETA: Strand.ALPHA}
    at.list[n] = replace(at.list[n], strand=other[at.list[n].strand])


@damage("still has blocks to run")
def run_a_block_after_the_step(at: Place) -> None:
    last = max(n for n, i in enumerate(at.list) if isinstance(i, Block))
    block = at.list.pop(last)
    about = successor(block, at.layout)
    at.list = [i for i in at.list if not (isinstance(i, Send | WaitSend) and i.block == about)]
    at.list.append(block)


# -- messages ----------------------------------------------------------------------------------------------


@damage("is never sent|no send of .* is under way")
def drop_a_send(at: Place) -> None:
    del at.list[at.find(Send)]


@damage("the same output is sent twice")
def send_twice(at: Place) -> None:
    n = at.find(Send)
    at.list.insert(n + at.number(0, 1), at.list[n])


@damage("runs on stage ., not on another stage")
def send_to_the_wrong_stage(at: Place) -> None:
    n = at.find(Send)
    at.list[n] = replace(at.list[n], stage=at.elsewhere(at.list[n].stage))


@damage("has not run yet, its output cannot be sent")
def send_before_the_block(at: Place) -> None:
    n = at.find(Send)
    send = at.list.pop(n)
    at.list.insert(at.number(0, at.position(predecessor(send.block, at.layout))), send)


@damage("takes nothing from this stage|has not run yet")
def send_for_another_block(at: Place) -> None:
    n = at.find(Send)
    block = at.list[n].block
    shifted = replace(block, chunk=block.chunk + at.number(1, 3))
    at.list[n] = replace(at.list[n], block=shifted)
    assume(predecessor(shifted, at.layout) not in at.list[:n])


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
    block = at.list[n].block
    chunks = [c for c in range(at.layout.chunks + 1) if c not in at.layout.chunks_of(at.stage)]
    at.list[n] = replace(at.list[n], block=replace(block, chunk=chunks[at.number(0, len(chunks) - 1)]))


@damage("the next message that stage . sends is for|no receive of .* is under way")
def swap_two_receives(at: Place) -> None:
    n = at.find(Receive)
    one = at.list[n]
    m = at.find(
        Receive,
        where=lambda i: (i.stage, i.block.direction) == (one.stage, one.block.direction) and i != one,
    )
    at.list[n], at.list[m] = at.list[m], at.list[n]


@damage("the next message that stage . sends is for")
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
    at.list.insert(
        at.number(
            0, at.list.index(next(i for i in at.list if isinstance(i, Receive) and i.block == wait.block))
        ),
        wait,
    )


@damage("its input from stage . has not arrived")
def wait_for_a_receive_after_its_block(at: Place) -> None:
    n = at.find(WaitReceive)
    wait = at.list.pop(n)
    at.list.insert(at.number(at.position(wait.block) + 1, len(at.list)), wait)


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
    sends = [m for m, i in enumerate(at.list) if isinstance(i, Send) and i.block == wait.block]
    at.list.insert(at.number(0, sends[0]), wait)


@damage("no (send|receive) of .* is under way")
def wait_for_a_message_that_does_not_exist(at: Place) -> None:
    n = at.find(WaitSend, WaitReceive)
    block = at.list[n].block
    at.list[n] = replace(at.list[n], block=replace(block, micro_batch=block.micro_batch + 100))


@damage("deadlock: .*stage . waits at")
def wait_in_a_circle(at: Place) -> None:
    """Wait for a micro-batch's gradient before its activation is sent on: the gradient depends on it."""
    received = {i.block for i in at.list if isinstance(i, Receive)}
    n = at.find(
        Receive,
        where=lambda i: (
            i.block.direction is Direction.BACKWARD
            and i.block.chunk < at.layout.pp
            and at.layout.stage_of(i.block.chunk + 1) != at.stage
        ),
    )
    block = at.list[n].block
    first = next(
        i.block
        for i in at.list
        if isinstance(i, Receive) and (i.stage, i.block.direction) == (at.list[n].stage, block.direction)
    )
    assume(first == block and block in received)
    receive, wait = at.list[n], WaitReceive(block)
    at.list = [i for i in at.list if i not in (receive, wait)]
    forward = replace(block, direction=Direction.FORWARD)
    sends = Send(replace(forward, chunk=block.chunk + 1), at.layout.stage_of(block.chunk + 1))
    place = at.number(0, at.position(sends))
    at.list[place:place] = [receive, wait]


# -- the update --------------------------------------------------------------------------------------------


@damage("still has blocks to run")
def reduce_before_the_last_block(at: Place) -> None:
    reduce = at.list.pop(at.find(Reduce))
    last = max(n for n, i in enumerate(at.list) if isinstance(i, Block) and i.chunk == reduce.chunk)
    at.list.insert(at.number(0, last), reduce)


@damage("no reduction of chunk . is under way")
def drop_a_reduce(at: Place) -> None:
    del at.list[at.find(Reduce)]


@damage("is reduced twice")
def reduce_twice(at: Place) -> None:
    n = at.find(Reduce)
    at.list.insert(at.number(n, len(at.list)), at.list[n])


@damage("is not on this stage")
def reduce_a_foreign_chunk(at: Place) -> None:
    n = at.find(Reduce)
    chunks = [c for c in range(at.layout.chunks + 1) if c not in at.layout.chunks_of(at.stage)]
    at.list[n] = Reduce(chunks[at.number(0, len(chunks) - 1)])


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


@damage("a second STEP|are not reduced")
def step_twice(at: Place) -> None:
    at.list.insert(at.number(0, len(at.list)), Step())


@damage("chunks .* are not reduced")
def step_early(at: Place) -> None:
    at.list.remove(Step())
    last = max(n for n, i in enumerate(at.list) if isinstance(i, WaitReduce))
    at.list.insert(at.number(0, last), Step())


@pytest.mark.parametrize("name", DAMAGES)
@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_a_damaged_list_is_refused(name: str, data: st.DataObject) -> None:
    function, cause = DAMAGES[name]
    schedule, layout = data.draw(valid_schedules(min_stages=data.draw(st.sampled_from([1, 2]))))
    at = Place(data.draw, schedule, layout)
    function(at)
    message = message_of(with_stage(schedule, at.stage, at.list), layout)
    found = re.match(r"schedule (\w+), stage (\d+), at (.+?): (.+)\n", message)
    assert found, message
    assert re.search(cause, found[4]), message
    # A fault in a message shows on the stage that sends it or on the one that misses it, others at home.
    if "next message" not in cause and "deadlock" not in cause:
        assert int(found[2]) == at.stage, message


# -- programs ----------------------------------------------------------------------------------------------

PROGRAM_DAMAGES: dict[str, tuple[Callable[[list, Callable[[int, int], int]], None], str]] = {}
Choose = Callable[[int, int], int]


def program_damage(cause: str) -> Callable:
    """Register a damage of an operator program."""

    def register(function: Callable) -> Callable:
        PROGRAM_DAMAGES[function.__name__] = function, cause
        return function

    return register


def some(program: list, choose: Choose, *kinds: type) -> int:
    """The position of some action of one of the kinds."""
    found = [n for n, action in enumerate(program) if isinstance(action, kinds)]
    assume(found)
    return found[choose(0, len(found) - 1)]


@program_damage("is read before it is there|never finish|is not started")
def drop_an_action(program: list, choose: Choose) -> None:
    del program[choose(0, len(program) - 1)]


@program_damage("is (done|started) already")
def repeat_an_action(program: list, choose: Choose) -> None:
    n = choose(0, len(program) - 1)
    program.insert(choose(n, len(program)), program[n])


@program_damage("the graph has no operator 'nothing'")
def run_an_unknown_operator(program: list, choose: Choose) -> None:
    n = choose(0, len(program) - 1)
    program.insert(n, replace(program[n], operator="nothing"))


@program_damage("runs on intra")
def use_another_stream(program: list, choose: Choose) -> None:
    n = some(program, choose, Start)
    program[n] = Start(program[n].operator, [Stream.INTER, Stream.COMPUTE][choose(0, 1)])


@program_damage("is not started")
def wait_before_the_start(program: list, choose: Choose) -> None:
    n = some(program, choose, Wait)
    wait = program.pop(n)
    program.insert(choose(0, n - 1), wait)


@program_damage("is read before it is there|never finish")
def do_not_wait(program: list, choose: Choose) -> None:
    del program[some(program, choose, Wait)]


@program_damage("is a collective")
def compute_a_collective(program: list, choose: Choose) -> None:
    n = some(program, choose, Start)
    program[n : n + 2] = [Compute(program[n].operator)]


@program_damage("is not a collective")
def start_a_compute_operator(program: list, choose: Choose) -> None:
    n = some(program, choose, Compute)
    program[n : n + 1] = [Start(program[n].operator, Stream.COMPUTE), Wait(program[n].operator)]


@program_damage("is not a collective")
def wait_for_a_compute_operator(program: list, choose: Choose) -> None:
    n = some(program, choose, Compute)
    program.insert(choose(n, len(program)), Wait(program[n].operator))


@program_damage("is read before it is there")
def read_before_it_is_written(program: list, choose: Choose) -> None:
    """Move what makes a value behind the first action that reads it."""
    n = some(program, choose, Compute)
    part = next(p for p in PARTS.values() for g in (p.forward, p.backward) if _has(g, program[n].operator))
    graph = part.forward if _has(part.forward, program[n].operator) else part.backward
    written = set(graph.named(program[n].operator).writes)
    readers = [
        m
        for m, a in enumerate(program)
        if not isinstance(a, Wait) and written & set(graph.named(a.operator).reads)
    ]
    assume(readers)
    program.insert(choose(readers[0], len(program) - 1), program.pop(n))


def _has(graph, name: str) -> bool:
    return any(op.name == name for op in graph.operators)


@pytest.mark.parametrize("name", PROGRAM_DAMAGES)
@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_a_damaged_program_is_refused(name: str, data: st.DataObject) -> None:
    function, cause = PROGRAM_DAMAGES[name]
    schedule = named_schedule("folded", 2, 2, 2)
    key = data.draw(st.sampled_from(sorted(schedule.programs)))
    program = [*schedule.programs[key]]
    function(program, lambda low, high: data.draw(st.integers(low, high)))
    damaged = replace(schedule, programs={**schedule.programs, key: tuple(program)})
    message = message_of(damaged, layout_for("folded", 2, 2))
    assert message.startswith(f"schedule folded, program {key[0]} {key[1].value}: ")
    assert re.search(cause, message), message


@pytest.mark.parametrize("key", sorted(named_schedule("megatron", 2, 2, 2).programs))
def test_a_missing_program_is_refused(key: tuple[str, Direction]) -> None:
    schedule = named_schedule("megatron", 2, 2, 2)
    programs = {k: program for k, program in schedule.programs.items() if k != key}
    message = message_of(replace(schedule, programs=programs), layout_for("megatron", 2, 2))
    assert message == f"schedule megatron: program {key[0]} {key[1].value} is missing"


def test_a_program_for_no_part_is_refused() -> None:
    schedule = named_schedule("megatron", 2, 2, 2)
    programs = {**schedule.programs, ("encoder", Direction.FORWARD): (Compute("norm"),)}
    message = message_of(replace(schedule, programs=programs), layout_for("megatron", 2, 2))
    assert message == "schedule megatron: program encoder F is for no part of the model"


# -- whole schedules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["megatron", "folded"])
def test_another_layout_is_refused(name: str) -> None:
    schedule, layout = named_schedule(name, 2, 2, 2), layout_for(name, 2, 2)
    for other in (replace(layout, pp=1), replace(layout, pp=3), replace(layout, folded=not layout.folded)):
        assert re.match(
            rf"schedule {name} has 2 stages and .* chunks, the layout", message_of(schedule, other)
        )
    for stages in (schedule.stages[:1], (*schedule.stages, ()), ()):
        assert "stages and" in message_of(replace(schedule, stages=stages), layout)
    assert "chunks, the layout" in message_of(replace(schedule, chunks=3), layout)


def test_the_number_of_micro_batches_must_be_right() -> None:
    schedule, layout = named_schedule("megatron", 2, 3, 2), layout_for("megatron", 2, 2)
    assert "stage 0, at F2.0: F2.0 does not run on this stage" in message_of(
        replace(schedule, micro_batches=2), layout
    )
    assert "stage 0, at the end: F3.0, B3.0 never run" in message_of(
        replace(schedule, micro_batches=4), layout
    )
    assert "no micro-batches" in message_of(replace(schedule, micro_batches=0), layout)


@pytest.mark.parametrize("token", ["STEP", "REDUCE(0)", "WAIT(REDUCE 0)"])
def test_a_schedule_without_backward_passes_updates_nothing(token: str) -> None:
    layout = layout_for("megatron", 2, 2)
    schedule = validation_schedule(layout, 2, PARTS)
    validate(schedule, layout, PARTS)
    damaged = with_stage(schedule, 0, [*schedule.stages[0], parse_instruction(token)])
    assert "nothing to reduce and no step to take" in message_of(damaged, layout)


def test_backward_passes_need_programs() -> None:
    schedule = named_schedule("megatron", 1, 1, 2)
    programs = {key: p for key, p in schedule.programs.items() if key[1] is Direction.FORWARD}
    message = message_of(replace(schedule, programs=programs), layout_for("megatron", 1, 2))
    assert (
        "at B0.0: B0.0 does not run on this stage: it has chunk 0, micro-batches 0 to 0, no backward"
        in message
    )


def test_sends_may_not_count_on_buffers() -> None:
    """Both stages wait for their sends before they ask for what the other one sends."""
    schedule, layout = named_schedule("megatron", 2, 2, 2), layout_for("megatron", 2, 2)
    lists = [
        "F0.0 SEND(F0.1>1) F1.0 SEND(F1.1>1) WAIT(SEND F1.1) RECV(B0.0<1)",
        "RECV(F0.1<0) WAIT(RECV F0.1) F0.1 B0.1 SEND(B0.0>0) WAIT(SEND B0.0) RECV(F1.1<0)",
    ]
    for stage, text in enumerate(lists):
        head = [parse_instruction(token) for token in re.findall(r"WAIT\([^)]*\)|\S+", text)]
        rest = [i for i in schedule.stages[stage] if i not in head]
        schedule = with_stage(schedule, stage, head + rest)
    message = message_of(schedule, layout)
    assert "deadlock: stage 0 waits at WAIT(SEND F1.1); stage 1 waits at WAIT(SEND B0.0)" in message
    assert "* stage 0" in message


def test_the_message_shows_the_fault_among_its_neighbours() -> None:
    schedule, layout = named_schedule("megatron", 3, 2, 2), layout_for("megatron", 3, 2)
    instructions = [i for i in schedule.stages[1] if i != WaitReceive(Block(Direction.FORWARD, 1, 1))]
    assert message_of(with_stage(schedule, 1, instructions), layout).splitlines() == [
        "schedule megatron, stage 1, at F1.1: its input from stage 0 has not arrived (no RECV and WAIT before it)",
        "  stage 0 |     F0.0       SEND(F0.1>1)        F1.0           SEND(F1.1>1)    RECV(B0.0<1)   WAIT(RECV B0.0)         B0.0",
    ]


def test_text_of_a_fault_at_the_end() -> None:
    schedule, layout = named_schedule("megatron", 1, 1, 2), layout_for("megatron", 1, 2)
    message = message_of(with_stage(schedule, 0, [*schedule.stages[0][:-1]]), layout)
    assert message.splitlines() == [
        "schedule megatron, stage 0, at the end: the STEP is missing",
        "* stage 0 | B0.0  REDUCE(0)  WAIT(REDUCE 0)  >>end<<",
    ]
