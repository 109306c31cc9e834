"""The text form of schedules: what it looks like, that it round-trips, and what the parser refuses."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.scheduling.lowering.named import SCHEDULES as NAMED
from braid.scheduling.operators import Stream
from braid.scheduling.schedule import (
    COLUMNS,
    Action,
    Barrier,
    Block,
    Compute,
    Direction,
    Gather,
    Gradients,
    Instruction,
    Late,
    Pair,
    PairAction,
    Receive,
    Reduce,
    Schedule,
    Send,
    Start,
    Step,
    Strand,
    Twin,
    Twins,
    Wait,
    WaitGather,
    WaitReceive,
    WaitReduce,
    WaitSend,
)
from braid.scheduling.schedule_parser import OF_PAIRS, OF_TWINS, parse, parse_action, parse_instruction
from tests.scheduling.cases import PAIRED, named_schedule, valid_schedules

NUMBERS = st.integers(0, 10_000)
WORDS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.@~-]{0,12}", fullmatch=True)
BLOCKS = st.builds(Block, st.sampled_from(Direction), NUMBERS, NUMBERS, st.sampled_from(Strand))
FORWARDS = st.builds(Block, st.just(Direction.FORWARD), NUMBERS, NUMBERS, st.sampled_from(Strand))
BACKWARDS = st.builds(
    Block,
    st.just(Direction.BACKWARD),
    NUMBERS,
    NUMBERS,
    st.sampled_from(Strand),
    st.sampled_from(Gradients),
)
INSTRUCTIONS: st.SearchStrategy[Instruction] = st.one_of(
    BLOCKS,
    BACKWARDS,
    st.builds(Pair, FORWARDS, BACKWARDS),
    st.builds(Twins, FORWARDS, FORWARDS),
    st.builds(Twins, BACKWARDS, BACKWARDS),
    st.builds(Gather, NUMBERS),
    st.builds(WaitGather, NUMBERS),
    st.builds(Send, BLOCKS, NUMBERS),
    st.builds(Receive, BLOCKS, NUMBERS),
    st.builds(Reduce, NUMBERS),
    st.builds(WaitSend, BLOCKS),
    st.builds(WaitReceive, BLOCKS),
    st.builds(WaitReduce, NUMBERS),
    st.builds(Step),
)
ACTIONS: st.SearchStrategy[Action] = st.one_of(
    st.builds(Compute, WORDS), st.builds(Start, WORDS, st.sampled_from(Stream)), st.builds(Wait, WORDS)
)
SIDES = st.sampled_from([*Direction, *Late])
PAIR_ACTIONS: st.SearchStrategy[PairAction] = st.one_of(
    st.builds(Compute, WORDS, SIDES),
    st.builds(Start, WORDS, st.sampled_from(Stream), SIDES),
    st.builds(Wait, WORDS, SIDES),
    st.builds(Barrier),
)
TWIN_ACTIONS: st.SearchStrategy[PairAction] = st.one_of(
    st.builds(Compute, WORDS, st.sampled_from(Twin)),
    st.builds(Start, WORDS, st.sampled_from(Stream), st.sampled_from(Twin)),
    st.builds(Wait, WORDS, st.sampled_from(Twin)),
)
SCHEDULES = st.builds(
    Schedule,
    name=WORDS,
    chunks=NUMBERS,
    micro_batches=NUMBERS,
    stages=st.lists(st.lists(INSTRUCTIONS, max_size=30).map(tuple), max_size=4).map(tuple),
    programs=st.dictionaries(
        st.tuples(WORDS, st.sampled_from(Direction)), st.lists(ACTIONS, max_size=8).map(tuple), max_size=4
    ),
    splits=st.dictionaries(
        st.tuples(WORDS, st.sampled_from([Gradients.INPUT, Gradients.WEIGHT])),
        st.lists(ACTIONS, max_size=8).map(tuple),
        max_size=3,
    ),
    pairs=st.dictionaries(st.tuples(WORDS, WORDS), st.lists(PAIR_ACTIONS, max_size=8).map(tuple), max_size=3),
    twins=st.dictionaries(
        st.tuples(WORDS, st.sampled_from(Direction)),
        st.lists(TWIN_ACTIONS, max_size=8).map(tuple),
        max_size=3,
    ),
    fused=st.integers(0, 8),
    split=st.integers(1, 64),
)

SMALL = """\
braid schedule 3
name small
stages 2
chunks 2
micro_batches 1

stage 0
  F0.0 SEND(F0.1>1)
  RECV(B0.0<1) WAIT(RECV B0.0) B0.0
  WAIT(SEND F0.1)
  REDUCE(0)
  WAIT(REDUCE 0)
  STEP

