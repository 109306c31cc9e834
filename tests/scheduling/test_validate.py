"""Whole schedules that are refused, and how a message shows the fault."""

import re
from dataclasses import replace

import pytest

from braid.scheduling.generate.lower import validation_schedule
from braid.scheduling.mesh.layout import ParallelLayout, Placement
from braid.scheduling.schedule.operations import (
    Compute,
    Norm,
    Pass,
    PassKind,
    Receive,
    Start,
    Step,
    Wait,
)
from braid.scheduling.schedule.schedule import Block, Prefetch, Program, Schedule, Sides
from braid.scheduling.schedule.text import parse_instruction, parse_sides
from braid.scheduling.schedule.validate import ScheduleError
from tests.scheduling.cases import (
    LLAMA,
    code_of,
    layout_for,
    model_parts,
    named_schedule,
    on_strands,
    with_stage,
)

PARTS = model_parts(tp=2)


def message_of(schedule: Schedule, layout: ParallelLayout) -> str:
    """The message with which a schedule is refused."""
    with pytest.raises(ScheduleError) as error:
        code_of(schedule, layout)
    return str(error.value)


# -- whole schedules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["megatron", "megatron:folded"])
def test_another_layout_is_refused(name: str) -> None:
    schedule, layout = named_schedule(name, 2, 2, 2), layout_for(name, 2, 2)
    for other in (
        replace(layout, pp=1),
        replace(layout, pp=3),
        replace(layout, placement=Placement.LINEAR if layout.folded else Placement.FOLDED),
    ):
        assert re.match(
            rf"schedule {name} has 2 stages and .* chunks, the layout", message_of(schedule, other)
        )
    for stages in (schedule.stages[:1], (*schedule.stages, ()), ()):
        assert "stages and" in message_of(replace(schedule, stages=stages), layout)
    assert "chunks, the layout" in message_of(replace(schedule, chunks=3), layout)


@pytest.mark.parametrize("name", ["megatron", "braid"])
def test_a_schedule_for_other_replicas_is_refused(name: str) -> None:
    """Without their sums every replica would train a model of its own."""
    one, two = layout_for(name, 2, 2), layout_for(name, 2, 2, 2)
    cause = message_of(named_schedule(name, 2, 4, 2), two).splitlines()[0]
    assert re.search(r"at NORM: the gradients of chunk 0 are not summed over dp$", cause)
    cause = message_of(named_schedule(name, 2, 4, 2, dp=2), one).splitlines()[0]
    assert re.search(r"REDUCE\(. dp\)\]?: over dp there is nothing to do here \(but over tp\)$", cause)


def test_the_number_of_micro_batches_must_be_right() -> None:
    schedule, layout = named_schedule("megatron", 2, 3, 2), layout_for("megatron", 2, 2)
    message = message_of(replace(schedule, micro_batches=2), layout)
    assert message.splitlines()[0] == (
        "schedule megatron, stage 0, at F2.0: F2.0 does not run on this stage: "
        "it has chunk 0, micro-batches 0 to 1"
    )
    assert "stage 0, at the end: F3.0, B3.0 never run\n" in message_of(
        replace(schedule, micro_batches=4), layout
    )
    assert "no micro-batches" in message_of(replace(schedule, micro_batches=0), layout)


def test_what_runs_side_by_side_is_on_different_strands() -> None:
    schedule = on_strands(named_schedule("braid", 2, 6, 2), frozenset(range(6)))
    assert "both directions are on strand beta" in message_of(schedule, layout_for("braid", 2, 2))


@pytest.mark.parametrize("token", ["STEP", "NORM", "REDUCE(0 tp)", "WAIT(REDUCE 0 tp)"])
def test_a_schedule_without_backward_passes_updates_nothing(token: str) -> None:
    layout = layout_for("megatron", 2, 2)
    schedule = validation_schedule(layout, LLAMA.kinds, 2, PARTS)
    code_of(schedule, layout)
    damaged = with_stage(schedule, 0, [*schedule.stages[0], parse_instruction(token)])
    assert "nothing to reduce and no step to take" in message_of(damaged, layout)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_validation_gathers_what_ranks_hold_in_shares(zero: int) -> None:
    """And nothing else: the first block of a chunk does, or (ZeRO 3) every one."""
    whole, cut = layout_for("megatron", 2, 2, 2), layout_for("megatron", 2, 2, 2, zero)
    schedule = validation_schedule(cut, LLAMA.kinds, 2, PARTS)
    blocks = [str(i) for i in schedule.stages[0] if isinstance(i, Block)]
    assert schedule.stages[0][0] == Prefetch()
    assert blocks == ["[F0.0|GATHER(0 dp)]", "[F1.0|GATHER(0 dp)]" if zero == 3 else "F1.0"]
    code_of(schedule, cut)
    assert "it stands at the begin, or at the end unless parameters are in shares (ZeRO 3)" in message_of(
        schedule, whole
    )
    without = with_stage(schedule, 0, schedule.stages[0][1:])
    assert "over dp there is nothing to gather (but over no axis)" in message_of(without, whole)
    plain = validation_schedule(whole, LLAMA.kinds, 2, PARTS)
    code_of(plain, whole)
    assert "the parameters of chunk 0 are not gathered" in message_of(plain, cut)


