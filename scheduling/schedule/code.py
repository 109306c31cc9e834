"""Linked code: what the ranks of a stage do in one step, operation by operation, with nothing left to derive.

`link` makes it of a schedule; executor, simulator, memory, validation and drawings read it.
Per stage it is a tuple of stretches, one for each instruction of the schedule. A stretch runs a body of
operations on frames: the registers of a micro-batch in a chunk. Equal stretches share one body, so code of
600,000 operations is small. `Stretch.operations` over all stretches is the flat form.
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
        elif isinstance(stretch.instruction, Compute) and isinstance(stretch.instruction.what, Norm | Step):
            first = min(first, at)
    return first


def prefetched(stretches: Sequence[Stretch]) -> tuple[Gather, ...]:
    """What the step before begins to gather."""
    behind = len(stretches) > 1 and isinstance(stretches[-1].instruction, Prefetch)
    starts = (one.what for one in (stretches[-1].operations if behind else ()) if isinstance(one, Start))
    return tuple(what for what in starts if isinstance(what, Gather))
