"""Linked code: what the ranks of a stage do in one step, operation by operation, with nothing left to derive.

`braid.scheduling.link` makes it of a schedule; executor, simulator, memory, validation and drawings read it.
Per stage it is a tuple of stretches, one for each instruction of the schedule. A stretch runs a body of
operations on frames: the registers of a micro-batch in a chunk. Equal stretches share one body, so code of
600,000 operations is small. `Stretch.operations` over all stretches is the flat form.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from braid.scheduling.buckets import Buckets
from braid.scheduling.operators import Operator, Parameters, Part, Value
from braid.scheduling.schedule import (
    Await,
    Direction,
    Gather,
    Instruction,
    Norm,
    Pass,
    PassKind,
    Prefetch,
    Reduce,
    Schedule,
    Step,
    Transfer,
    passes_in,
)
from braid.scheduling.spec import ParallelLayout


@dataclass(frozen=True, eq=False)
class Frame:
    """Which registers a micro-batch has in a chunk: one per value of the chunk's units, handed on in place.

    Where one unit's output is the next one's input, they are one register, and so are their gradients. What
    must have happened is kept as bits: one per operator, then arrival and departure, both ways.
    """

    names: tuple[str, ...]
    values: tuple[Value, ...]
    owners: tuple[int, ...]
    """Per register, the one whose memory it shares, or itself."""
    keeps: Mapping[int, int]
    """Registers that hold the memory of another one beside their own."""
    constants: Mapping[str, tuple[int, ...]]
    """Registers that the executor fills (tokens, targets, loss_scale), by name; no memory of the frame."""
    bits: Mapping[tuple[int, bool, str], int]
    """Bit of an operator: place of its unit in the chunk, whether in the forward graph, name."""
    operators: tuple[str, ...]
    """Names by bit."""
    input: int | None
    """Register of what the chunk before hands on; None for the model's first chunk."""
    output: int
    input_gradient: int | None
    output_gradient: int | None
    makers: tuple[int, int]
    """Bits of what makes the output, and the gradient of the input."""

    def entry(self, forward: bool) -> int | None:
        """The register that a pass takes its input from."""
        return self.input if forward else self.output_gradient

    def exit(self, forward: bool) -> int | None:
        """The register that a pass leaves its output in."""
        return self.output if forward else self.input_gradient

    def arrival(self, forward: bool) -> int:
        """The bit that says that a pass has its input."""
        return 1 << len(self.operators) + (not forward)

    def departure(self, forward: bool) -> int:
        """The bit that says that another chunk has the output of a pass."""
        return 1 << len(self.operators) + 2 + (not forward)

    @cached_property
    def complete(self) -> int:
        """The bits of all operators."""
        return (1 << len(self.operators)) - 1

    @cached_property
    def memories(self) -> tuple[tuple[int, ...], ...]:
        """Per register, whose memory it holds: that of its owner, and perhaps that of one more."""
        return tuple(
            (owner, self.owners[self.keeps[register]]) if register in self.keeps else (owner,)
            for register, owner in enumerate(self.owners)
        )

    @cached_property
    def holders(self) -> tuple[int, ...]:
        """Per register, a mask of all those that hold its memory."""
        masks = [0] * len(self.owners)
        for register, memories in enumerate(self.memories):
            for memory in memories:
                masks[memory] |= 1 << register
        return tuple(masks)


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
class Message:
    """An input on its way to another stage. Which one it is stands in the stretch: all share their bodies."""

    direction: Direction
    sent: bool
    """Else received."""


@dataclass(frozen=True)
class Clip:
    """Decide the update: whether it is one, the learning rate, and what gradients are multiplied with."""


@dataclass(frozen=True)
class Update:
    """Update a bucket's parameters, and clear their gradients."""

    chunk: int
    bucket: int


What = Node | Message | Reduce | Gather | Norm | Step | Clip | Update
"""What runs or travels."""


