"""A schedule: what every pipeline stage does in one step, as data with a strict text form.

Two levels. Per stage a list of instructions, each a token:

    F3.1            forward of micro-batch 3 on chunk 1          (``F3.1b``: on strand beta)
    B3.1            backward of it, input and weight gradients
    SEND(F3.2>1)    start to send what F3.2 needs to stage 1
    RECV(F3.2<0)    start to receive what F3.2 needs from stage 0
    REDUCE(1)       start to reduce the gradients of chunk 1
    WAIT(...)       wait for the SEND, RECV or REDUCE inside, such as WAIT(RECV F3.2)
    STEP            update the parameters

and per part of the model (embedding, layer, head) and pass one operator program:

    compute NAME        run a compute operator
    start NAME on S     issue a collective on stream S
    wait NAME           make its result available

All ranks of a stage run the same lists in the same order. `parse` accepts exactly what `to_text` writes,
comments and white space apart.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from braid.scheduling.operators import Stream

VERSION: Final = 1

COLUMNS: Final = 100
"""Lines of the text form are not longer, where it can be helped."""


class Direction(StrEnum):
    """Which pass of a micro-batch a block is."""

    FORWARD = "F"
    BACKWARD = "B"


class Strand(StrEnum):
    """The two streams of micro-batches that may run on a rank at the same time."""

    ALPHA = "alpha"
    BETA = "beta"


@dataclass(frozen=True, order=True)
class Block:
    """Forward or backward of one micro-batch over one chunk."""

    direction: Direction
    micro_batch: int
    chunk: int
    strand: Strand = Strand.ALPHA

    def __str__(self) -> str:
        mark = "b" if self.strand is Strand.BETA else ""
        return f"{self.direction.value}{self.micro_batch}.{self.chunk}{mark}"


@dataclass(frozen=True)
class Send:
    """Start to send the input of ``block`` to another stage."""

    block: Block
    stage: int

    def __str__(self) -> str:
        return f"SEND({self.block}>{self.stage})"


@dataclass(frozen=True)
class Receive:
    """Start to receive the input of ``block`` from another stage."""

    block: Block
    stage: int

    def __str__(self) -> str:
        return f"RECV({self.block}<{self.stage})"


@dataclass(frozen=True)
class Reduce:
    """Start to reduce the gradients of a chunk over all axes that share its parameters."""

    chunk: int

    def __str__(self) -> str:
        return f"REDUCE({self.chunk})"


@dataclass(frozen=True)
class WaitSend:
    """Wait until the input of ``block`` has left, and let go of it."""

    block: Block

    def __str__(self) -> str:
        return f"WAIT(SEND {self.block})"


@dataclass(frozen=True)
class WaitReceive:
    """Wait until the input of ``block`` has arrived."""

    block: Block

    def __str__(self) -> str:
        return f"WAIT(RECV {self.block})"


@dataclass(frozen=True)
class WaitReduce:
    """Wait until the gradients of a chunk are reduced."""

    chunk: int

    def __str__(self) -> str:
        return f"WAIT(REDUCE {self.chunk})"


@dataclass(frozen=True)
class Step:
    """Clip, update the parameters, clear the gradients."""

    def __str__(self) -> str:
        return "STEP"


Instruction = Block | Send | Receive | Reduce | WaitSend | WaitReceive | WaitReduce | Step


@dataclass(frozen=True)
class Compute:
    """Run a compute operator of the part."""

    operator: str

    def __str__(self) -> str:
        return f"compute {self.operator}"


@dataclass(frozen=True)
class Start:
    """Issue a collective of the part on a stream."""

    operator: str
    stream: Stream

    def __str__(self) -> str:
        return f"start {self.operator} on {self.stream.value}"


@dataclass(frozen=True)
class Wait:
    """Make the result of a started collective available."""

    operator: str

    def __str__(self) -> str:
        return f"wait {self.operator}"


Action = Compute | Start | Wait
Program = tuple[Action, ...]
ProgramKey = tuple[str, Direction]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Instructions of every stage and programs of every part; immutable, comparable, printable."""

    name: str
    chunks: int
    micro_batches: int
    stages: tuple[tuple[Instruction, ...], ...]
    programs: Mapping[ProgramKey, Program]

    @property
    def trains(self) -> bool:
        """Whether the schedule has programs for backward passes (a validation schedule has none)."""
        return any(direction is Direction.BACKWARD for _, direction in self.programs)

    @property
    def strands(self) -> tuple[Strand, ...]:
        """The strands in use."""
        found = {i.strand for stage in self.stages for i in stage if isinstance(i, Block)}
        return tuple(s for s in Strand if s in found)

    def blocks(self, stage: int) -> tuple[Block, ...]:
        """The blocks of a stage, in order."""
        return tuple(i for i in self.stages[stage] if isinstance(i, Block))

    def to_text(self) -> str:
        """The schedule as text that `parse` reads back to an equal object."""
        lines = [
            f"braid schedule {VERSION}",
            f"name {self.name}",
            f"stages {len(self.stages)}",
            f"chunks {self.chunks}",
            f"micro_batches {self.micro_batches}",
        ]
        for number, stage in enumerate(self.stages):
            lines += ["", f"stage {number}", *_stage_lines(stage)]
        for (part, direction), program in self.programs.items():
            lines += ["", f"program {part} {direction.value}", *(f"  {action}" for action in program)]
        return "\n".join(lines) + "\n"


