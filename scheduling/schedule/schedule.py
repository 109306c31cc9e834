"""A schedule: what every pipeline stage does in one step. As text: `braid.scheduling.schedule.text`.

Operations of `braid.scheduling.schedule.operations` in two levels. Per stage a list of instructions:

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
these operators are skipped. `braid.scheduling.schedule.link` says which program runs when.

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
class Prefetch:
    """Start to gather the parameters that are used first; behind STEP: by the next step, once updated."""

    def __str__(self) -> str:
        return "PREFETCH"


Instruction = Block | Prefetch | Operation


def passes_in(instruction: Instruction) -> tuple[Pass, ...]:
    """The passes that an instruction runs; none for any but a block."""
    return instruction.passes if isinstance(instruction, Block) else ()


def sums_in(instruction: Instruction) -> tuple[Reduce, ...]:
    """The sums of gradients that an instruction starts."""
    match instruction:
        case Block():
            return instruction.sums
        case Start(Reduce(int()) as reduce):
            return (reduce,)
        case _:
            return ()


Program = tuple[Operation, ...]
"""How the operators of one pass through a unit, or of several beside each other, are issued: by name."""


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
    """The operations of one pass of a program."""
    return (one for one in program if isinstance(one, Compute | Start | Wait) and one.turn == turn)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Instructions of every stage and programs of every unit; immutable, comparable, printable."""

    name: str
    chunks: int
    micro_batches: int
    stages: tuple[tuple[Instruction, ...], ...]
    programs: Mapping[Sides, Program]
    unit_layers: int = 0
    """Most layers of a unit (`braid.scheduling.model.units`); 0: every part is a unit of its own."""
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
