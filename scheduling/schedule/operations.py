"""The instruction set: what ranks do in a step. Schedules and linked code are lists of these operations.

    Compute(what)    run an operator, or a part of the update, on the compute stream
    Start(what)      issue a transfer: a collective of a layer, a message, a sum of gradients, a gather
    Wait(what)       make the result of a transfer available
    Barrier()        wait on the host for all transfers of layers (DHelix section 5)
    Allocate(sum)    make memory, all zeros, for gradients that are added up next (ZeRO 2)
    Release(gather)  let go of a bucket's parameters (ZeRO 3)
    Hand(...)        give the output of a pass to the next chunk, which is on the same stage
    Loss()           keep the model's output

In the text of a schedule ``what`` names an operator and no operation has registers; `link` puts the
operator's `Node` in place of its name, and the registers that it reads, writes and frees.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.operators import Operator
from braid.scheduling.model.stages import Move


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


# -- what an operation is about ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class Node:
    """An operator at its place in a chunk."""

    operator: Operator
    unit: str
    """Of parts, whose graph the operator is of."""
    place: int
    """Of the unit in the chunk, in the order of the forward pass."""
    part: int
    """Of the chunk, in the order of the forward pass."""
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    """Registers; of a piece also the one of the whole value that has its rows."""
    bit: int
    needs: int
    """Bits of what has to be done before it begins."""
    others: int = 0
    """Of the last piece, which completes the whole value: bits of the others."""


@dataclass(frozen=True)
class Send:
    """The input of ``moved``, on its way to another stage."""

    moved: Pass
    stage: int

    def __str__(self) -> str:
        return f"SEND({self.moved}>{self.stage})"


@dataclass(frozen=True)
class Receive:
    """The input of ``moved``, on its way from another stage."""

    moved: Pass
    stage: int

    def __str__(self) -> str:
        return f"RECV({self.moved}<{self.stage})"


@dataclass(frozen=True)
class Reduce:
    """A sum over the ranks of an axis: of the gradients of a chunk, or (None) of the squares of the norm.

    ``bucket``: of that bucket of the chunk; None: of all. ``move``: one stage of the sum; None: all of it.
    """

    chunk: int | None
    axis: str
    bucket: int | None = None
    move: Move | None = None

    def __str__(self) -> str:
        return f"REDUCE({'norm' if self.chunk is None else self.chunk} {self.axis})"


@dataclass(frozen=True)
class Gather:
    """The parameters of a chunk, of which each rank of an axis has updated a shard.

    ``bucket``, ``move``: as of `Reduce`.
    """

    chunk: int
    axis: str
    bucket: int | None = None
    move: Move | None = None

    def __str__(self) -> str:
        return f"GATHER({self.chunk} {self.axis})"


@dataclass(frozen=True)
class Norm:
    """Square and add up this rank's gradients."""

    def __str__(self) -> str:
        return "NORM"


@dataclass(frozen=True)
class Clip:
    """Decide the update: whether there is one, the learning rate, and what gradients are multiplied with."""

    def __str__(self) -> str:
        return "CLIP"


@dataclass(frozen=True)
class Update:
    """Update the parameters of a bucket, and clear its gradients."""

    chunk: int
    bucket: int

    def __str__(self) -> str:
        return f"UPDATE({self.chunk}/{self.bucket})"


@dataclass(frozen=True)
class Step:
    """Clip, update all parameters, clear all gradients."""

    def __str__(self) -> str:
        return "STEP"


Message = Send | Receive
Shared = Reduce | Gather
"""Transfers of what replicas share."""
Computed = str | Node | Norm | Clip | Update | Step
Transfer = str | Node | Send | Receive | Reduce | Gather
"""A name stands for a collective of a layer, as a `Node` does."""


def name_of(what: Computed | Transfer) -> str:
    """The name of an operation: in traces, profiles, tables, pages and errors."""
    match what:
        case str():
            return what
        case Node():
            return what.operator.own_name
        case Send(moved):
            return f"send {moved.direction.value}"
        case Receive(moved):
            return f"receive {moved.direction.value}"
        case Reduce(chunk, axis, _, move):
            along = axis if move is None else move.factor
            return f"norm {axis}" if chunk is None else f"gradients.{chunk} {along}"
        case Gather(chunk, axis, _, move):
            return f"parameters.{chunk} {axis if move is None else move.factor}"
        case Norm():
            return "norm"
        case Step() | Update():
            return "optimizer"
        case Clip():
            return "clip"


# -- operations ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Operation:
    """``turn``: the number of a pass in the program or block; its registers are read, written and freed."""

    turn: int = 0
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    frees: tuple[int, ...] = ()


@dataclass(frozen=True)
class Compute(Operation):
    """Run on the compute stream."""

    what: Computed

    def __str__(self) -> str:
        return str(self.what)


@dataclass(frozen=True)
class Start(Operation):
    """Issue a transfer. What it writes has memory from here on."""

    what: Transfer
    stream: Stream | None = None
    """In a program: the stream that the collective was planned on."""
    lone: bool = False
    """True if nothing runs before its wait."""

    def __str__(self) -> str:
        return str(self.what)


@dataclass(frozen=True)
class Wait(Operation):
    """Wait for a transfer: what it writes is there from here on, what was sent may be let go."""

    what: Transfer
    lone: bool = False

    def __str__(self) -> str:
        return f"WAIT({str(self.what).replace('(', ' ')}"


@dataclass(frozen=True)
class Barrier(Operation):
    """Wait on the host for all transfers of layers that are under way."""


@dataclass(frozen=True)
class Allocate(Operation):
    """Make memory, all zeros, for a bucket's gradients; it lives until their sum is waited for."""

    what: Reduce


@dataclass(frozen=True)
class Release(Operation):
    """Let go of a bucket's parameters, which have memory from the start of the gather on."""

    what: Gather


@dataclass(frozen=True)
class Hand(Operation):
    """Give the output of a pass to its next chunk, on this stage: register ``register`` of pass ``to``."""

    to: int
    register: int


@dataclass(frozen=True)
class Loss(Operation):
    """Keep the model's output."""
