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
from typing import Final, assert_never

from braid.scheduling.operators import Stream

VERSION: Final = 1


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
        """Whether the schedule has backward passes (a validation schedule has none)."""
        return any(isinstance(i, Block) and i.direction is Direction.BACKWARD for i in self.stages[0])

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
    """One line per block, with what is received before it and sent after it."""
    lines: list[list[str]] = [[]]
    for instruction in stage:
        opens = isinstance(instruction, Receive | Reduce | Step)
        has_block = any(token[0] in "FB" for token in lines[-1])
        if opens and lines[-1] and (has_block or not isinstance(instruction, Receive)):
            lines.append([])
        elif isinstance(instruction, Block) and has_block:
            lines.append([])
        lines[-1].append(str(instruction))
    return ["  " + " ".join(line) for line in lines if line]


_BLOCK = r"([FB])(0|[1-9]\d*)\.(0|[1-9]\d*)(b?)"
_NUMBER = r"(0|[1-9]\d*)"
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
_TOKEN = re.compile(r"WAIT\([^)]*\)|\S+")


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
    raise ValueError(f"{token!r} is not an instruction")


def parse_action(line: str) -> Action:
    """Parse one line of an operator program."""
    match line.split():
        case ["compute", name]:
            return Compute(name)
        case ["start", name, "on", stream] if stream in {s.value for s in Stream}:
            return Start(name, Stream(stream))
        case ["wait", name]:
            return Wait(name)
    raise ValueError(f"{line!r} is not an action (compute NAME, start NAME on STREAM, wait NAME)")


def parse(text: str) -> Schedule:
    """Parse a schedule; `ValueError` names the line that is wrong."""
    lines = [
        (number, stripped)
        for number, line in enumerate(text.splitlines(), start=1)
        if (stripped := line.split("#", 1)[0].strip())
    ]
    header, rest = _header(lines)
    stages: list[list[Instruction]] = []
    programs: dict[ProgramKey, list[Action]] = {}
    program: list[Action] | None = None
    for number, line in rest:
        try:
            match line.split():
                case ["stage", index]:
                    if index != str(len(stages)):
                        raise ValueError(f"expected 'stage {len(stages)}', found {line!r}")
                    stages.append([])
                    program = None
                case ["program", part, ("F" | "B") as direction]:
                    key = (part, Direction(direction))
                    if key in programs:
                        raise ValueError(f"program {part} {direction} stands twice")
                    program = programs[key] = []
                case _ if program is not None:
                    program.append(parse_action(line))
                case _ if stages:
                    stages[-1] += [parse_instruction(token) for token in _TOKEN.findall(line)]
                case _:
                    raise ValueError(f"expected 'stage 0', found {line!r}")
        except ValueError as error:
            raise ValueError(f"schedule, line {number}: {error}") from None
    if len(stages) != header["stages"]:
        raise ValueError(f"schedule: the header says {header['stages']} stages, {len(stages)} follow")
    return Schedule(
        name=str(header["name"]),
        chunks=int(header["chunks"]),
        micro_batches=int(header["micro_batches"]),
        stages=tuple(tuple(stage) for stage in stages),
        programs={key: tuple(actions) for key, actions in programs.items()},
    )


def _header(lines: list[tuple[int, str]]) -> tuple[dict[str, int | str], list[tuple[int, str]]]:
    first = lines[0][1] if lines else ""
    if first != f"braid schedule {VERSION}":
        raise ValueError(
            f"schedule: the first line must be 'braid schedule {VERSION}', found {first!r}; "
            f"make it anew with 'braid schedule'"
        )
    header: dict[str, int | str] = {}
    for (number, line), key in zip(lines[1:5], ("name", "stages", "chunks", "micro_batches"), strict=False):
        words = line.split()
        if len(words) != 2 or words[0] != key or not (key == "name" or words[1].isdecimal()):
            raise ValueError(f"schedule, line {number}: expected '{key} ...', found {line!r}")
        header[key] = words[1] if key == "name" else int(words[1])
    if len(header) != 4:
        raise ValueError("schedule: the header (name, stages, chunks, micro_batches) is not complete")
    return header, lines[5:]


def instruction_kind(instruction: Instruction) -> str:
    """A word for messages: what kind of instruction this is."""
    match instruction:
        case Block():
            return "block"
        case Send() | WaitSend():
            return "send"
        case Receive() | WaitReceive():
            return "receive"
        case Reduce() | WaitReduce():
            return "reduce"
        case Step():
            return "step"
        case _:
            assert_never(instruction)