def _stage_lines(stage: tuple[Instruction, ...]) -> list[str]:
    """A line per block, after what is received for it and before what is sent of it; other kinds in runs."""
    lines: list[str] = []
    previous: Instruction | None = None
    for instruction in stage:
        token = str(instruction)
        if _same_line(previous, instruction) and len(lines[-1]) + 1 + len(token) <= COLUMNS:
            lines[-1] += f" {token}"
        else:
            lines.append(f"  {token}")
        previous = instruction
    return lines


_PLACES: Final = {Receive: 0, WaitReceive: 0, WaitSend: 1, Block: 2, Send: 3}
"""Order of the instructions on a block's line."""


def _same_line(previous: Instruction | None, instruction: Instruction) -> bool:
    before, here = type(previous), type(instruction)
    if before in _PLACES and here in _PLACES:
        return _PLACES[before] <= _PLACES[here] and not before is here is Block
    return before is here


_NUMBER = r"(0|[1-9][0-9]*)"
_BLOCK = rf"([FB]){_NUMBER}\.{_NUMBER}(b?)"
_INSTRUCTIONS: Final = {
    "block": re.compile(_BLOCK),
    "send": re.compile(rf"SEND\({_BLOCK}>{_NUMBER}\)"),
    "receive": re.compile(rf"RECV\({_BLOCK}<{_NUMBER}\)"),
    "reduce": re.compile(rf"REDUCE\({_NUMBER}\)"),
    "wait_send": re.compile(rf"WAIT\(SEND {_BLOCK}\)"),
    "wait_receive": re.compile(rf"WAIT\(RECV {_BLOCK}\)"),
    "wait_reduce": re.compile(rf"WAIT\(REDUCE {_NUMBER}\)"),
    "step": re.compile(r"STEP"),
}
_TOKEN: Final = re.compile(r"(?:WAIT\([^)]*\)|\S)+")


def _block(groups: tuple[str, ...]) -> Block:
    direction, micro_batch, chunk, mark = groups
    strand = Strand.BETA if mark else Strand.ALPHA
    return Block(Direction(direction), int(micro_batch), int(chunk), strand)


def parse_instruction(token: str) -> Instruction:
    """Parse one instruction; `ValueError` for anything that is not exactly one."""
    for kind, pattern in _INSTRUCTIONS.items():
        if match := pattern.fullmatch(token):
            groups = match.groups()
            match kind:
                case "block":
                    return _block(groups)
                case "send":
                    return Send(_block(groups[:4]), int(groups[4]))
                case "receive":
                    return Receive(_block(groups[:4]), int(groups[4]))
                case "reduce":
                    return Reduce(int(groups[0]))
                case "wait_send":
                    return WaitSend(_block(groups))
                case "wait_receive":
                    return WaitReceive(_block(groups))
                case "wait_reduce":
                    return WaitReduce(int(groups[0]))
                case _:
                    return Step()
    raise ValueError(f"{token!r} is not an instruction (F3.1, B3.1, SEND(F3.2>1), RECV(F3.2<0), ...)")


