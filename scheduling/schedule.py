"""A schedule: what every pipeline stage does in one step. As text: `braid.scheduling.schedule_text`.

Two levels. Per stage a list of instructions:

    F3.1            forward pass of micro-batch 3 on chunk 1          (``F3.1b``: on strand beta)
    B3.1            backward pass of it, input and weight gradients
    I3.1  W3.1      input gradients alone; the weight gradients, which may come later
    L3.1            the end of backward pass B3.1, which an earlier block has left
    [F5.0b|B1.1]    a block of several passes that run at the same time, here a forward and a backward one
    [F0.0|F1.0b]    the same pass of two micro-batches
    [B3.1|REDUCE(1 dp)]  a block in which the gradients of each bucket of chunk 1 are summed, once final
    [F0.1|GATHER(1 dp)]  a block before whose use of a bucket of chunk 1 its parameters are gathered (ZeRO)
    SEND(F3.2>1)    start to send what F3.2 needs to stage 1
    RECV(F3.2<0)    start to receive what F3.2 needs from stage 0
    REDUCE(1 dp)    start to sum the gradients of chunk 1 over an axis of the mesh
    NORM            square this rank's gradients;  REDUCE(norm tp): start to sum the squares over an axis
    WAIT(...)       wait for the SEND, RECV or REDUCE inside, such as WAIT(RECV F3.2<0)
    PREFETCH        start to gather the parameters that are used first: at the begin; or behind STEP, for the
                    step that follows, where each bucket is gathered as soon as it is updated
    STEP            update the parameters

and, for units (``layer``, ``embedding+2*layer``) of one pass or several, an operator program:

    compute NAME        run a compute operator
    start NAME on S     issue a collective, planned on stream S (where its group is, ranks see for themselves)
    wait NAME           make its result available
    barrier             wait for everything that is under way

``program F:layer`` is that of a layer's forward pass; ``program F:layer|B:layer`` that of one beside a
layer's backward pass, where operators carry the number of their pass: ``0:qkv``, ``1:qkv.dgrad``. What a
program does not name of its backward pass is left to ``L``: ``program F:layer|B:layer|L:layer`` takes up
(``2:qkv.wgrad``) what the unit before has left, in the same block or in the one that names it; without one,
these operators are skipped. `braid.scheduling.link` says which program runs when.

All ranks of a stage run the same lists in the same order.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from braid.scheduling.operators import Stream
from braid.scheduling.partition import Partition
from braid.scheduling.spec import ParallelLayout
from braid.scheduling.stages import Move


class Direction(StrEnum):
    """Which way a pass goes through the model."""

    FORWARD = "F"
    BACKWARD = "B"


class PassKind(StrEnum):
    """What a pass computes; the letter of its token."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"
    END = "L"

    @property
    def direction(self) -> Direction:
        """Which way it goes."""
        return Direction.FORWARD if self is PassKind.FORWARD else Direction.BACKWARD

    @property
    def travels(self) -> bool:
        """Whether the pass takes an input from one chunk and hands its output to the next."""
        return self not in (PassKind.WEIGHT, PassKind.END)


ENDING = (PassKind.BACKWARD, PassKind.WEIGHT, PassKind.END)
"""Passes behind which no other one of the micro-batch need add to gradients."""


class Strand(StrEnum):
    """The streams of micro-batches that may run on a rank at the same time."""

    ALPHA = "alpha"
    BETA = "beta"


class Pass(NamedTuple):
    """One pass of one micro-batch through one chunk."""

    kind: PassKind
    micro_batch: int
    chunk: int
    strand: Strand = Strand.ALPHA

    def __str__(self) -> str:
        mark = "b" if self.strand is Strand.BETA else ""
        return f"{self.kind.value}{self.micro_batch}.{self.chunk}{mark}"

    @property
    def direction(self) -> Direction:
        """Which way the pass goes through the model."""
        return self.kind.direction

    @property
    def forward(self) -> bool:
        """Whether it goes forward."""
        return self.kind is PassKind.FORWARD

    @property
    def whole(self) -> "Pass":
        """The pass that this one is a part of; messages are named by it."""
        if self.kind in (PassKind.FORWARD, PassKind.BACKWARD):
            return self
        return Pass(PassKind.BACKWARD, self.micro_batch, self.chunk, self.strand)

    def after(self, layout: ParallelLayout) -> "Pass | None":
        """The pass that takes what this one produces; None at the end of the model."""
        return self._along(layout, 1 if self.forward else -1)

    def before(self, layout: ParallelLayout) -> "Pass | None":
        """The pass whose output this one takes; None at the begin."""
        return self._along(layout, -1 if self.forward else 1)

    def _along(self, layout: ParallelLayout, distance: int) -> "Pass | None":
        chunk = layout.neighbour(self.chunk, distance)
        kind = PassKind.FORWARD if self.forward else PassKind.BACKWARD
        return None if chunk is None else Pass(kind, self.micro_batch, chunk, self.strand)


@dataclass(frozen=True)
class Send:
    """Start to send the input of ``moved`` to another stage."""

    moved: Pass
    stage: int

    def __str__(self) -> str:
        return f"SEND({self.moved}>{self.stage})"


@dataclass(frozen=True)
class Receive:
    """Start to receive the input of ``moved`` from another stage."""

    moved: Pass
    stage: int

    def __str__(self) -> str:
        return f"RECV({self.moved}<{self.stage})"