def name_of(what: What) -> str:
    """The name of an operation: in traces, profiles, tables, pages and errors."""
    match what:
        case Node():
            return what.operator.own_name
        case Message(direction, sent):
            return f"{'send' if sent else 'receive'} {direction.value}"
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


@dataclass(frozen=True, eq=False, kw_only=True)
class Operation:
    """``turn``: the pass of the stretch, by number, whose frame it reads, writes and frees registers of."""

    turn: int = 0
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    frees: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Compute(Operation):
    """Run an operator, the norm or the update on the compute stream."""

    what: Node | Norm | Step | Clip | Update


@dataclass(frozen=True, eq=False, kw_only=True)
class Start(Operation):
    """Issue a transfer. What it writes has memory from here on."""

    what: Node | Message | Reduce | Gather
    lone: bool = False
    """Whether nothing runs before its wait."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Wait(Operation):
    """Wait for a transfer; what it writes is there from here on."""

    what: Node | Message | Reduce | Gather
    lone: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class Allocate(Operation):
    """Make memory, all zeros, for a bucket's gradients; it lives until their sum is waited for (ZeRO 2)."""

    what: Reduce


@dataclass(frozen=True, eq=False, kw_only=True)
class Release(Operation):
    """Let go of a bucket's parameters, which have memory from the start of the gather on (ZeRO 3)."""

    what: Gather


@dataclass(frozen=True, eq=False, kw_only=True)
class Barrier(Operation):
    """Wait on the host for everything that is under way."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Hand(Operation):
    """Give the output of a pass to its next chunk, on this stage: the register of pass ``to``."""

    to: int
    register: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Loss(Operation):
    """Keep the model's output."""


@dataclass(frozen=True, eq=False)
class Body:
    """Operations that equal stretches share."""

    operations: tuple[Operation, ...]


@dataclass(frozen=True)
class Stretch:
    """What one instruction comes to."""

    instruction: Instruction
    passes: tuple[Pass, ...]
    """Those of a block, and those that it hands something to. Of a transfer: whose register it uses."""
    frames: tuple[Frame, ...]
    body: Body

    @property
    def transfer(self) -> Transfer | None:
        """What it begins or waits for, if it is one of those instructions."""
        one = self.instruction.transfer if isinstance(self.instruction, Await) else self.instruction
        return one if isinstance(one, Transfer) else None

    @property
    def block_passes(self) -> tuple[Pass, ...]:
        """The passes that it runs; none for a transfer."""
        return passes_in(self.instruction)

    @property
    def paired(self) -> bool:
        """Whether several passes run at the same time."""
        return sum(one.kind is not PassKind.END for one in self.block_passes) > 1

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The body's."""
        return self.body.operations


@dataclass(frozen=True, eq=False)
class Code:
    """A schedule, linked."""

    schedule: Schedule
    layout: ParallelLayout
    kinds: tuple[str, ...]
    """Of the model's layers."""
    parts: Mapping[str, Part]
    """Those that the schedule's programs are of."""
    stages: tuple[tuple[Stretch, ...], ...]
    buckets: Buckets

    def parameters(self, chunk: int, bucket: int | None = None) -> Parameters:
        """Of a chunk, or of a bucket of it, on the fullest rank of a tensor-parallel group."""
        own = self.buckets.of(chunk)
        held = own if bucket is None else (own[bucket],)
        return sum((one.parameters for one in held), Parameters())


def update_begins(stretches: Sequence[Stretch]) -> int:
    """The first stretch of the norm or of the update, behind all that touch activations and messages."""
    first = len(stretches)
    for at, stretch in enumerate(stretches):
        if stretch.frames:
            first = len(stretches)
        elif isinstance(stretch.instruction, Norm | Step):
            first = min(first, at)
    return first


def prefetched(stretches: Sequence[Stretch]) -> tuple[Gather, ...]:
    """What the step before begins to gather."""
    behind = len(stretches) > 1 and isinstance(stretches[-1].instruction, Prefetch)
    starts = (one.what for one in (stretches[-1].operations if behind else ()) if isinstance(one, Start))
    return tuple(what for what in starts if isinstance(what, Gather))
