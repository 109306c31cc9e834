"""Damaged schedules: whatever is broken, `validate` finds it and says where and why."""

import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from braid.scheduling.lowering.lower import validation_schedule
from braid.scheduling.lowering.named import SCHEDULES
from braid.scheduling.schedule import (
    Block,
    Direction,
    WaitReceive,
)
from braid.scheduling.schedule_parser import parse, parse_instruction
from braid.scheduling.spec import Placement
from braid.scheduling.validate import validate
from tests.scheduling import damages_of_overlap
from tests.scheduling.cases import layout_for, named_schedule, valid_schedules, with_stage
from tests.scheduling.damages import DAMAGES, PARTS, Place, message_of

assert damages_of_overlap.__doc__, "imported to register its damages"

# -- damages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_list_is_refused(name: str) -> None:
    kind, tried = DAMAGES[name], set()

    @given(data=st.data())
    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
    def find(data: st.DataObject) -> None:
        least = data.draw(st.sampled_from([1, 2]))
        schedule, layout = data.draw(valid_schedules(min_stages=least, max_stages=3, names=kind.names))
        at = Place(data.draw, schedule, layout)
        kind.breaks(at)
        message = message_of(with_stage(schedule, at.stage, at.list), layout)
        found = re.match(r"schedule (\w+), stage (\d+), at (.+?): (.+)\n", message)
        assert found, message
        assert found[1] == schedule.name
        assert re.search(kind.cause, found[4]), message
        # A fault in a message shows on the stage that sends it or on the one that misses it, others at home.
        if "next message" not in kind.cause and "deadlock" not in kind.cause:
            assert int(found[2]) == at.stage, message
        tried.add(message)

    find()
    assert tried


def test_there_are_many_damages() -> None:
    assert len(DAMAGES) >= 60
    assert {name for damage in DAMAGES.values() for name in damage.names} == set(SCHEDULES)


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("SEND(F0.1>1)", "SEND(F0.0>1)", "stage 0, at SEND(F0.0>1): F0.0 takes nothing from this stage"),
        ("SEND(F0.1>1)", "SEND(F0.2>1)", "stage 0, at SEND(F0.2>1): F0.2 takes nothing from this stage"),
        ("SEND(F0.1>1)", "SEND(F0.1>0)", "stage 0, at SEND(F0.1>0): F0.1 runs on stage 1"),
        (
            "F0.2 ",
            "F0.2 SEND(F0.2>0) ",
            "stage 1, at SEND(F0.2>0): F0.2 runs on this stage, there is nothing to send",
        ),
        ("SEND(F0.3>0)", "", "stage 1, at WAIT(SEND F0.3): no send of F0.3 is under way"),
        ("RECV(F0.1<0)", "RECV(F0.1<1)", "stage 1, at RECV(F0.1<1): nothing for F0.1 comes from stage 1"),
        (
            "RECV(F0.1<0)",
            "RECV(F0.1<0) RECV(F0.2<0)",
            "stage 1, at RECV(F0.2<0): nothing for F0.2 comes from stage 0",
        ),
        ("STEP", "F0.0 STEP", "stage 0, at REDUCE(0): chunk 0 still has blocks to run"),
        ("WAIT(REDUCE 0)", "", "stage 0, at STEP: chunks 0 are not reduced"),
        ("B0.0\n", "\n", "stage 0, at the end: B0.0 never run"),
    ],
)
def test_messages(old: str, new: str, fault: str) -> None:
    text = named_schedule("folded", 2, 1, 2).to_text()
    assert old in text
    message = message_of(parse(text.replace(old, new, 1)), layout_for("folded", 2, 2))
    assert message.splitlines()[0] == f"schedule folded, {fault}"


# -- whole schedules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["megatron", "folded"])
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


def test_the_number_of_micro_batches_must_be_right() -> None:
    schedule, layout = named_schedule("megatron", 2, 3, 2), layout_for("megatron", 2, 2)
    message = message_of(replace(schedule, micro_batches=2), layout)
    assert message.splitlines()[0] == (
        "schedule megatron, stage 0, at F2.0: F2.0 does not run on this stage: "
        "it has chunk 0, micro-batches 0 to 1"
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
    schedule, layout = named_schedule("megatron", 1, 1, 2), layout_for("megatron", 1, 2)
    programs = validation_schedule(layout, 1, PARTS).programs
    assert (
        "at B0.0: B0.0 does not run on this stage: it has chunk 0, micro-batches 0 to 0, no backward"
        in message_of(replace(schedule, programs=programs), layout)
    )


def test_gradients_at_once_need_a_schedule_that_trains() -> None:
    schedule, layout = named_schedule("megatron", 1, 1, 2), layout_for("megatron", 1, 2)
    head = {("head", Direction.FORWARD): schedule.programs["head", Direction.FORWARD]}
    only = validation_schedule(layout, 1, PARTS)
    message = message_of(replace(only, programs={**only.programs, **head}), layout)
    assert "program head F: 'compute loss.grad': the graph has no operator 'loss.grad'" in message
    short = {("head", Direction.FORWARD): only.programs["head", Direction.FORWARD]}
    message = message_of(replace(schedule, programs={**schedule.programs, **short}), layout)
    assert "program head F: operators loss.grad, head.wgrad, head.dgrad, head_gather.grad never" in message


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
    message = message_of(with_stage(schedule, 1, instructions), layout)
    assert (
        message
        == """\
schedule megatron, stage 1, at F1.1: its input from stage 0 has not arrived (no RECV and WAIT before it)
  stage 0 | SEND(F0.1>1)    RECV(B0.0<1)       F1.0      SEND(F1.1>1)  WAIT(RECV B0.0)  WAIT(SEND F0.1)    RECV(B1.0<1)
* stage 1 |     F0.1        SEND(F0.2>2)   RECV(B0.1<2)    >>F1.1<<      SEND(F1.2>2)   WAIT(RECV B0.1)  WAIT(SEND F0.2)
  stage 2 | RECV(F0.2<1)  WAIT(RECV F0.2)      F0.2      RECV(F1.2<1)        B0.2         SEND(B0.1>1)   WAIT(RECV F1.2)"""  # noqa: E501
    )


def test_the_message_shows_a_fault_at_the_end() -> None:
    schedule, layout = named_schedule("megatron", 1, 1, 2), layout_for("megatron", 1, 2)
    message = message_of(with_stage(schedule, 0, [*schedule.stages[0][:-1]]), layout)
    assert message.splitlines() == [
        "schedule megatron, stage 0, at the end: the STEP is missing",
        "* stage 0 | B0.0  REDUCE(0)  WAIT(REDUCE 0)  >>end<<",
    ]
