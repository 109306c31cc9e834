"""The text form of schedules: what it looks like, that it round-trips, and what the parser refuses."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.schedule.operations import (
    Barrier,
    Compute,
    Gather,
    Message,
    Norm,
    Operation,
    Pass,
    PassKind,
    Receive,
    Reduce,
    Send,
    Start,
    Step,
    Strand,
    Wait,
)
from braid.scheduling.schedule.schedule import (
    Block,
    Instruction,
    Prefetch,
    Program,
    Schedule,
    Side,
    Sides,
)
from braid.scheduling.schedule.text import (
    parse,
    write,
)
from tests.scheduling.cases import valid_schedules
from tests.scheduling.partition_cases import PARTITIONS

NUMBERS = st.integers(0, 10_000)
WORDS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.@~-]{0,12}", fullmatch=True)
AXES = st.sampled_from(["tp", "tp_beyond_2", "dp", "pp", "ends", "copies", "edp"])
PASSES = st.builds(Pass, st.sampled_from(PassKind), NUMBERS, NUMBERS, st.sampled_from(Strand))
TRANSFERS: st.SearchStrategy[Message | Reduce] = st.one_of(
    st.builds(Send, PASSES, NUMBERS),
    st.builds(Receive, PASSES, NUMBERS),
    st.builds(Reduce, st.one_of(st.none(), NUMBERS), AXES),
)
SUMS = st.lists(st.builds(Reduce, NUMBERS, AXES), max_size=3).map(tuple)
GATHERS = st.lists(st.builds(Gather, NUMBERS, AXES), max_size=3).map(tuple)
INSTRUCTIONS: st.SearchStrategy[Instruction] = st.one_of(
    st.builds(Block, st.lists(PASSES, min_size=1, max_size=4).map(tuple), SUMS, GATHERS),
    st.builds(Start, TRANSFERS),
    st.builds(Wait, TRANSFERS),
    st.just(Prefetch()),
    st.just(Compute(Norm())),
    st.just(Compute(Step())),
)
SIDES: st.SearchStrategy[Sides] = st.lists(
    st.builds(Side, st.sampled_from(PassKind), WORDS), min_size=1, max_size=4
).map(tuple)


def operations(count: int) -> st.SearchStrategy[Operation]:
    """An operation of a program of so many passes."""
    turns = st.integers(0, count - 1)
    found: list[st.SearchStrategy[Operation]] = [
        st.builds(Compute, WORDS, turn=turns),
        st.builds(Start, WORDS, st.sampled_from(Stream), turn=turns),
        st.builds(Wait, WORDS, turn=turns),
    ]
    return st.one_of(found + [st.just(Barrier())] * (count > 1))


@st.composite
def programs(draw: st.DrawFn) -> dict[Sides, Program]:
    """Programs of any passes."""
    keys = draw(st.lists(SIDES, max_size=4, unique=True))
    return {sides: tuple(draw(st.lists(operations(len(sides)), max_size=8))) for sides in keys}


SCHEDULES = st.builds(
    Schedule,
    name=WORDS,
    chunks=NUMBERS,
    micro_batches=NUMBERS,
    stages=st.lists(st.lists(INSTRUCTIONS, max_size=30).map(tuple), max_size=4).map(tuple),
    programs=programs(),
    unit_layers=st.integers(0, 8),
    partitions=st.lists(PARTITIONS, max_size=3, unique_by=lambda one: one.what).map(tuple),
    prefetch=st.integers(0, 64),
    keep=st.integers(0, 64),
)

SMALL = """\
braid schedule 6
name small
stages 2
chunks 2
micro_batches 1
unit 0

stage 0
  F0.0 SEND(F0.1>1)
  RECV(B0.0<1) WAIT(RECV B0.0<1) B0.0
  WAIT(SEND F0.1>1)
  REDUCE(0 dp)
  WAIT(REDUCE 0 dp)
  NORM
  REDUCE(norm pp)
  WAIT(REDUCE norm pp)
  STEP

stage 1
  RECV(F0.1<0) WAIT(RECV F0.1<0) F0.1b
  B0.1 SEND(B0.0>0)

program F:layer
  compute norm
  start gather on intra
  wait gather

program B:layer
  compute norm.grad
