"""The instruction set of a step. Schedules and linked code are lists of these operations.

    Compute(what)    run an operator, or a part of the update, on the compute stream
    Start(what)      issue a transfer: a collective of a layer, a message, a sum of gradients, a gather
    Wait(what)       make the result of a transfer available
    Barrier()        wait on the host for all transfers of layers (DHelix section 5)
    Allocate(sum)    make zeroed memory for the gradients that operators add to next (ZeRO 2)
    Release(gather)  free a bucket's gathered parameters (ZeRO 3)
    Hand(...)        give the output of a pass to the next chunk, which is on the same stage
    Loss()           keep the model's output

In the text of a schedule ``what`` names an operator, and operations have no registers; `link` replaces the
name by the operator's `Node` and adds the registers that the operation reads, writes and frees.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.operators import Operator
from braid.scheduling.model.stages import Move


class Direction(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"


class PassKind(StrEnum):
    """The kind of computation in a pass; its letter begins the pass's text."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"
    END = "L"

    @property
    def direction(self) -> Direction:
        return Direction.FORWARD if self is PassKind.FORWARD else Direction.BACKWARD

    @property
    def travels(self) -> bool:
        """Whether the pass takes an input from one chunk and hands its output to the next."""
        return self not in (PassKind.WEIGHT, PassKind.END)


ENDING = (PassKind.BACKWARD, PassKind.WEIGHT, PassKind.END)
"""Kinds of passes that can complete a micro-batch's contribution to a chunk's weight gradients."""


class Strand(StrEnum):
    """One of two sequences of micro-batches whose passes may run on a rank at the same time."""

    ALPHA = "alpha"
    BETA = "beta"


class Pass(NamedTuple):
    """Computation of one micro-batch in one chunk, forward or backward, or a separated part of it."""

    kind: PassKind
    micro_batch: int
    chunk: int
    strand: Strand = Strand.ALPHA

    def __str__(self) -> str:
        mark = "b" if self.strand is Strand.BETA else ""
        return f"{self.kind.value}{self.micro_batch}.{self.chunk}{mark}"

    @property
    def direction(self) -> Direction:
        return self.kind.direction

    @property
    def forward(self) -> bool:
        return self.kind is PassKind.FORWARD

    @property
    def whole(self) -> "Pass":
        """The pass itself if it is a whole forward or backward pass, else the backward pass of which it is a
        part; messages are named by whole passes."""
        if self.kind in (PassKind.FORWARD, PassKind.BACKWARD):
            return self
        return Pass(PassKind.BACKWARD, self.micro_batch, self.chunk, self.strand)

    def after(self, layout: ParallelLayout) -> "Pass | None":
        """Return the pass that takes this pass's output; None at the end of the model."""
        return self._along(layout, 1 if self.forward else -1)

    def before(self, layout: ParallelLayout) -> "Pass | None":
        """Return the pass whose output is this pass's input; None at the begin of the model."""
        return self._along(layout, -1 if self.forward else 1)

    def _along(self, layout: ParallelLayout, distance: int) -> "Pass | None":
        chunk = layout.neighbour(self.chunk, distance)
        kind = PassKind.FORWARD if self.forward else PassKind.BACKWARD
        return None if chunk is None else Pass(kind, self.micro_batch, chunk, self.strand)


# -- objects of operations -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class Node:
    """An operator in a chunk, with the numbers of its registers and of its bits in the chunk's `Frame`."""

    operator: Operator
    unit: str
    """Name of the unit whose graph contains the operator."""
    place: int
    """Index of the unit in the chunk, in the order of the forward pass."""
    part: int
    """Index of the part in the chunk, in the order of the forward pass."""
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    """Registers that the operator writes; for a piece of a value, also the register of the whole value."""
    bit: int
    needs: int
    """Bit mask of the operators, and of the arrival of the input, that this operator needs done before it."""
    others: int = 0
    """For the operator that writes a value's last piece: bit mask of the operators that write its other
    pieces."""


@dataclass(frozen=True)
class Send:
    """Message that sends the input of the pass ``moved`` to the stage ``stage``."""

    moved: Pass
    stage: int

    def __str__(self) -> str:
        return f"SEND({self.moved}>{self.stage})"


