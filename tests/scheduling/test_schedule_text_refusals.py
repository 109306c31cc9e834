"""What the parser of schedules refuses, with a line that says where and why."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.scheduling.schedule_text import parse, write
from tests.scheduling.test_schedule_text import SMALL


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
F0.3junk 0F3 F03.1 F3.01 F3 F3. F.1 f3.1 F3.1B F3.1bb F-1.0 F+1.0 F1_0.0 F٣.0 X3.1 []x NORMS norm STEPS step
compute barrier prefetch SEND(F3.1>1)x
"""


@pytest.mark.parametrize(
    ("token", "cause"),
    [
        *[(token, f"{token!r} {NO_INSTRUCTION}") for token in NO_INSTRUCTIONS.split()],
        ("[F3.1|B2.1", f"'[F3.1|B2.1' {NO_INSTRUCTION}"),
        ("F0.1WAIT(SEND F0.1>1)", f"'F0.1WAIT(SEND F0.1>1)' {NO_INSTRUCTION}"),
        ("[F3.1]", "'[F3.1]' holds one pass; write it without brackets"),
        ("[F3.1|B2.1|X1.1]", f"'X1.1' {NO_PASS}"),
        ("[F3.1|B2.1|]", f"'' {NO_PASS}"),
        ("[F3.1,B2.1]", f"'F3.1,B2.1' {NO_PASS}"),
        *[
            (token, f"{token!r} {NO_STAGE}")
            for token in ("SEND(F3.1)", "SEND(F3.1<1)", "RECV(F3.1>1)", "SEND(F3.1>-1)", "SEND(F3.1>01)")
        ],
        ("SEND(F3.1>1", f"'SEND(F3.1>1 SEND(F0.1>1)' {NO_STAGE}"),
        ("SEND(3.1>1)", f"'3.1' {NO_PASS}"),
        *[
            (f"REDUCE({what})", f"'REDUCE({what})' {NO_AXIS}")
            for what in ("", "1", "1.0 dp", "01 dp", "1 DP", "dp 1")
        ],
        ("GATHER(1 dp)", f"'GATHER(1 dp)' {NO_INSTRUCTION}"),
        ("GATHER(norm dp)", f"'GATHER(norm dp)' {NO_INSTRUCTION}"),
        ("WAIT(GATHER 1 dp)", f"'WAIT(GATHER 1 dp)' {NO_TRANSFER}"),
        ("PREFETCH(1 dp)", f"'PREFETCH(1 dp)' {NO_INSTRUCTION}"),
        ("WAIT(PREFETCH)", f"'WAIT(PREFETCH)' {NO_TRANSFER}"),
        ("WAIT(F0.1)", f"'WAIT(F0.1)' {NO_TRANSFER}"),
        ("WAIT(STEP)", f"'WAIT(STEP)' {NO_TRANSFER}"),
        ("WAIT(SEND F0.1)", f"'WAIT(SEND F0.1)' {NO_STAGE}"),
        ("WAIT(SEND(F0.1>1))", f"'WAIT(SEND(F0.1>1))' {NO_TRANSFER}"),
        ("WAIT(SENDF0.1>1)", f"'WAIT(SENDF0.1>1)' {NO_TRANSFER}"),
        ("WAIT(SEND F0.1>1)F0.1", f"'WAIT(SEND F0.1>1)F0.1' {NO_INSTRUCTION}"),
        ("WAIT(REDUCE F0.0)", f"'WAIT(REDUCE F0.0)' {NO_AXIS}"),
        ("WAIT(REDUCE 0)", f"'WAIT(REDUCE 0)' {NO_AXIS}"),
    ],
)
def test_tokens_that_are_no_instruction(token: str, cause: str) -> None:
    assert refused(SMALL.replace("F0.0 SEND", f"F0.0 {token} SEND")) == f"schedule, line 9: {cause}"


