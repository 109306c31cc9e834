"""A schedule: what every pipeline stage does in one step, as data with a strict text form.

Two levels. Per stage a list of instructions, each a token:

    F3.1            forward of micro-batch 3 on chunk 1          (``F3.1b``: on strand beta)
    B3.1            backward of it, input and weight gradients
    I3.1  W3.1      input gradients alone; weight gradients, which may come later
    [F5.0b|B1.1]    a paired block: a forward and a backward pass of different strands at the same time
    [F0.0|F1.0b]    twins: the same pass of two micro-batches, on different strands, at the same time
    SEND(F3.2>1)    start to send what F3.2 needs to stage 1
    RECV(F3.2<0)    start to receive what F3.2 needs from stage 0
    REDUCE(1)       start to reduce the gradients of chunk 1
    GATHER(1)       start to gather the parameters of chunk 1, where ranks hold only parts of them (ZeRO)
    WAIT(...)       wait for the SEND, RECV, REDUCE or GATHER inside, such as WAIT(RECV F3.2)
    STEP            update the parameters

and per part of the model (embedding, layer, head) and pass one operator program:

    compute NAME        run a compute operator
    start NAME on S     issue a collective on stream S
    wait NAME           make its result available
    barrier             wait for everything that is under way (paired programs only)

The head's backward operators stand in its forward program, behind the loss, and its backward program is
empty: it only hands on the gradient that is there. Schedules that do not train have forward operators alone.

``program layer|layer`` is that of a layer's forward beside a layer's backward: its operators are written
``F:NAME`` and ``B:NAME``; ``P:NAME`` is a weight gradient that the run before, in the same block or in the
paired block right before, left for here (where there is none it is skipped; where none follows it runs then).
The layers of a paired block are paired one by one, first forward layer with last backward layer; what one of
the two has more (embedding, head, uneven layers) runs by its own program, the backward's before, the
forward's after. With ``fused N`` up to N layers are one run, the ends of the model with them, and programs
are of runs: ``embedding+2*layer|2*layer+head``, operators ``F:1.layer/qkv`` (`braid.scheduling.fusion`).
``program RUN FF`` is that of a run's forward passes in twins (``BB``: backward), its operators written
``1:NAME`` and ``2:NAME``; where there is none, the second pass goes behind the first.
With ``split N`` the layers' all-gathers and the GEMMs that read them are in N chunks of tokens, which are
operators of their own: ``qkv.1of4`` (`braid.scheduling.lowering.split`).

All ranks of a stage run the same lists in the same order. `braid.scheduling.schedule_parser` reads the
text back.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Final, TypeGuard

from braid.scheduling.operators import Stream

VERSION: Final = 3

COLUMNS: Final = 100
"""Lines of the text form are not longer, where it can be helped."""


class Direction(StrEnum):
    """Which pass of a micro-batch a block is."""

    FORWARD = "F"
    BACKWARD = "B"


class Gradients(StrEnum):
    """What a backward block computes; the letter of its token."""

    BOTH = "B"
    INPUT = "I"
    WEIGHT = "W"


class Twin(StrEnum):
    """Which of two micro-batches an operator of twins belongs to; the letter before its name."""

    FIRST = "1"
    SECOND = "2"


class Late(StrEnum):
    """What is done for the backward pass that the paired program before has left; the letter is P."""

    BACKWARD = "P"


Side = Direction | Twin | Late
"""Whose operator it is, in a program of two passes."""


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
    gradients: Gradients = Gradients.BOTH

    def __str__(self) -> str:
        mark = "b" if self.strand is Strand.BETA else ""
        letter = "F" if self.direction is Direction.FORWARD else self.gradients.value
        return f"{letter}{self.micro_batch}.{self.chunk}{mark}"

    @property
    def travels(self) -> bool:
        """Whether the block takes an input from one chunk and hands its output to the next."""
        return self.gradients is not Gradients.WEIGHT

    @property
    def whole(self) -> "Block":
        """The pass that the block belongs to; messages are named by it."""
        return replace(self, gradients=Gradients.BOTH)


@dataclass(frozen=True)
class Pair:
    """A paired block: two passes of different strands that run at the same time."""

    forward: Block
    backward: Block

    def __str__(self) -> str:
        return f"[{self.forward}|{self.backward}]"

    @property
    def blocks(self) -> tuple[Block, Block]:
        """Both; the backward pass first, as it frees memory."""
        return self.backward, self.forward


@dataclass(frozen=True)
class Twins:
    """The same pass of two micro-batches over one chunk, on different strands, at the same time.

    What a step begins and ends with, where a pass of the other direction is missing to pair with.
    """

    first: Block
    """Of the micro-batch that comes first: its gradients are added up first."""
    second: Block

    def __str__(self) -> str:
        return f"[{self.first}|{self.second}]"

    @property
    def blocks(self) -> tuple[Block, Block]:
        """Both, in the order of their micro-batches."""
        return self.first, self.second

    @property
    def direction(self) -> Direction:
        """Which pass."""
        return self.first.direction


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
class Gather:
    """Start to gather the parameters of a chunk from the ranks that hold parts of them."""

    chunk: int

    def __str__(self) -> str:
        return f"GATHER({self.chunk})"


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
class WaitGather:
    """Wait until the parameters of a chunk are there."""

    chunk: int

    def __str__(self) -> str:
        return f"WAIT(GATHER {self.chunk})"


@dataclass(frozen=True)
class Step:
    """Clip, update the parameters, clear the gradients."""

    def __str__(self) -> str:
        return "STEP"


Instruction = (
    Block
    | Pair
    | Twins
    | Send
    | Receive
    | Reduce
    | Gather
    | WaitSend
    | WaitReceive
    | WaitReduce
    | WaitGather
    | Step
)


def blocks_in(instruction: Instruction) -> tuple[Block, ...]:
    """The blocks that an instruction runs; none for any other kind."""
    match instruction:
        case Block():
            return (instruction,)
        case Pair() | Twins():
            return instruction.blocks
        case _:
            return ()


@dataclass(frozen=True)
class Compute:
    """Run a compute operator of the part."""

    operator: str
    side: Side | None = None
    """In a program of two passes: the one that the operator belongs to."""

    def __str__(self) -> str:
        return f"compute {_sided(self)}"


@dataclass(frozen=True)
class Start:
    """Issue a collective of the part on a stream."""

    operator: str
    stream: Stream
    side: Side | None = None

    def __str__(self) -> str:
        return f"start {_sided(self)} on {self.stream.value}"


@dataclass(frozen=True)
class Wait:
    """Make the result of a started collective available."""

    operator: str
    side: Side | None = None

    def __str__(self) -> str:
        return f"wait {_sided(self)}"


@dataclass(frozen=True)
class Barrier:
    """Wait on the host until everything that was issued has finished (DHelix section 5)."""

    def __str__(self) -> str:
        return "barrier"


Action = Compute | Start | Wait
Program = tuple[Action, ...]
"""Of one pass; of a backward pass also what the paired program before has left, where one has."""
ProgramKey = tuple[str, Direction]
PairAction = Action | Barrier
PairProgram = tuple[PairAction, ...]
PairKey = tuple[str, str]
"""Part or run whose forward pass runs, part or run whose backward pass runs."""


def is_late(action: PairAction) -> TypeGuard[Action]:
    """Whether it is done for the backward pass that the paired program before has left."""
    return not isinstance(action, Barrier) and action.side is Late.BACKWARD


def _sided(action: Action) -> str:
    return action.operator if action.side is None else f"{action.side.value}:{action.operator}"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Instructions of every stage and programs of every part; immutable, comparable, printable."""

    name: str
    chunks: int
    micro_batches: int
    stages: tuple[tuple[Instruction, ...], ...]
    programs: Mapping[ProgramKey, Program]
    splits: Mapping[tuple[str, Gradients], Program] = field(default_factory=dict)
    """Programs of backward passes whose weight gradients come later: ``INPUT`` and ``WEIGHT``."""
    pairs: Mapping[PairKey, PairProgram] = field(default_factory=dict)
    twins: Mapping[ProgramKey, PairProgram] = field(default_factory=dict)
    fused: int = 0
    """Most layers of a run (`braid.scheduling.fusion`); 0: programs are of single parts."""
    split: int = 1
    """Chunks of the layers' all-gathers and their GEMMs (`braid.scheduling.lowering.split`); 1: whole."""

    @property
    def trains(self) -> bool:
        """Whether the schedule has programs for backward passes (a validation schedule has none)."""
        return any(direction is Direction.BACKWARD for _, direction in self.programs)

    @cached_property
    def strands(self) -> tuple[Strand, ...]:
        """The strands in use."""
        found = {block.strand for stage in self.stages for i in stage for block in blocks_in(i)}
        return tuple(s for s in Strand if s in found)

    def blocks(self, stage: int) -> tuple[Block, ...]:
        """The blocks of a stage, in order; of a paired block both."""
        return tuple(block for i in self.stages[stage] for block in blocks_in(i))

    def to_text(self) -> str:
        """The schedule as text that `parse` reads back to an equal object."""
        lines = [
            f"braid schedule {VERSION}",
            f"name {self.name}",
            f"stages {len(self.stages)}",
            f"chunks {self.chunks}",
            f"micro_batches {self.micro_batches}",
            *([f"fused {self.fused}"] if self.fused else []),
            *([f"split {self.split}"] if self.split > 1 else []),
        ]
        for number, stage in enumerate(self.stages):
            lines += ["", f"stage {number}", *_stage_lines(stage)]
        for (part, direction), program in self.programs.items():
            lines += ["", f"program {part} {direction.value}", *(f"  {action}" for action in program)]
        for (part, gradients), program in self.splits.items():
            lines += ["", f"program {part} {gradients.value}", *(f"  {action}" for action in program)]
        for (first, second), pair in self.pairs.items():
            lines += ["", f"program {first}|{second}", *(f"  {action}" for action in pair)]
        for (part, direction), twin in self.twins.items():
            lines += ["", f"program {part} {direction.value * 2}", *(f"  {action}" for action in twin)]
        return "\n".join(lines) + "\n"