@dataclass(frozen=True)
class Receive:
    """Message that receives the input of the pass ``moved`` from the stage ``stage``."""

    moved: Pass
    stage: int

    def __str__(self) -> str:
        return f"RECV({self.moved}<{self.stage})"


@dataclass(frozen=True)
class Reduce:
    """Sum of a chunk's gradients over the ranks of an axis; with chunk None, of the gradients' squared norm.

    ``bucket``: number of the only bucket that is summed, None for all buckets. ``move``: the only stage of
    the sum that runs, None for the whole sum.
    """

    chunk: int | None
    axis: str
    bucket: int | None = None
    move: Move | None = None

    def __str__(self) -> str:
        return f"REDUCE({'norm' if self.chunk is None else self.chunk} {self.axis})"


@dataclass(frozen=True)
class Gather:
    """All-gather of a chunk's parameters over an axis whose ranks each hold an updated shard.

    ``bucket``: number of the only bucket that is gathered, None for all. ``move``: the only stage that runs.
    """

    chunk: int
    axis: str
    bucket: int | None = None
    move: Move | None = None

    def __str__(self) -> str:
        return f"GATHER({self.chunk} {self.axis})"


@dataclass(frozen=True)
class Norm:
    """Instruction to compute the sum of the squares of this rank's gradients."""

    def __str__(self) -> str:
        return "NORM"


@dataclass(frozen=True)
class Clip:
    """Instruction to decide whether the update is skipped, its learning rate, and the clipping factor."""

    def __str__(self) -> str:
        return "CLIP"


@dataclass(frozen=True)
class Update:
    """Instruction to update the parameters of one bucket and clear its gradients."""

    chunk: int
    bucket: int

    def __str__(self) -> str:
        return f"UPDATE({self.chunk}/{self.bucket})"


@dataclass(frozen=True)
class Step:
    """Instruction to clip gradients, update all parameters of a rank and clear its gradients."""

    def __str__(self) -> str:
        return "STEP"


Message = Send | Receive
Shared = Reduce | Gather
"""Gradient sums and parameter gathers among ranks that hold the same parameters."""
Computed = str | Node | Norm | Clip | Update | Step
Transfer = str | Node | Send | Receive | Reduce | Gather
"""What `Start` and `Wait` transfer. A string names a collective of a layer; linked code has a `Node`
instead."""


def name_of(what: Computed | Transfer) -> str:
    """Return the name under which traces, profiles, tables, web pages and errors show an operation's
    object."""
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
    """Base of all operations: ``turn`` is the number of the pass, in a program or block, whose registers it
    reads, writes and frees."""

    turn: int = 0
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    frees: tuple[int, ...] = ()


@dataclass(frozen=True)
class Compute(Operation):
    """Run ``what`` on the compute stream."""

    what: Computed

    def __str__(self) -> str:
        return str(self.what)


@dataclass(frozen=True)
class Start(Operation):
    """Issue a transfer; memory for the registers that it writes is allocated at this point."""

    what: Transfer
    stream: Stream | None = None
    """Stream on which the collective was planned; None outside programs."""
    lone: bool = False
    """Whether the transfer's `Wait` is the very next operation, so that nothing overlaps it."""

    def __str__(self) -> str:
        return str(self.what)


@dataclass(frozen=True)
class Wait(Operation):
    """Wait for a transfer; after this its result is available, and a sent value may be freed."""

    what: Transfer
    lone: bool = False

    def __str__(self) -> str:
        return f"WAIT({str(self.what).replace('(', ' ')}"


@dataclass(frozen=True)
class Barrier(Operation):
    """Make the host wait until all collectives of layers that are under way have ended."""


@dataclass(frozen=True)
class Allocate(Operation):
    """Allocate zeroed memory for a bucket's gradients (ZeRO 2); it lives until their sum is waited for."""

    what: Reduce


@dataclass(frozen=True)
class Release(Operation):
    """Free a bucket's gathered parameters (ZeRO 3), whose memory was allocated when their gather started."""

    what: Gather


@dataclass(frozen=True)
class Hand(Operation):
    """Hand a pass's output to the next chunk on the same stage, into register ``register`` of frame number
    ``to`` of the stretch."""

    to: int
    register: int


@dataclass(frozen=True)
class Loss(Operation):
    """Keep the model's output, the loss of every token of a micro-batch."""