@dataclass(frozen=True)
class Reduce:
    """Start to sum over the ranks of an axis: the gradients of a chunk, or (None) the squares of the norm.

    In linked code alone: ``bucket``: of that bucket of the chunk (`braid.scheduling.buckets`); None: of all;
    ``move``: a stage of it; None: all of it.
    """

    chunk: int | None
    axis: str
    bucket: int | None = None
    move: Move | None = None

    def __str__(self) -> str:
        return f"REDUCE({'norm' if self.chunk is None else self.chunk} {self.axis})"


@dataclass(frozen=True)
class Gather:
    """Gather the parameters of a chunk from the ranks of an axis, each of which has updated a share of them.

    In linked code alone: ``bucket``: of that bucket of the chunk; ``move``: a stage of it.
    """

    chunk: int
    axis: str
    bucket: int | None = None
    move: Move | None = None

    def __str__(self) -> str:
        return f"GATHER({self.chunk} {self.axis})"


Transfer = Send | Receive | Reduce


@dataclass(frozen=True)
class Block:
    """Passes that run at the same time, sums of gradients that become final and parameters that are gathered.

    ``sums`` are started bucket by bucket, behind the last operator that adds to a bucket's gradients; those
    over tp come first and are waited for at once, the others stay under way behind the block. Buckets of
    ``gathers`` that are not there are waited for before the first operator that uses them, and were started
    as long before as `Schedule.prefetch` says.
    """

    passes: tuple[Pass, ...]
    sums: tuple[Reduce, ...] = ()
    gathers: tuple[Gather, ...] = ()

    def __str__(self) -> str:
        texts = [*map(str, self.passes), *map(str, self.gathers), *map(str, self.sums)]
        return texts[0] if len(texts) == 1 else f"[{'|'.join(texts)}]"


@dataclass(frozen=True)
class Await:
    """Wait until a transfer is complete: a result is there, or what was sent may be let go."""

    transfer: Transfer

    def __str__(self) -> str:
        return f"WAIT({str(self.transfer).replace('(', ' ')}"


@dataclass(frozen=True)
class Prefetch:
    """Start to gather the parameters that are used first; behind STEP: by the next step, once updated."""

    def __str__(self) -> str:
        return "PREFETCH"


@dataclass(frozen=True)
class Norm:
    """Square and add up this rank's gradients."""

    def __str__(self) -> str:
        return "NORM"


@dataclass(frozen=True)
class Step:
    """Clip, update the parameters, clear the gradients."""

    def __str__(self) -> str:
        return "STEP"


Instruction = Block | Send | Receive | Reduce | Await | Prefetch | Norm | Step


def passes_in(instruction: Instruction) -> tuple[Pass, ...]:
    """The passes that an instruction runs; none for any but a block."""
    return instruction.passes if isinstance(instruction, Block) else ()


def sums_in(instruction: Instruction) -> tuple[Reduce, ...]:
    """The sums of gradients that an instruction starts."""
    if isinstance(instruction, Block):
        return instruction.sums
    return (instruction,) if isinstance(instruction, Reduce) and instruction.chunk is not None else ()


@dataclass(frozen=True)
class Compute:
    """Run a compute operator; ``turn``: the number of its pass in the program."""

    operator: str
    turn: int = 0


@dataclass(frozen=True)
class Start:
    """Issue a collective; the stream is the one it was planned on."""

    operator: str
    stream: Stream
    turn: int = 0


@dataclass(frozen=True)
class Wait:
    """Make the result of a started collective available."""

    operator: str
    turn: int = 0


@dataclass(frozen=True)
class Barrier:
    """Wait on the host until everything that was issued has finished (DHelix section 5)."""


Action = Compute | Start | Wait | Barrier
Program = tuple[Action, ...]


@dataclass(frozen=True, order=True)
class Side:
    """One pass of a program: its kind and the unit that it goes through."""

    kind: PassKind
    unit: str

    def __str__(self) -> str:
        return f"{self.kind.value}:{self.unit}"


Sides = tuple[Side, ...]
"""What a program is for, in the order of the passes in a block's token."""


def on_side(program: Program, turn: int) -> Iterator[Compute | Start | Wait]:
    """The actions of one pass of a program."""
    return (action for action in program if not isinstance(action, Barrier) and action.turn == turn)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Instructions of every stage and programs of every unit; immutable, comparable, printable."""

    name: str
    chunks: int
    micro_batches: int
    stages: tuple[tuple[Instruction, ...], ...]
    programs: Mapping[Sides, Program]
    unit_layers: int = 0
    """Most layers of a unit (`braid.scheduling.units`); 0: every part is a unit of its own."""
    partitions: tuple[Partition, ...] = ()
    """How collectives are cut; what none is for runs whole."""
    prefetch: int = 0
    """Where gradients are in shares (ZeRO 2): sums of buckets under way at most; 0: each is waited for at
    once. Where parameters are, too (ZeRO 3): so many uses ahead a bucket is gathered; 0: when it is used."""
    keep: int = 0
    """ZeRO 3: a bucket that is used again within so many uses is not let go of; at least ``prefetch``."""

    @property
    def trains(self) -> bool:
        """Whether the schedule has programs for backward passes (a validation schedule has none)."""
        return any(side.kind is not PassKind.FORWARD for sides in self.programs for side in sides)

    @cached_property
    def passes(self) -> tuple[tuple[Pass, ...], ...]:
        """The passes of every stage, in order; of a block all."""
        return tuple(tuple(one for i in stage for one in passes_in(i)) for stage in self.stages)

    @cached_property
    def strands(self) -> tuple[Strand, ...]:
        """The strands in use."""
        found = {one.strand for stage in self.passes for one in stage}
        return tuple(strand for strand in Strand if strand in found)