def test_a_single_rank_sums_nothing_and_still_ends_with_its_passes() -> None:
    """No sum stands between the last pass and the norm that could be too early."""
    schedule, layout = named_schedule("megatron", 1, 2), layout_for("megatron", 1)
    assert not [i for i in schedule.stages[0] if isinstance(i, Start | Wait)]
    *passes, last, norm, step = schedule.stages[0]
    assert (norm, step) == (Compute(Norm()), Compute(Step()))
    for order in ([*passes, norm, last, step], [*passes, norm, step, last]):
        with pytest.raises(ScheduleError, match="at NORM: chunk 0 still has passes to run"):
            code_of(with_stage(schedule, 0, order), layout)
    with pytest.raises(ScheduleError, match="at STEP: there is no NORM before it"):
        code_of(with_stage(schedule, 0, [*passes, last, step]), layout)


def test_sends_may_not_count_on_buffers() -> None:
    """Both stages wait for their sends before they ask for what the other one sends."""
    schedule, layout = named_schedule("megatron", 2, 2, 2), layout_for("megatron", 2, 2)
    lists = [
        "F0.0 SEND(F0.1>1) F1.0 SEND(F1.1>1) WAIT(SEND F1.1>1) RECV(B0.0<1)",
        "RECV(F0.1<0) WAIT(RECV F0.1<0) F0.1 B0.1 SEND(B0.0>0) WAIT(SEND B0.0>0) RECV(F1.1<0)",
    ]
    for stage, text in enumerate(lists):
        head = [parse_instruction(token) for token in re.findall(r"WAIT\([^)]*\)|\S+", text)]
        rest = [i for i in schedule.stages[stage] if i not in head]
        schedule = with_stage(schedule, stage, head + rest)
    message = message_of(schedule, layout)
    assert "deadlock: stage 0 waits at WAIT(SEND F1.1>1); stage 1 waits at WAIT(SEND B0.0>0)" in message
    assert "* stage 0" in message


def test_the_message_shows_the_fault_among_its_neighbours() -> None:
    schedule, layout = named_schedule("megatron", 3, 2, 2), layout_for("megatron", 3, 2)
    waits = Wait(Receive(Pass(PassKind.FORWARD, 1, 1), 0))
    instructions = [i for i in schedule.stages[1] if i != waits]
    message = message_of(with_stage(schedule, 1, instructions), layout)
    assert (
        message
        == """\
schedule megatron, stage 1, at F1.1: its input from stage 0 has not arrived (no RECV and WAIT before it)
  stage 0 | SEND(F0.1>1)     RECV(B0.0<1)        F1.0      SEND(F1.1>1)  WAIT(RECV B0.0<1)  WAIT(SEND F0.1>1)     RECV(B1.0<1)
* stage 1 |     F0.1         SEND(F0.2>2)    RECV(B0.1<2)    >>F1.1<<       SEND(F1.2>2)    WAIT(RECV B0.1<2)  WAIT(SEND F0.2>2)
  stage 2 | RECV(F0.2<1)  WAIT(RECV F0.2<1)      F0.2      RECV(F1.2<1)         B0.2           SEND(B0.1>1)    WAIT(RECV F1.2<1)"""  # noqa: E501
    )


# -- programs -----------------------------------------------------------------------------------------------


def with_program(schedule: Schedule, sides: Sides, actions: Program) -> Schedule:
    """The schedule with another program."""
    return replace(schedule, programs={**schedule.programs, sides: actions})


def test_programs_that_nothing_uses_are_refused() -> None:
    plain, full = named_schedule("megatron", 2, 4, 2), named_schedule("dualpipev", 2, 4, 2)
    pair = full.programs[parse_sides("F:layer|B:layer")]
    for schedule, sides, what in (
        (plain, "F:layer|B:layer", "is used by no block"),
        (plain, "I:embedding", "is used by no block"),
        (full, "B:layer|F:layer", "is used by no block"),
        (full, "F:layer|F:layer", "is used by no block"),
        (full, "L:layer", "takes up L:layer, but has no B:layer"),
        (full, "F:layer|L:layer", "takes up L:layer, but has no B:layer"),
        (full, "F:layer|B:layer|L:head", "takes up L:head, but has no B:head"),
        (full, "I:layer|L:layer", "takes up L:layer, but has no B:layer"),
        (full, "F:layer|B:encoder", "is for no part of the model"),
        (full, "W:encoder", "is for no part of the model"),
        (plain, "F:encoder", "is for no part of the model"),
    ):
        message = message_of(
            with_program(schedule, parse_sides(sides), pair), layout_for(schedule.name, 2, 2)
        )
        assert message.partition("; set")[0] == f"schedule {schedule.name}: program {sides} {what}"
