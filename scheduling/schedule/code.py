"""Linked code: the operations of a stage's ranks in one step, with nothing left to derive.

`link` makes code from a schedule; executor, simulator, memory, validation and drawings read it. The code of a
stage is a tuple of stretches, one for each instruction of the schedule. A stretch runs a *body* of operations
on frames: the registers of a micro-batch in a chunk. Equal stretches share one tuple of operations, so that
code of 600,000 operations is small, and readers remember results by the tuple's identity.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.operators import Part, Value
from braid.scheduling.model.parameters import Parameters
from braid.scheduling.schedule.buckets import Buckets, BucketSpec
from braid.scheduling.schedule.operations import Compute, Gather, Norm, Operation, Pass, PassKind, Start, Step
from braid.scheduling.schedule.schedule import Instruction, Prefetch, Schedule, passes_in


@dataclass(frozen=True, eq=False)
class Frame:
    """Layout of the registers that one micro-batch has in a chunk: one per value of the chunk's units.

    A unit's output and the next unit's input are one register, and so are their gradients. Progress is kept
    in a bit mask: one bit per operator, then bits for arrival and departure in each direction.
    """

    names: tuple[str, ...]
    values: tuple[Value, ...]
    owners: tuple[int, ...]
    """For every register, the register whose memory it uses; this is the register itself unless it is an
    alias."""
    keeps: Mapping[int, int]
    """Register -> another register whose memory it also keeps alive (attention's saved value: its output)."""
    constants: Mapping[str, tuple[int, ...]]
    """Name (tokens, targets, loss_scale) -> registers that the executor fills; their memory does not
    count."""
    bits: Mapping[tuple[int, bool, str], int]
    """(index of the unit in the chunk, whether the graph is the forward one, operator name) -> bit number."""
    operators: tuple[str, ...]
    """Names of the chunk's operators; an operator's index is its bit number."""
    input: int | None
    """Register that receives the previous chunk's output; None for the model's first chunk."""
    output: int
    input_gradient: int | None
    output_gradient: int | None
    makers: tuple[int, int]
    """Bit mask of the operator that writes the chunk's output, and of the one that writes its input
    gradient."""

    def entry(self, forward: bool) -> int | None:
        """Return the register from which a pass takes its input; None for the model's first chunk."""
        return self.input if forward else self.output_gradient

    def exit(self, forward: bool) -> int | None:
        """Return the register that holds a pass's output; None if a backward pass passes no gradient on."""
        return self.output if forward else self.input_gradient

    def arrival(self, forward: bool) -> int:
        """Return the bit (as a mask) that is set once the input of the forward or backward pass has
        arrived."""
        return 1 << len(self.operators) + (not forward)

    def departure(self, forward: bool) -> int:
        """Return the bit (as a mask) that is set once the pass's output has left for the next chunk."""
        return 1 << len(self.operators) + 2 + (not forward)

    @cached_property
    def complete(self) -> int:
        """Bit mask of all operators of the chunk."""
        return (1 << len(self.operators)) - 1

    @cached_property
    def memories(self) -> tuple[tuple[int, ...], ...]:
        """For every register, the registers whose memory it keeps alive: its owner, and perhaps one more."""
        return tuple(
            (owner, self.owners[self.keeps[register]]) if register in self.keeps else (owner,)
            for register, owner in enumerate(self.owners)
        )

    @cached_property
    def holders(self) -> tuple[int, ...]:
        """For every register, the bit mask of all registers that keep its memory alive."""
        masks = [0] * len(self.owners)
        for register, memories in enumerate(self.memories):
            for memory in memories:
                masks[memory] |= 1 << register
        return tuple(masks)


class Stretch(NamedTuple):
    """One instruction of a stage in linked code: its operations, and the frames on which they work."""

    instruction: Instruction
    passes: tuple[Pass, ...]
    """Passes to which ``frames`` belong: a block's passes, then passes on this stage that take their outputs;
    for a message, the pass whose register is sent or received."""
    frames: tuple[Frame, ...]
    operations: tuple[Operation, ...]

    @property
    def block_passes(self) -> tuple[Pass, ...]:
        """The passes that the stretch runs; empty for a transfer."""
        return passes_in(self.instruction)

    @property
    def paired(self) -> bool:
        """Whether the block runs several passes at the same time, not counting ends of backward passes."""
        return sum(pass_.kind is not PassKind.END for pass_ in self.block_passes) > 1


@dataclass(frozen=True, eq=False)
class Code:
    """A linked schedule: the operations of every stage, and what they refer to."""

    schedule: Schedule
    layout: ParallelLayout
    kinds: tuple[str, ...]
    """Kind of every layer of the model."""
    parts: Mapping[str, Part]
    """The units that the schedule's programs run, by name."""
    stages: tuple[tuple[Stretch, ...], ...]
    buckets: Buckets

    def parameters(self, chunk: int, bucket: int | None = None) -> Parameters:
        """Return the trained parameters of a chunk, or of one of its buckets, on the
        tensor-parallel rank that holds most."""
        return sum((spec.parameters for spec in self._specs(chunk, bucket)), Parameters())

    def gathered(self, chunk: int, bucket: int | None = None) -> Parameters:
        """Return the parameters of a chunk, or of one of its buckets, that ranks gather before they use them
        (ZeRO)."""
        specs = self._specs(chunk, bucket)
        return sum((each for spec in specs for each in spec.shared(self.layout)), Parameters())

    def _specs(self, chunk: int, bucket: int | None) -> tuple[BucketSpec, ...]:
        buckets = self.buckets.of(chunk)
        return buckets if bucket is None else (buckets[bucket],)


def update_begins(stretches: Sequence[Stretch]) -> int:
    """Return the index of the stretch with which the optimizer's part of a step begins: the first norm or
    update behind all passes and messages. It is the number of stretches if there is none."""
    first = len(stretches)
    for at, stretch in enumerate(stretches):
        if stretch.frames:
            first = len(stretches)
        elif isinstance(stretch.instruction, Compute) and isinstance(stretch.instruction.what, Norm | Step):
            first = min(first, at)
    return first


def prefetched(stretches: Sequence[Stretch]) -> tuple[Gather, ...]:
    """Return the parameter gathers that the end of a step starts for the next step."""
    behind = len(stretches) > 1 and isinstance(stretches[-1].instruction, Prefetch)
    starts = (op.what for op in (stretches[-1].operations if behind else ()) if isinstance(op, Start))
    return tuple(what for what in starts if isinstance(what, Gather))