@pytest.mark.parametrize(
    ("line", "number", "cause"),
    [
        ("name small", 2, "expected 'name' and one word, found 'stages 2'"),
        ("stages 2", 3, "expected 'stages' and a number, found 'chunks 2'"),
        ("chunks 2", 4, "expected 'chunks' and a number, found 'micro_batches 1'"),
        ("micro_batches 1", 5, "expected 'micro_batches' and a number, found 'unit 0'"),
        ("unit 0", 7, "expected 'unit' and a number, found 'stage 0'"),
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
        ("unit 0", "unit 0\nkeep 2\nprefetch 2", "line 8: expected 'stage 0', found 'prefetch 2'"),
        ("unit 0", "unit 0\nkeep 2\nkeep 2", "line 8: expected 'stage 0', found 'keep 2'"),
        ("unit 0", "unit 0\nprefetch 2\nprefetch 2", "line 8: expected 'stage 0', found 'prefetch 2'"),
        ("unit 0", "unit 0\nPrefetch 2", "line 7: expected 'stage 0', found 'Prefetch 2'"),
        *[
            ("unit 0", f"unit 0\n{line}", f"line 7: expected '{word}' and a number above 0, found '{line}'")
            for word in ("prefetch", "keep")
            for line in (word, *(f"{word} {number}" for number in ("0", "x", "02", "-2", "2 2")))
        ],
        (
            "unit 0",
            "unit 0\nprefetch 2\nkeep x",
            "line 8: expected 'keep' and a number above 0, found 'keep x'",
        ),
        ("unit 0", "fused 4", "line 6: expected 'unit' and a number, found 'fused 4'"),
        ("unit 0", "unit two", "line 6: expected 'unit' and a number, found 'unit two'"),
        ("unit 0", "unit 0\nunit 0", "line 7: expected 'stage 0', found 'unit 0'"),
        ("unit 0", "unit 0\npieces 2", "line 7: expected 'stage 0', found 'pieces 2'"),
        ("stages 2", "stages 3", "line 3: the header says 3 stages, 2 follow"),
        ("stages 2", "stages 1", "line 3: the header says 1 stages, 2 follow"),
        ("stage 0\n", "", "line 8: expected 'stage 0', found 'F0.0 SEND(F0.1>1)'"),
        ("stage 0", "stage 1", "line 8: expected 'stage 0', found 'stage 1'"),
        ("stage 1", "stage 2", "line 19: expected 'stage 1', found 'stage 2'"),
        ("stage 1", "stage 01", "line 19: expected 'stage 1', found 'stage 01'"),
        ("stage 1", "stage", "line 19: expected 'stage 1', found 'stage'"),
        ("stage 1", "stage 1 STEP", "line 19: expected 'stage 1', found 'stage 1 STEP'"),
        ("program B:layer", "program F:layer", "line 28: program F:layer stands twice"),
        ("program B:layer", "program X:layer", "line 28: 'X:layer' does not say what the program is for"),
        ("program B:layer", "program layer", "line 28: 'layer' does not say what the program is for"),
        ("program B:layer", "program", "line 28: expected 'program' and what it is for, found 'program'"),
        ("program B:layer", "program layer B", "line 28: expected 'program' and what it is for, found"),
        ("program F:layer", "program F:layer|B:layer", "line 24: 'norm': operators of 2 passes are written"),
        ("compute norm\n", "barrier\n", "line 24: 'barrier' is not an action"),
        ("program B:layer", "stage 2", "line 28: 'stage 2' after a program; stages come first"),
        ("on intra", "on network", "line 25: 'network' is not a stream; use one of compute, intra, inter"),
        (" on intra", "", "line 25: 'start gather' is not an action"),
        ("compute norm\n", "compute norm now\n", "line 24: 'compute norm now' is not an action"),
        ("compute norm\n", "F0.0\n", "line 24: 'F0.0' is not an action"),
        ("compute norm\n", "run norm\n", "line 24: 'run norm' is not an action"),
        ("STEP\n\n", "STEP,\n\n", "line 17: 'STEP,' is not an instruction"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(old: str, new: str, message: str) -> None:
    assert old in SMALL
    assert refused(SMALL.replace(old, new, 1)).startswith(f"schedule, {message}")


PROGRAMS = SMALL.index("program F:layer")


@pytest.mark.parametrize(
    "sides", ["layer|F:layer", "F:layer|", "|F:layer", "F:|B:layer", "f:layer", "F|layer", "F"]
)
def test_what_is_nothing_that_a_program_is_for(sides: str) -> None:
    message = refused(SMALL[:PROGRAMS] + f"program {sides}\n")
    assert message == (
        f"schedule, line 23: {sides!r} does not say what the program is for (F:layer, F:layer|B:layer, ...)"
    )


@pytest.mark.parametrize(
    ("lines", "number", "cause"),
    [
        (
            ["compute 0:norm", "compute norm"],
            25,
            "'norm': operators of 3 passes are written 0:NAME to 2:NAME",
        ),
        (["start 3:gather on intra"], 24, "'3:gather': operators of 3 passes are written 0:NAME to 2:NAME"),
        *[
            ([f"compute {name}"], 24, f"{name!r}: operators of 3 passes are written")
            for name in ("-1:norm", "01:norm", "F:norm", "1:")
        ],
        (["barrier now"], 24, "'barrier now' is not an action"),
        (["", "program F:layer|B:layer|L:layer"], 25, "program F:layer|B:layer|L:layer stands twice"),
    ],
)
def test_what_is_wrong_in_a_program_of_several_passes(lines: list[str], number: int, cause: str) -> None:
    text = SMALL[:PROGRAMS] + "\n".join(["program F:layer|B:layer|L:layer", *lines]) + "\n"
    assert refused(text).startswith(f"schedule, line {number}: {cause}")


@pytest.mark.parametrize(
    "first",
    ["braid schedule 3", "braid schedule 7", "braid schedule 60", "braid schedule", "schedule 6", "F0.0"],
)
def test_another_version_is_refused_with_a_remedy(first: str) -> None:
    message = refused(SMALL.replace("braid schedule 6", first))
    assert message.startswith(f"schedule, line 1: expected 'braid schedule 6', found {first!r}; ")
    assert message.endswith("if another version of Braid wrote the file, make it anew with 'braid schedule'")


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n"])
def test_an_empty_text_is_refused(text: str) -> None:
    assert refused(text).startswith("schedule, line 1: expected 'braid schedule 6', found ''; ")


def test_a_text_that_ends_in_the_header_is_refused() -> None:
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
