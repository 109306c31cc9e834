"""Linked code: the operations of a stage's ranks in one step, with nothing left to derive.

`link` makes code from a schedule; executor, simulator, memory, validation and drawings read it. The code of a
stage is a tuple of stretches, one for each instruction of the schedule. A stretch runs a body of operations
on frames: the registers of a micro-batch in a chunk. Equal stretches share one body, so that code of 600,000
operations is small. `Stretch.operations` over all stretches is the flat form.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.operators import Parameters, Part, Value
from braid.scheduling.schedule.buckets import Buckets
from braid.scheduling.schedule.operations import Compute, Gather, Norm, Operation, Pass, PassKind, Start, Step
from braid.scheduling.schedule.schedule import Instruction, Prefetch, Schedule, passes_in


@dataclass(frozen=True, eq=False)
class Frame:
    """The registers of a micro-batch in a chunk: one per value of the chunk's units.

    The output of a unit and the input of the next unit are one register, and so are their gradients. Progress
    is kept as bits: one per operator, then arrival and departure for each direction.
    """

    names: tuple[str, ...]
    values: tuple[Value, ...]
    owners: tuple[int, ...]
    """For every register, the register whose memory it shares; itself if the memory is its own."""
    keeps: Mapping[int, int]
    """Registers that hold another register's memory in addition to their own."""
    constants: Mapping[str, tuple[int, ...]]
    """Registers that the executor fills (tokens, targets, loss_scale), by name; not memory of the frame."""
    bits: Mapping[tuple[int, bool, str], int]
    """Bit number of an operator, by (index of its unit in the chunk, whether in the forward graph, name)."""
    operators: tuple[str, ...]
    """Names of operators, by bit number."""
    input: int | None
    """Register that receives the previous chunk's output; None for the model's first chunk."""
    output: int
    input_gradient: int | None
    output_gradient: int | None
    makers: tuple[int, int]
    """Bit masks of the operators that write the output and the gradient of the input."""

    def entry(self, forward: bool) -> int | None:
        """Return the register from which a pass takes its input; None for the model's first chunk."""
        return self.input if forward else self.output_gradient

    def exit(self, forward: bool) -> int | None:
        """Return the register in which a pass leaves its output."""
        return self.output if forward else self.input_gradient

    def arrival(self, forward: bool) -> int:
        """Return the bit that is set once a pass has its input."""
        return 1 << len(self.operators) + (not forward)

    def departure(self, forward: bool) -> int:
        """Return the bit that is set once another chunk has the output of a pass."""
        return 1 << len(self.operators) + 2 + (not forward)

    @cached_property
    def complete(self) -> int:
        """The bits of all operators."""
        return (1 << len(self.operators)) - 1

    @cached_property
    def memories(self) -> tuple[tuple[int, ...], ...]:
        """For every register, the memories it holds: its owner's, and perhaps one more."""
        return tuple(
            (owner, self.owners[self.keeps[register]]) if register in self.keeps else (owner,)
            for register, owner in enumerate(self.owners)
        )

    @cached_property
    def holders(self) -> tuple[int, ...]:
        """For every register, a bit mask of all registers that hold its memory."""
        masks = [0] * len(self.owners)
        for register, memories in enumerate(self.memories):
            for memory in memories:
                masks[memory] |= 1 << register
        return tuple(masks)


@dataclass(frozen=True, eq=False)
class Body:
    """Operations that equal stretches share."""

    operations: tuple[Operation, ...]


@dataclass(frozen=True)
class Stretch:
    """The linked form of one instruction."""

    instruction: Instruction
    passes: tuple[Pass, ...]
    """Passes of a block and the next passes on the stage; for a transfer, the pass whose register it uses."""
    frames: tuple[Frame, ...]
    body: Body

    @property
    def block_passes(self) -> tuple[Pass, ...]:
        """The passes that the stretch runs; empty for a transfer."""
        return passes_in(self.instruction)

    @property
    def paired(self) -> bool:
        """Whether several passes run at the same time."""
        return sum(pass_.kind is not PassKind.END for pass_ in self.block_passes) > 1

    @property
    def operations(self) -> tuple[Operation, ...]:
        return self.body.operations


@dataclass(frozen=True, eq=False)
class Code:
    """A schedule, linked."""

    schedule: Schedule
    layout: ParallelLayout
    kinds: tuple[str, ...]
    """Kinds of the model's layers."""
    parts: Mapping[str, Part]
    """The units that the schedule's programs run, by name."""
    stages: tuple[tuple[Stretch, ...], ...]
    buckets: Buckets

    def parameters(self, chunk: int, bucket: int | None = None) -> Parameters:
        """Return the parameters of a chunk, or of a bucket, on a tensor-parallel group's fullest rank."""
        buckets = self.buckets.of(chunk)
        counted = buckets if bucket is None else (buckets[bucket],)
        return sum((spec.parameters for spec in counted), Parameters())


def update_begins(stretches: Sequence[Stretch]) -> int:
    """Return the index of the first stretch of norm or update, behind all activations and messages."""
    first = len(stretches)
    for at, stretch in enumerate(stretches):
        if stretch.frames:
            first = len(stretches)
        elif isinstance(stretch.instruction, Compute) and isinstance(stretch.instruction.what, Norm | Step):
            first = min(first, at)
    return first


def prefetched(stretches: Sequence[Stretch]) -> tuple[Gather, ...]:
    """Return the gathers that a step's end starts for the next step."""
    behind = len(stretches) > 1 and isinstance(stretches[-1].instruction, Prefetch)
    starts = (op.what for op in (stretches[-1].operations if behind else ()) if isinstance(op, Start))
    return tuple(what for what in starts if isinstance(what, Gather))
