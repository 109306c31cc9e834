"""Damaged schedules: whatever is broken, validation finds it and says where and why."""

import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from braid.scheduling.lowering.lower import validation_schedule
from braid.scheduling.schedule import (
    Await,
    Block,
    Norm,
    Pass,
    PassKind,
    Prefetch,
    Receive,
    Reduce,
    Side,
    Step,
)
from braid.scheduling.schedule_text import parse, parse_instruction, write
from braid.scheduling.spec import Placement
from braid.scheduling.validate import ScheduleError
from tests.scheduling import damages_of_overlap
from tests.scheduling.cases import (
    LLAMA,
    LOWERED,
    PAIRED,
    code_of,
    layout_for,
    named_schedule,
    on_strands,
    valid_schedules,
    with_stage,
)
from tests.scheduling.damages import DAMAGES, PARTS, Place, message_of

assert damages_of_overlap.__doc__, "imported to register its damages"

# -- damages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.slow
def test_a_damaged_list_is_refused(name: str) -> None:
    kind, tried = DAMAGES[name], set()

    @given(data=st.data())
    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
    def find(data: st.DataObject) -> None:
        least = data.draw(st.sampled_from([1, 2]))
        zero = data.draw(st.sampled_from(kind.zero))
        schedule, layout = data.draw(
            valid_schedules(min_stages=least, max_stages=3, names=kind.names, zero=zero, ends=kind.ends)
        )
        at = Place(data.draw, schedule, layout)
        message = message_of(with_stage(schedule, at.stage, kind.list_of(at)), layout)
        assume("is used by no block" not in message)  # what was damaged was the only one of its kind
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
    assert len(DAMAGES) >= 85
    assert {name for damage in DAMAGES.values() for name in damage.names} == set(LOWERED)


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
        ("SEND(F0.3>0)", "", "stage 1, at WAIT(SEND F0.3>0): SEND(F0.3>0) is not started"),
        ("RECV(F0.1<0)", "RECV(F0.1<1)", "stage 1, at RECV(F0.1<1): nothing for F0.1 comes from stage 1"),
        (
            "RECV(F0.1<0)",
            "RECV(F0.1<0) RECV(F0.2<0)",
            "stage 1, at RECV(F0.2<0): nothing for F0.2 comes from stage 0",
        ),
        ("WAIT(RECV F0.1<0) F0.1", "F0.1", "stage 1, at F0.1: its input from stage 0 has not arrived"),
        ("F0.1\n", "F0.2\n", "stage 1, at the end: F0.1 never runs"),
        ("STEP", "F0.0 STEP", "stage 0, at F0.0: F0.0 runs twice (embedding has run)"),
        ("WAIT(REDUCE 0 tp)", "", "stage 0, at NORM: REDUCE(0 tp) is not waited for"),
        ("REDUCE(0 tp) ", "", "stage 0, at WAIT(REDUCE 0 tp): no REDUCE(0 tp) is under way"),
        ("  NORM\n", "", "stage 0, at REDUCE(norm tp): the squares are not there yet: NORM comes first"),
        (
            "  WAIT(REDUCE norm pp)\n  STEP",
            "  STEP\n  WAIT(REDUCE norm pp)\n",
            "stage 0, at STEP: the squares of the norm are not summed over pp",
        ),
        ("B0.0\n", "\n", "stage 0, at the end: B0.0 never runs"),
    ],
)
def test_messages(old: str, new: str, fault: str) -> None:
    text = write(named_schedule("megatron:folded", 2, 1, 2))
    assert old in text
    message = message_of(parse(text.replace(old, new, 1)), layout_for("megatron:folded", 2, 2))
    assert message.splitlines()[0].startswith(f"schedule megatron:folded, {fault}")


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        (
            "[F2.3b|B0.0|L1.3]",
            "[F2.3b|B0.0|L2.3b]",
            "at [F2.3b|B0.0|L2.3b]: no block before it has left an end of B2.3b for L2.3b",
        ),
        (
            "[F3.3b|B1.0|L2.3b]",
            "[F3.3b|B1.0|L1.3]",
            "at [F3.3b|B1.0|L1.3]: no block before it has left an end of B1.3 for L1.3",
        ),
        ("[F2.3b|B0.0|L1.3]", "[F2.3b|B0.0|L0.0]", "at [F2.3b|B0.0|L0.0]: a block has a pass twice"),
        ("[F2.3b|B0.0|L1.3]", "L1.3 [F2.3b|B0.0]", "at L1.3: an end has nothing to run beside"),
        ("[F3.0b|B1.3]", "[B1.3|F3.0b]", "at [B1.3|F3.0b]: no program is for B beside F"),
    ],
)
def test_messages_of_paired_blocks(old: str, new: str, fault: str) -> None:
    text = write(named_schedule("braid", 2, 6, 2, ends=True))
    assert old in text
    message = message_of(parse(text.replace(old, new, 1)), layout_for("braid", 2, 2))
    assert message.splitlines()[0] == f"schedule braid, stage 0, {fault}"