stage 1
  RECV(F0.1<0) WAIT(RECV F0.1) F0.1b
  B0.1 SEND(B0.0>0)

program layer F
  compute norm
  start gather on intra
  wait gather

program layer B
  compute norm.grad
"""


# -- round trip --------------------------------------------------------------------------------------------


@given(SCHEDULES)
@settings(max_examples=200, deadline=None)
def test_any_schedule_round_trips(schedule: Schedule) -> None:
    text = schedule.to_text()
    assert parse(text) == schedule
    assert parse(text).to_text() == text


@given(valid_schedules())
@settings(max_examples=30, deadline=None)
def test_generated_schedules_round_trip(case: tuple[Schedule, object]) -> None:
    assert parse(case[0].to_text()) == case[0]


@given(st.one_of(INSTRUCTIONS))
def test_every_instruction_round_trips(instruction: Instruction) -> None:
    assert parse_instruction(str(instruction)) == instruction


@given(ACTIONS)
def test_every_action_round_trips(action: Action) -> None:
    assert parse_action(str(action)) == action


@given(TWIN_ACTIONS)
def test_every_action_of_twins_round_trips(action: PairAction) -> None:
    assert parse_action(str(action), OF_TWINS) == action
    with pytest.raises(ValueError, match="operators of a paired program are written F:NAME or B:NAME"):
        parse_action(str(action), OF_PAIRS)


@given(PAIR_ACTIONS)
def test_every_action_of_a_pair_round_trips(action: PairAction) -> None:
    assert parse_action(str(action), OF_PAIRS) == action
    with pytest.raises(ValueError):
        parse_action(f"{action} x", Direction)


@given(valid_schedules(), st.data())
@settings(max_examples=30, deadline=None)
def test_comments_and_white_space_do_not_matter(case: tuple[Schedule, object], data: st.DataObject) -> None:
    schedule = case[0]
    lines = []
    for line in schedule.to_text().splitlines():
        indent, gap = data.draw(st.sampled_from(["", " ", "\t"])), data.draw(st.sampled_from(["", "\n"]))
        comment = data.draw(st.sampled_from(["", "  # F9.9 program x", "\t#"]))
        lines.append(f"{gap}{indent}{line.strip()}{comment}")
    assert parse("\r\n".join(lines)) == schedule


# -- layout ------------------------------------------------------------------------------------------------


def stage_lines(schedule: Schedule, stage: int) -> list[str]:
    """The lines of a stage in the text."""
    text = schedule.to_text().split(f"\nstage {stage}\n")[1]
    return text.split("\n\n")[0].rstrip("\n").split("\n")


def test_the_text_reads_like_this() -> None:
    assert stage_lines(named_schedule("folded", 2, 1), 1) == [
        "  RECV(F0.1<0) WAIT(RECV F0.1) F0.1",
        "  RECV(B0.2<0) F0.2 SEND(F0.3>0)",
        "  WAIT(RECV B0.2) WAIT(SEND F0.3) B0.2",
        "  B0.1 SEND(B0.0>0)",
        "  WAIT(SEND B0.0)",
        "  REDUCE(1) REDUCE(2)",
        "  WAIT(REDUCE 1) WAIT(REDUCE 2)",
        "  STEP",
    ]


@pytest.mark.parametrize("name", sorted(NAMED))
def test_one_line_per_block_and_no_long_lines(name: str) -> None:
    """Where a line would be too long, what is sent of a block stands in one more."""
    schedule = named_schedule(name, 4, 24)
    assert max(map(len, schedule.to_text().splitlines())) <= COLUMNS
    for stage in range(4):
        lines = stage_lines(schedule, stage)
        blocks = [str(i) for i in schedule.stages[stage] if isinstance(i, Block | Pair)]
        with_block = [line for line in lines if set(line.split()) & set(blocks)]
        assert len(with_block) == len(blocks)
        chunks = sorted({b.chunk for b in schedule.blocks(stage)})
        assert lines[-3:] == [
            "  " + " ".join(f"REDUCE({chunk})" for chunk in chunks),
            "  " + " ".join(f"WAIT(REDUCE {chunk})" for chunk in chunks),
            "  STEP",
        ]
        last = lines.index(with_block[-1])
        others = [line for line in lines[:last] if line not in with_block]
        if name not in PAIRED:
            assert not others
        assert all(re.fullmatch(r" ( (WAIT\(SEND \S+|SEND\(\S+\)))+", line) for line in others)
        assert len(lines) - 4 - last <= 1, "the last sends are waited for in one line"


@given(st.lists(INSTRUCTIONS, max_size=40))
@settings(deadline=None)
def test_lines_never_hold_two_blocks_and_stay_short(instructions: list[Instruction]) -> None:
    schedule = replace(parse(SMALL), stages=(tuple(instructions),), programs={})
    for line in schedule.to_text().splitlines():
        assert len(line) <= COLUMNS
        assert sum(bool(re.fullmatch(r"[FBIW]\d+\.\d+b?|\[.*\]", token)) for token in line.split()) <= 1


# -- errors ------------------------------------------------------------------------------------------------


def refused(text: str) -> str:
    """The message with which the parser refuses a text."""
    with pytest.raises(ValueError) as error:
        parse(text)
    return str(error.value)


@pytest.mark.parametrize(
    "token",
    [
        "F0.3junk",
        "0F3",
        "F03.1",
        "F3.01",
        "F3",
        "F3.",
        "F.1",
        "f3.1",
        "F3.1B",
        "F3.1bb",
        "F-1.0",
        "F+1.0",
        "F1_0.0",
        "F٣.0",
        "X3.1",
        "[F3.1]",
        "[F3.1|B2.1",
        "[F3.1|B2.1|B1.1]",
        "GATHER(F1.0)",
        "SEND(F3.1)",
        "SEND(F3.1<1)",
        "RECV(F3.1>1)",
        "SEND(F3.1>1",
        "SEND(F3.1>1)x",
        "SEND(F3.1>-1)",
        "REDUCE()",
        "REDUCE(1.0)",
        "REDUCE(01)",
        "WAIT(F0.1)",
        "WAIT(SEND F0.1)F0.1",
        "F0.1WAIT(SEND F0.1)",
        "WAIT(STEP)",
        "WAIT(REDUCE F0.0)",
        "WAIT(SENDF0.1)",
        "STEPS",
        "step",
        "compute",
    ],
)
def test_tokens_that_are_no_instruction(token: str) -> None:
    assert refused(SMALL.replace("F0.0 SEND", f"F0.0 {token} SEND")) == (
        f"schedule, line 8: {token!r} is not an instruction (F3.1, B3.1, SEND(F3.2>1), RECV(F3.2<0), ...)"
    )


@pytest.mark.parametrize(
    ("line", "number", "cause"),
    [
        ("name small", 2, "expected 'name' and one word, found 'stages 2'"),
        ("stages 2", 3, "expected 'stages' and a number, found 'chunks 2'"),
        ("chunks 2", 4, "expected 'chunks' and a number, found 'micro_batches 1'"),
        ("micro_batches 1", 6, "expected 'micro_batches' and a number, found 'stage 0'"),
    ],
)
def test_missing_header_lines(line: str, number: int, cause: str) -> None:
    assert refused(SMALL.replace(f"{line}\n", "")) == f"schedule, line {number}: {cause}"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name small", "name two words", "line 2: expected 'name' and one word, found 'name two words'"),
        ("stages 2", "stages two", "line 3: expected 'stages' and a number, found 'stages two'"),
        ("stages 2", "stages 02", "line 3: expected 'stages' and a number, found 'stages 02'"),
        ("chunks 2", "chunks -2", "line 4: expected 'chunks' and a number, found 'chunks -2'"),
        ("chunks 2", "chunks ٢", "line 4: expected 'chunks' and a number, found 'chunks ٢'"),
        ("micro_batches 1", "micro_batches 1 2", "line 5: expected 'micro_batches' and a number, found"),
        (
            "micro_batches 1",
            "micro_batches 1\nsplit 1",
            "line 6: 'split 1': a split is into 2 chunks or more",
        ),
        (
            "micro_batches 1",
            "micro_batches 1\nsplit 0",
            "line 6: 'split 0': a split is into 2 chunks or more",
        ),
        ("micro_batches 1", "micro_batches 1\nsplit 02", "line 6: expected 'stage 0', found 'split 02'"),
        (
            "micro_batches 1",
            "micro_batches 1\nsplit 2\nfused 2",
            "line 7: expected 'stage 0', found 'fused 2'",
        ),
        ("stages 2", "stages 3", "line 3: the header says 3 stages, 2 follow"),
        ("stages 2", "stages 1", "line 3: the header says 1 stages, 2 follow"),
        ("stage 0\n", "", "line 7: expected 'stage 0', found 'F0.0 SEND(F0.1>1)'"),
        ("stage 0", "stage 1", "line 7: expected 'stage 0', found 'stage 1'"),
        ("stage 1", "stage 2", "line 15: expected 'stage 1', found 'stage 2'"),
        ("stage 1", "stage 01", "line 15: expected 'stage 1', found 'stage 01'"),
        ("stage 1", "stage", "line 15: expected 'stage 1', found 'stage'"),
        ("stage 1", "stage 1 STEP", "line 15: expected 'stage 1', found 'stage 1 STEP'"),
        ("program layer B", "program layer F", "line 24: program layer F stands twice"),
        ("program layer B", "program layer X", "line 24: expected 'program PART' and F, B, I, W, FF or BB"),
        ("program layer B", "program layer", "line 24: expected 'program PART' and F, B, I, W, FF or BB"),
        ("program layer F", "program layer|layer", "line 20: 'norm': operators of a paired program are"),
        ("compute norm\n", "barrier\n", "line 20: 'barrier' is not an action"),
        ("program layer B", "stage 2", "line 24: 'stage 2' after a program; stages come first"),
        ("on intra", "on network", "line 21: 'network' is not a stream; use one of compute, intra, inter"),
        (" on intra", "", "line 21: 'start gather' is not an action"),
        ("compute norm\n", "compute norm now\n", "line 20: 'compute norm now' is not an action"),
        ("compute norm\n", "F0.0\n", "line 20: 'F0.0' is not an action"),
        ("compute norm\n", "run norm\n", "line 20: 'run norm' is not an action"),
        ("STEP\n\n", "STEP,\n\n", "line 13: 'STEP,' is not an instruction"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(old: str, new: str, message: str) -> None:
    assert refused(SMALL.replace(old, new, 1)).startswith(f"schedule, {message}")


@pytest.mark.parametrize("head", ["layer|F|X", "layer|", "|layer", "layer|layer F", "layer F|B"])
def test_heads_that_are_no_pair(head: str) -> None:
    text = SMALL[: SMALL.index("program layer F")] + f"program {head}\n"
    assert refused(text).startswith(
        "schedule, line 19: expected 'program PART' and F, B, I, W, FF or BB, or 'program PART|PART', "
        "found 'program"
    )


@pytest.mark.parametrize(
    ("lines", "number", "cause"),
    [
        (["compute F:norm", "compute norm"], 21, "'norm': operators of a paired program are written F:NAME"),
        (["start X:gather on intra"], 20, "'X:gather': operators of a paired program are written F:NAME"),
        (["wait B:"], 20, "'B:': operators of a paired program are written F:NAME or B:NAME"),
        (["compute P:"], 20, "'P:': operators of a paired program are written F:NAME or B:NAME or P:NAME"),
        (["start p:gather on intra"], 20, "'p:gather': operators of a paired program are written"),
        (["barrier now"], 20, "'barrier now' is not an action"),
        (["", "program layer|layer"], 21, "program layer|layer stands twice"),
    ],
)
def test_what_is_wrong_in_a_paired_program(lines: list[str], number: int, cause: str) -> None:
    text = SMALL[: SMALL.index("program layer F")] + "\n".join(["program layer|layer", *lines]) + "\n"
    assert refused(text).startswith(f"schedule, line {number}: {cause}")


@pytest.mark.parametrize(
    "first", ["braid schedule 4", "braid schedule 1", "braid schedule", "schedule 1", "name small", "F0.0"]
)
def test_another_version_is_refused_with_a_remedy(first: str) -> None:
    message = refused(SMALL.replace("braid schedule 3", first))
    assert message.startswith(f"schedule, line 1: expected 'braid schedule 3', found {first!r}; ")
    assert message.endswith("if another version of Braid wrote the file, make it anew with 'braid schedule'")


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n"])
def test_an_empty_text_is_refused(text: str) -> None:
    assert refused(text).startswith("schedule, line 1: expected 'braid schedule 3', found ''; ")


def test_a_text_that_ends_in_the_header_is_refused() -> None:
    message = "schedule, line 5: expected 'micro_batches' and a number, found ''"
    assert refused("\n".join(SMALL.splitlines()[:4])) == message


@given(st.text(alphabet="FB0123.b()<>SENDRCVWAITUP \n", max_size=60))
@settings(deadline=None)
def test_nothing_but_value_errors(noise: str) -> None:
    """Whatever stands in a stage is either parsed, and then prints as it was read, or refused."""
    text = SMALL.replace("F0.0 SEND(F0.1>1)", noise)
    try:
        schedule = parse(text)
    except ValueError:
        assert refused(text).startswith("schedule, line ")
    else:
        assert parse(schedule.to_text()) == schedule
