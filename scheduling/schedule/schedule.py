"""A schedule: the work of every pipeline stage in one step. `braid.scheduling.schedule.text` is its text.

Operations of `braid.scheduling.schedule.operations` in two levels. Per stage a list of instructions:

    F3.1            forward pass of micro-batch 3 on chunk 1          (``F3.1b``: on strand beta)
    B3.1            its backward pass, with input and weight gradients
    I3.1  W3.1      input gradients alone; the weight gradients, which may come later
    L3.1            the end of backward pass B3.1, which an earlier block has left
    [F5.0b|B1.1]    a block of several passes that run at the same time, here a forward and a backward one
    [F0.0|F1.0b]    the same pass of two micro-batches
    [B3.1|REDUCE(1 dp)]  a block in which each bucket of chunk 1 is summed once its gradients are final
    [F0.1|GATHER(1 dp)]  a block in which each bucket of chunk 1 is gathered before its use (ZeRO)
    SEND(F3.2>1)    start to send the input of F3.2 to stage 1
    RECV(F3.2<0)    start to receive the input of F3.2 from stage 0
    REDUCE(1 dp)    start to sum the gradients of chunk 1 over an axis of the mesh
    NORM            square this rank's gradients;  REDUCE(norm tp): start to sum the squares over an axis
    WAIT(...)       wait for the SEND, RECV or REDUCE inside, such as WAIT(RECV F3.2<0)
    PREFETCH        start to gather the parameters that are used first: at the begin; or behind STEP, for the
                    next step, where each bucket is gathered as soon as it is updated
    STEP            update the parameters

and, for units (``layer``, ``embedding+2*layer``) of one pass or several, an operator program:

    compute NAME        run a compute operator
    start NAME on S     issue a collective, planned on stream S (ranks determine the stream of their group)
    wait NAME           make its result available
    barrier             wait for every transfer that is under way

``program F:layer`` is the program of a layer's forward pass; in ``program F:layer|B:layer``, beside a layer's
backward pass, operators carry the number of their pass: ``0:qkv``, ``1:qkv.dgrad``. Operators of the backward
pass that a program does not name are left as an end: ``program F:layer|B:layer|L:layer`` runs
(``2:qkv.wgrad``) the end of the previous unit, in the same block or in the block that names it; without an
end these operators are skipped. `braid.scheduling.schedule.link` selects programs.

All ranks of a stage run the same lists in the same order.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from braid.scheduling.mesh.partition import Partition
from braid.scheduling.schedule.operations import (
    Compute,
    Gather,
    Operation,
    Pass,
    PassKind,
    Reduce,
    Start,
    Strand,
    Wait,
)


@dataclass(frozen=True)
class Block:
    """Instruction to run passes at the same time, with the gradient sums and parameter gathers they need.

    ``sums`` are started bucket by bucket, behind the last operator that adds to a bucket's gradients. Sums
    over tp come first and are waited for at once; other sums continue behind the block. Buckets in
    ``gathers`` are waited for before the first operator that uses them; `Schedule.prefetch` says how early
    they start.
    """

    passes: tuple[Pass, ...]
    sums: tuple[Reduce, ...] = ()
    gathers: tuple[Gather, ...] = ()

    def __str__(self) -> str:
        texts = [*map(str, self.passes), *map(str, self.gathers), *map(str, self.sums)]
        return texts[0] if len(texts) == 1 else f"[{'|'.join(texts)}]"


@dataclass(frozen=True)
class Prefetch:
    """Instruction to start gathering the parameters that a step uses first.

    Behind STEP it gathers for the next step, each bucket as soon as it is updated.
    """

    def __str__(self) -> str:
        return "PREFETCH"


Instruction = Block | Prefetch | Operation


def passes_in(instruction: Instruction) -> tuple[Pass, ...]:
    """Return the passes that an instruction runs; empty for all but blocks."""
    return instruction.passes if isinstance(instruction, Block) else ()


def sums_in(instruction: Instruction) -> tuple[Reduce, ...]:
    """Return the gradient sums that an instruction starts; empty if none."""
    match instruction:
        case Block():
            return instruction.sums
        case Start(Reduce(int()) as reduce):
            return (reduce,)
        case _:
            return ()


Program = tuple[Operation, ...]
"""The operations, in order of issue, that run one or several passes through a unit each; they name
operators."""


@dataclass(frozen=True, order=True)
class Side:
    """One of the passes that a program runs: its kind, and the name of the unit that it passes through."""

    kind: PassKind
    unit: str

    def __str__(self) -> str:
        return f"{self.kind.value}:{self.unit}"


Sides = tuple[Side, ...]
"""The passes that a program runs, in the order in which blocks list them."""


def on_side(program: Program, turn: int) -> Iterator[Compute | Start | Wait]:
    """Yield the operations of a program that belong to its pass number ``turn``."""
    return (op for op in program if isinstance(op, Compute | Start | Wait) and op.turn == turn)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One step's instructions for every stage, and the programs that run units; immutable and comparable."""

    name: str
    chunks: int
    micro_batches: int
    stages: tuple[tuple[Instruction, ...], ...]
    programs: Mapping[Sides, Program]
    unit_layers: int = 0
    """Most layers of a unit (`braid.scheduling.model.units`); 0: every part is a unit."""
    partitions: tuple[Partition, ...] = ()
    """How collectives are split into pieces or stages; a collective without a partition runs whole."""
    prefetch: int = 0
    """ZeRO 2: most bucket sums under way at a time; 0: each sum is waited for at once. ZeRO 3: number of
    bucket uses by which a bucket's gather starts before its own use; 0: the gather starts at the use."""
    keep: int = 0
    """ZeRO 3: number of bucket uses within which a bucket must be used again to stay gathered in between; at
    least ``prefetch``."""

    @cached_property
    def trains(self) -> bool:
        """Whether the schedule has programs for backward passes (a validation schedule has none)."""
        return any(side.kind is not PassKind.FORWARD for sides in self.programs for side in sides)

    @cached_property
    def passes(self) -> tuple[tuple[Pass, ...], ...]:
        """For every stage, the passes that it runs, in order."""
        return tuple(tuple(pass_ for i in stage for pass_ in passes_in(i)) for stage in self.stages)

    @cached_property
    def strands(self) -> tuple[Strand, ...]:
        used = {pass_.strand for stage in self.passes for pass_ in stage}
        return tuple(strand for strand in Strand if strand in used)