def parse_action(line: str) -> Action:
    """Parse one line of an operator program; `ValueError` for anything else."""
    match line.split():
        case ["compute", name]:
            return Compute(name)
        case ["start", name, "on", stream]:
            if stream not in set(Stream):
                raise ValueError(f"{stream!r} is not a stream; use one of {', '.join(Stream)}")
            return Start(name, Stream(stream))
        case ["wait", name]:
            return Wait(name)
    raise ValueError(f"{line!r} is not an action (compute NAME, start NAME on STREAM, wait NAME)")


Line = tuple[int, str]
"""A line's number and its text, without comment and outer white space."""


def parse(text: str) -> Schedule:
    """Parse a schedule; `ValueError` names the line that is wrong."""
    lines: list[Line] = [
        (number, stripped)
        for number, line in enumerate(text.splitlines(), start=1)
        if (stripped := line.split("#", 1)[0].strip())
    ]
    name, stage_count, chunks, micro_batches = _parse_header(lines)
    body = lines[1 + len(_HEADER) :]
    cut = next((n for n, (_, line) in enumerate(body) if line.split()[0] == "program"), len(body))
    stages = _parse_stages(body[:cut])
    if len(stages) != stage_count:
        number = lines[_HEADER.index("stages") + 1][0]
        raise _wrong(number, f"the header says {stage_count} stages, {len(stages)} follow")
    return Schedule(
        name=name,
        chunks=chunks,
        micro_batches=micro_batches,
        stages=stages,
        programs=_parse_programs(body[cut:]),
    )


_HEADER: Final = ("name", "stages", "chunks", "micro_batches")


def _parse_header(lines: list[Line]) -> tuple[str, int, int, int]:
    number, first = lines[0] if lines else (1, "")
    if first != f"braid schedule {VERSION}":
        raise _wrong(
            number,
            f"expected 'braid schedule {VERSION}', found {first!r}; "
            f"if another version of Braid wrote the file, make it anew with 'braid schedule'",
        )
    entries = []
    for place, key in enumerate(_HEADER, start=1):
        number, line = lines[place] if place < len(lines) else (number + 1, "")
        words = line.split()
        if len(words) != 2 or words[0] != key or not (key == "name" or re.fullmatch(_NUMBER, words[1])):
            what = "one word" if key == "name" else "a number"
            raise _wrong(number, f"expected '{key}' and {what}, found {line!r}")
        entries.append(words[1])
    name, *counts = entries
    stages, chunks, micro_batches = map(int, counts)
    return name, stages, chunks, micro_batches


def _parse_stages(lines: list[Line]) -> tuple[tuple[Instruction, ...], ...]:
    stages: list[list[Instruction]] = []
    for number, line in lines:
        if line.split()[0] == "stage":
            if line.split() != ["stage", str(len(stages))]:
                raise _wrong(number, f"expected 'stage {len(stages)}', found {line!r}")
            stages.append([])
        elif not stages:
            raise _wrong(number, f"expected 'stage 0', found {line!r}")
        else:
            try:
                stages[-1] += [parse_instruction(token) for token in _TOKEN.findall(line)]
            except ValueError as error:
                raise _wrong(number, str(error)) from None
    return tuple(tuple(stage) for stage in stages)


def _parse_programs(lines: list[Line]) -> dict[ProgramKey, Program]:
    programs: dict[ProgramKey, list[Action]] = {}
    for number, line in lines:
        match line.split():
            case ["program", part, ("F" | "B") as direction]:
                key = (part, Direction(direction))
                if key in programs:
                    raise _wrong(number, f"program {part} {direction} stands twice")
                program = programs[key] = []
            case ["program", *_]:
                raise _wrong(number, f"expected 'program PART F' or 'program PART B', found {line!r}")
            case ["stage", *_]:
                raise _wrong(number, f"{line!r} after a program; stages come first")
            case _:
                try:
                    program.append(parse_action(line))
                except ValueError as error:
                    raise _wrong(number, str(error)) from None
    return {key: tuple(actions) for key, actions in programs.items()}


def _wrong(number: int, cause: str) -> ValueError:
    return ValueError(f"schedule, line {number}: {cause}")