"""


# -- round trip --------------------------------------------------------------------------------------------


@given(SCHEDULES)
@settings(max_examples=100, deadline=None)
def test_any_schedule_round_trips(schedule: Schedule) -> None:
    text = write(schedule)
    assert parse(text) == schedule
    assert write(parse(text)) == text


@given(valid_schedules(), st.data())
@settings(max_examples=30, deadline=None)
def test_comments_and_white_space_do_not_matter(case: tuple[Schedule, object], data: st.DataObject) -> None:
    schedule = case[0]
    lines = []
    for line in write(schedule).splitlines():
        indent, gap = data.draw(st.sampled_from(["", " ", "\t"])), data.draw(st.sampled_from(["", "\n"]))
        comment = data.draw(st.sampled_from(["", "  # F9.9 program x", "\t#"]))
        lines.append(f"{gap}{indent}{line.strip()}{comment}")
    assert parse("\r\n".join(lines)) == schedule


# -- what is refused, with a line that says where and why -------------------------------------------------


def refused(text: str) -> str:
    """The message with which the parser refuses a text; one line."""
    with pytest.raises(ValueError) as error:
        parse(text)
    message = str(error.value)
    assert "\n" not in message
    return message


NO_PASS = "is not a pass (F3.1, B3.1, I3.1, W3.1, L3.1, with b for strand beta)"
NO_INSTRUCTION = "is not an instruction (F3.1, [F5.0b|B1.1], SEND(F3.2>1), REDUCE(1 dp), ...)"
NO_STAGE = "names no stage (SEND(F3.2>1), RECV(F3.2<0))"
NO_AXIS = "names no chunk and axis (REDUCE(1 dp), REDUCE(norm tp))"
NO_TRANSFER = "waits for no transfer (WAIT(SEND F3.2>1), WAIT(REDUCE 1 dp), ...)"
NO_INSTRUCTIONS = """
F0.3junk 0F3 F03.1 F3.01 F3 F.1 f3.1 F3.1B F3.1bb F-1.0 F1_0.0 F٣.0 X3.1 []x NORMS norm compute prefetch
SEND(F3.1>1)x [F3.1|B2.1 GATHER(norm) PREFETCH(1)
"""
BEHIND = (
    "behind the passes stand gathers of parameters and then sums of gradients "
    "([B3.1|GATHER(1 dp)|REDUCE(1 dp)])"
)
MISPLACED = """
[REDUCE(0 dp)|B2.0] [GATHER(0 dp)|B2.0] [B2.0|REDUCE(norm tp)] [B2.0|REDUCE(0 dp)|GATHER(0 dp)]
[B2.0|REDUCE(0 dp)|WAIT(GATHER 0 dp)] [B2.0|REDUCE(0 dp)|B3.0] [B2.0|REDUCE(0)] [B2.0|GATHER(0 DP)]
"""
NO_TRANSFERS = ("GATHER 1 dp", "F0.1", "SENDF0.1>1")


@pytest.mark.parametrize(
    ("token", "cause"),
    [
        *[(token, f"{token!r} {NO_INSTRUCTION}") for token in NO_INSTRUCTIONS.split()],
        ("F0.1WAIT(SEND F0.1>1)", f"'F0.1WAIT(SEND F0.1>1)' {NO_INSTRUCTION}"),
        *((block, f"{block!r}: {BEHIND}") for block in re.findall(r"\[.*?\]", MISPLACED)),
        ("[F3.1]", "'[F3.1]' holds one pass; write it without brackets"),
        ("[B2.0|WAIT(REDUCE 0 dp)]", f"'WAIT(REDUCE 0 dp)' {NO_PASS}"),
        ("[F3.1|B2.1|]", f"'' {NO_PASS}"),
        ("[F3.1,B2.1]", f"'F3.1,B2.1' {NO_PASS}"),
        *[(token, f"{token!r} {NO_STAGE}") for token in ("SEND(F3.1)", "RECV(F3.1>1)", "SEND(F3.1>01)")],
        ("SEND(F3.1>1", f"'SEND(F3.1>1 SEND(F0.1>1)' {NO_STAGE}"),
        ("SEND(3.1>1)", f"'3.1' {NO_PASS}"),
        *[(f"REDUCE({what})", f"'REDUCE({what})' {NO_AXIS}") for what in ("", "1", "01 dp", "1 DP")],
        *[(f"WAIT({what})", f"'WAIT({what})' {NO_TRANSFER}") for what in NO_TRANSFERS],
    ],
)
def test_tokens_that_are_no_instruction(token: str, cause: str) -> None:
    assert refused(SMALL.replace("F0.0 SEND", f"F0.0 {token} SEND")) == f"schedule, line 9: {cause}"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name small", "name two words", "line 2: expected 'name' and one word, found 'name two words'"),
        ("stages 2", "stages two", "line 3: expected 'stages' and a number, found 'stages two'"),
        ("chunks 2", "chunks ٢", "line 4: expected 'chunks' and a number, found 'chunks ٢'"),
        ("micro_batches 1", "micro_batches 1 2", "line 5: expected 'micro_batches' and a number, found"),
        ("unit 0", "unit 0\nkeep 2\nprefetch 2", "line 8: expected 'stage 0', found 'prefetch 2'"),
        ("unit 0", "unit 0\nkeep 0", "line 7: expected 'keep' and a number above 0, found 'keep 0'"),
        ("unit 0", "fused 4", "line 6: expected 'unit' and a number, found 'fused 4'"),
        ("unit 0", "unit 0\nunit 0", "line 7: expected 'stage 0', found 'unit 0'"),
        ("stages 2", "stages 1", "line 3: the header says 1 stages, 2 follow"),
        ("stage 0\n", "", "line 8: expected 'stage 0', found 'F0.0 SEND(F0.1>1)'"),
        ("stage 1", "stage 2", "line 19: expected 'stage 1', found 'stage 2'"),
        ("program B:layer", "program F:layer", "line 28: program F:layer stands twice"),
        (
            "program B:layer",
            "program f:layer",
            "line 28: 'f:layer' does not say what the program is for (F:l",
        ),
        ("program B:layer", "program F:|B:x", "line 28: 'F:|B:x' does not say what the program is for (F"),
        ("program B:layer", "program", "line 28: expected 'program' and what it is for, found 'program'"),
        ("program F:layer", "program F:layer|B:layer", "line 24: 'norm': operators of 2 passes are written"),
        ("compute norm\n", "barrier\n", "line 24: 'barrier' is not an operation"),
        ("program B:layer", "stage 2", "line 28: 'stage 2' after a program; stages come first"),
        ("on intra", "on network", "line 25: 'network' is not a stream; use one of compute, intra, inter"),
        (" on intra", "", "line 25: 'start gather' is not an operation"),
        ("compute norm\n", "compute norm now\n", "line 24: 'compute norm now' is not an operation"),
        ("STEP\n\n", "STEP,\n\n", "line 17: 'STEP,' is not an instruction"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(old: str, new: str, message: str) -> None:
    assert old in SMALL
    assert refused(SMALL.replace(old, new, 1)).startswith(f"schedule, {message}")


PROGRAMS = SMALL.index("program F:layer")


@pytest.mark.parametrize(
    ("lines", "number", "cause"),
    [
        *[
            (["compute 0:norm", f"compute {name}"], 25, f"{name!r}: operators of 3 passes are written 0:NAME")
            for name in ("norm", "3:norm", "01:norm")
        ],
        (["barrier now"], 24, "'barrier now' is not an operation"),
        (["", "program F:layer|B:layer|L:layer"], 25, "program F:layer|B:layer|L:layer stands twice"),
    ],
)
def test_what_is_wrong_in_a_program_of_several_passes(lines: list[str], number: int, cause: str) -> None:
    text = SMALL[:PROGRAMS] + "\n".join(["program F:layer|B:layer|L:layer", *lines]) + "\n"
    assert refused(text).startswith(f"schedule, line {number}: {cause}")


@pytest.mark.parametrize(
    "first",
    ["braid schedule 7", "braid schedule 60", "schedule 6"],
)
def test_another_version_is_refused_with_a_remedy(first: str) -> None:
    message = refused(SMALL.replace("braid schedule 6", first))
    assert message.startswith(f"schedule, line 1: expected 'braid schedule 6', found {first!r}; ")
    assert message.endswith("if another version of Braid wrote the file, make it anew with 'braid schedule'")


def test_a_text_that_ends_in_the_header_is_refused() -> None:
    assert refused("# nothing\n").startswith("schedule, line 1: expected 'braid schedule 6', found ''; ")
    message = "schedule, line 5: expected 'micro_batches' and a number, found ''"
    assert refused("\n".join(SMALL.splitlines()[:4])) == message
    header = SMALL.split("\n\n")[0]
    assert "the header says 2 stages, 0 follow" in refused(f"{header}\nprefetch 4\nkeep 4")


@given(st.text(alphabet="FBIWL0123.b()[]|<>SENDRCVWAITUPGHOM \n", max_size=60))
@settings(deadline=None)
def test_nothing_but_value_errors(noise: str) -> None:
    """Whatever stands in a stage is either parsed, and then prints as it was read, or refused."""
    text = SMALL.replace("F0.0 SEND(F0.1>1)", noise)
    try:
        schedule = parse(text)
    except ValueError:
        assert refused(text).startswith("schedule, line ")
    else:
        assert parse(write(schedule)) == schedule
