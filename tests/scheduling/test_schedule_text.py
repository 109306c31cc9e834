"""The text form of schedules: what it looks like, that it round-trips, and what the parser refuses."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.scheduling.operators import Stream
from braid.scheduling.schedule import (
    Action,
    Await,
    Barrier,
    Block,
    Compute,
    Gather,
    Instruction,
    Norm,
    Pass,
    PassKind,
    Prefetch,
    Program,
    Receive,
    Reduce,
    Schedule,
    Send,
    Side,
    Sides,
    Start,
    Step,
    Strand,
    Transfer,
    Wait,
)
from braid.scheduling.schedule_text import (
    COLUMNS,
    parse,
    parse_action,
    parse_instruction,
    parse_step,
    write,
    write_step,
)
from tests.scheduling.cases import valid_schedules
from tests.scheduling.partition_cases import PARTITIONS

NUMBERS = st.integers(0, 10_000)
WORDS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.@~-]{0,12}", fullmatch=True)
AXES = st.sampled_from(["tp", "tp_beyond_2", "dp", "pp", "ends", "copies", "edp"])
PASSES = st.builds(Pass, st.sampled_from(PassKind), NUMBERS, NUMBERS, st.sampled_from(Strand))
TRANSFERS: st.SearchStrategy[Transfer] = st.one_of(
    st.builds(Send, PASSES, NUMBERS),
    st.builds(Receive, PASSES, NUMBERS),
    st.builds(Reduce, st.one_of(st.none(), NUMBERS), AXES),
)
SUMS = st.lists(st.builds(Reduce, NUMBERS, AXES), max_size=3).map(tuple)
GATHERS = st.lists(st.builds(Gather, NUMBERS, AXES), max_size=3).map(tuple)
INSTRUCTIONS: st.SearchStrategy[Instruction] = st.one_of(
    st.builds(Block, st.lists(PASSES, min_size=1, max_size=4).map(tuple), SUMS, GATHERS),
    TRANSFERS,
    st.builds(Await, TRANSFERS),
    st.just(Prefetch()),
    st.just(Norm()),
    st.just(Step()),
)
SIDES: st.SearchStrategy[Sides] = st.lists(
    st.builds(Side, st.sampled_from(PassKind), WORDS), min_size=1, max_size=4
).map(tuple)


def actions(count: int) -> st.SearchStrategy[Action]:
    """An action of a program of so many passes."""
    turns = st.integers(0, count - 1)
    found: list[st.SearchStrategy[Action]] = [
        st.builds(Compute, WORDS, turns),
        st.builds(Start, WORDS, st.sampled_from(Stream), turns),
        st.builds(Wait, WORDS, turns),
    ]
    return st.one_of(found + [st.just(Barrier())] * (count > 1))


@st.composite
def programs(draw: st.DrawFn) -> dict[Sides, Program]:
    """Programs of any passes."""
    keys = draw(st.lists(SIDES, max_size=4, unique=True))
    return {sides: tuple(draw(st.lists(actions(len(sides)), max_size=8))) for sides in keys}


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
@settings(max_examples=200, deadline=None)
def test_any_schedule_round_trips(schedule: Schedule) -> None:
    text = write(schedule)
    assert parse(text) == schedule
    assert write(parse(text)) == text


@given(st.one_of(INSTRUCTIONS))
def test_every_instruction_round_trips(instruction: Instruction) -> None:
    assert parse_instruction(str(instruction)) == instruction


@given(st.integers(1, 4), WORDS, st.data())
def test_every_step_of_an_order_round_trips(count: int, operator: str, data: st.DataObject) -> None:
    turn = data.draw(st.integers(0, count - 1))
    text = write_step(turn, operator, several=count > 1)
    assert parse_step(text, count) == (turn, operator)
    assert text == (operator if count == 1 else f"{turn}:{operator}")


@given(WORDS)
def test_operators_of_one_pass_carry_no_number(operator: str) -> None:
    """Where there is one pass, a number is part of a name; where there are several, it is needed."""
    assert parse_action(f"compute 0:{operator}", 1) == Compute(f"0:{operator}", 0)
    with pytest.raises(ValueError, match="operators of 2 passes are written 0:NAME to 1:NAME"):
        parse_action(f"compute {operator}", 2)


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


# -- layout ------------------------------------------------------------------------------------------------


@given(st.lists(INSTRUCTIONS, max_size=40))
@settings(deadline=None)
def test_lines_never_hold_two_blocks_and_stay_short(instructions: list[Instruction]) -> None:
    """But for a block that is itself too long for a line."""
    schedule = replace(parse(SMALL), stages=(tuple(instructions),), programs={})
    for line in write(schedule).splitlines():
        tokens = re.findall(r"\[[^]]*\]|\S+", line)
        assert len(line) <= COLUMNS or len(tokens) == 1
        assert sum(bool(re.fullmatch(r"[FBIWL]\d+\.\d+b?|\[.*\]", token)) for token in tokens) <= 1