def _stage_lines(stage: tuple[Instruction, ...]) -> list[str]:
    """A line per block, after what is waited for before it and before what is sent of it; others in runs."""
    lines: list[str] = []
    behind = False
    for position, instruction in enumerate(stage):
        token = str(instruction)
        if _same_line(stage, position, behind) and len(lines[-1]) + 1 + len(token) <= COLUMNS:
            lines[-1] += f" {token}"
        else:
            lines.append(f"  {token}")
            behind = False
        behind = behind or isinstance(instruction, Block | Pair | Twins)
    return lines


def _same_line(stage: tuple[Instruction, ...], position: int, behind: bool) -> bool:
    """Whether an instruction continues the line; ``behind``: the line has its block already."""
    here, before = stage[position], stage[position - 1] if position else None
    match here:
        case Receive() | WaitReceive() | Block() | Pair() | Twins():
            return isinstance(before, Receive | WaitReceive | WaitSend) and not behind
        case WaitSend() if isinstance(before, Block | Pair | Twins):
            after = next((i for i in stage[position:] if not isinstance(i, WaitSend)), None)
            return isinstance(after, Send)
        case WaitSend():
            return isinstance(before, Receive | WaitReceive | WaitSend)
        case Send():
            return isinstance(before, Block | Pair | Twins | WaitSend | Send)
        case _:
            return type(before) is type(here)