@pytest.mark.parametrize("ends", [False, True])
def test_an_end_that_is_not_named_runs_where_it_is_left(ends: bool) -> None:
    """Named in a later block, it runs there; both are safe."""
    text, layout = write(named_schedule("braid", 2, 6, 2, ends=True)), layout_for("braid", 2, 2)
    assert "[F2.3b|B0.0|L1.3]" in text
    code_of(parse(text.replace("|L1.3]", "]")), layout)
    later = text.replace("|L1.3]", "]").replace("[F3.3b|B1.0|L2.3b]", "[F3.3b|B1.0|L2.3b|L1.3]")
    code_of(parse(later if ends else text), layout)


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


@pytest.mark.parametrize("name", PAIRED)
def test_what_runs_side_by_side_is_on_different_strands(name: str) -> None:
    stages, m = (1, 6) if name == "braid:twins" else (2, 6)
    schedule = on_strands(named_schedule(name, stages, m, 2), frozenset(range(6)))
    assert "both directions are on strand beta" in message_of(schedule, layout_for(name, stages, 2))


@pytest.mark.parametrize("token", ["STEP", "NORM", "REDUCE(0 tp)", "WAIT(REDUCE 0 tp)"])
def test_a_schedule_without_backward_passes_updates_nothing(token: str) -> None:
    layout = layout_for("megatron", 2, 2)
    schedule = validation_schedule(LLAMA, layout, 2, PARTS)
    code_of(schedule, layout)
    damaged = with_stage(schedule, 0, [*schedule.stages[0], parse_instruction(token)])
    assert "nothing to reduce and no step to take" in message_of(damaged, layout)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_validation_gathers_what_ranks_hold_in_shares(zero: int) -> None:
    """And nothing else: the first block of a chunk does, or (ZeRO 3) every one."""
    whole, cut = layout_for("megatron", 2, 2, 2), layout_for("megatron", 2, 2, 2, zero)
    schedule = validation_schedule(LLAMA, cut, 2, PARTS)
    blocks = [str(i) for i in schedule.stages[0] if isinstance(i, Block)]
    assert schedule.stages[0][0] == Prefetch()
    assert blocks == ["[F0.0|GATHER(0 dp)]", "[F1.0|GATHER(0 dp)]" if zero == 3 else "F1.0"]
    code_of(schedule, cut)
    assert "it stands at the begin, or at the end unless parameters are in shares (ZeRO 3)" in message_of(
        schedule, whole
    )
    without = with_stage(schedule, 0, schedule.stages[0][1:])
    assert "over dp there is nothing to gather (but over no axis)" in message_of(without, whole)
    plain = validation_schedule(LLAMA, whole, 2, PARTS)
    code_of(plain, whole)
    assert "the parameters of chunk 0 are not gathered" in message_of(plain, cut)


def test_a_single_rank_sums_nothing_and_still_ends_with_its_passes() -> None:
    """No sum stands between the last pass and the norm that could be too early."""
    schedule, layout = named_schedule("megatron", 1, 2), layout_for("megatron", 1)
    assert not [i for i in schedule.stages[0] if isinstance(i, Reduce | Await)]
    *passes, last, norm, step = schedule.stages[0]
    assert (norm, step) == (Norm(), Step())
    for order in ([*passes, norm, last, step], [*passes, norm, step, last]):
        with pytest.raises(ScheduleError, match="at NORM: chunk 0 still has passes to run"):
            code_of(with_stage(schedule, 0, order), layout)
    with pytest.raises(ScheduleError, match="at STEP: there is no NORM before it"):
        code_of(with_stage(schedule, 0, [*passes, last, step]), layout)


def test_backward_passes_need_programs() -> None:
    schedule, layout = named_schedule("megatron", 1, 1, 2), layout_for("megatron", 1, 2)
    programs = validation_schedule(LLAMA, layout, 1, PARTS).programs
    message = message_of(replace(schedule, programs=programs), layout)
    assert "at B0.0: the schedule has no backward passes" in message


def test_gradients_at_once_need_a_schedule_that_trains() -> None:
    schedule, layout = named_schedule("megatron", 1, 1, 2), layout_for("megatron", 1, 2)
    head = (Side(PassKind.FORWARD, "head"),)
    only = validation_schedule(LLAMA, layout, 1, PARTS)
    message = message_of(replace(only, programs={**only.programs, head: schedule.programs[head]}), layout)
    assert "at F0.0: program F:head: the graph has no operator 'loss.grad'" in message
    programs = {**schedule.programs, head: only.programs[head]}
    message = message_of(replace(schedule, programs=programs), layout)
    assert "at B0.0: final_norm.grad of its forward pass has not run" in message


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
    waits = Await(Receive(Pass(PassKind.FORWARD, 1, 1), 0))
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


def test_the_message_shows_a_fault_at_the_end() -> None:
    schedule, layout = named_schedule("megatron", 1, 1, 2), layout_for("megatron", 1, 2)
    message = message_of(with_stage(schedule, 0, [*schedule.stages[0][:-1]]), layout)
    assert message.splitlines() == [
        "schedule megatron, stage 0, at the end: the STEP is missing",
        "* stage 0 | NORM  REDUCE(norm tp)  WAIT(REDUCE norm tp)  >>end<<",
    ]
