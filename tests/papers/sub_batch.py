"""Schedules of a tensor-parallel training step with recomputation in sub-batches (Oases section IV).

A schedule is data: the order of operations on a rank's two streams, and what each of them waits for. The
four here hold the same computation; they differ in sub-batches, in waiting, and ``fine`` in leaving out
collectives. A collective starts when it is its turn on the communication stream and its input is there.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.schedule.timeline import run_in_order
from tests.papers.block_profile import BLOCKS, BlockProfile


class SubBatching(StrEnum):
    """Ways to order a step."""

    MEGATRON = "megatron"
    """The whole batch at once; nothing overlaps."""
    MERAK = "merak"
    """Two sub-batches by turns within a pass; a pass begins when the one before has ended."""
    CROSS_PASS = "cross_pass"
    """The same order without the waiting between passes (section IV-A)."""
    FINE = "fine"
    """Recomputation starts after collectives, whose outputs were saved, so none is repeated (IV-B)."""

    @property
    def sub_batches(self) -> int:
        """Parts into which a batch is split."""
        return 1 if self is SubBatching.MEGATRON else 2


class Phase(StrEnum):
    """What an operation does for its block."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"


class Operation(NamedTuple):
    """One computation of one block, or the collective that follows it. Blocks count through all layers."""

    phase: Phase
    block: int
    sub_batch: int
    collective: bool = False

    @property
    def reduced(self) -> "Operation":
        """The collective of a computation."""
        return self._replace(collective=True)


@dataclass(frozen=True, kw_only=True)
class SubBatchSchedule:
    """Order of the operations on each stream, and the operations that must have ended before each."""

    compute: tuple[Operation, ...]
    communication: tuple[Operation, ...]
    after: Mapping[Operation, tuple[Operation, ...]]


@dataclass(frozen=True, kw_only=True)
class BlockTimes:
    """Times of one block, per sub-batch; recomputation takes as long as forward."""

    forward_ns: tuple[int, ...]
    backward_ns: tuple[int, ...]
    collective_ns: tuple[int, ...]

    def of(self, operation: Operation) -> int:
        """Time of an operation of this block."""
        if operation.collective:
            return self.collective_ns[operation.sub_batch]
        backward = operation.phase is Phase.BACKWARD
        return (self.backward_ns if backward else self.forward_ns)[operation.sub_batch]


def sub_batch_schedule(kind: SubBatching, layers: int) -> SubBatchSchedule:
    """The schedule of a step: forward through all layers, then recomputation and backward from the last."""
    fine = kind is SubBatching.FINE
    passes = list(_passes(kind, layers))
    compute = [operation for order in passes for operation in order]
    collectives = [op.reduced for op in compute if not (fine and op.phase is Phase.RECOMPUTE)]
    after = {op: tuple(_inputs(op, layers * len(BLOCKS), fine)) for op in compute}
    after |= {collective: (collective._replace(collective=False),) for collective in collectives}
    if kind in (SubBatching.MEGATRON, SubBatching.MERAK):
        for before, order in pairwise(passes):
            after[order[0]] += (before[-1].reduced,)
    return SubBatchSchedule(compute=tuple(compute), communication=tuple(collectives), after=after)


def _passes(kind: SubBatching, layers: int) -> Iterator[list[Operation]]:
    """Forward; then a recomputation and a backward pass of every layer, or every block recomputed right
    before its backward (algorithm 1). Sub-batches take turns."""

    def by_turns(phases: Sequence[Phase], blocks: Sequence[int]) -> list[Operation]:
        parts = range(kind.sub_batches)
        return [Operation(phase, block, part) for block in blocks for part in parts for phase in phases]

    blocks = range(layers * len(BLOCKS))
    yield by_turns([Phase.FORWARD], blocks)
    if kind is SubBatching.FINE:
        yield by_turns([Phase.RECOMPUTE, Phase.BACKWARD], blocks[::-1])
        return
    for first in blocks[:: len(BLOCKS)][::-1]:
        layer = blocks[first : first + len(BLOCKS)]
        yield by_turns([Phase.RECOMPUTE], layer)
        yield by_turns([Phase.BACKWARD], layer[::-1])


def _inputs(operation: Operation, blocks: int, fine: bool) -> Iterator[Operation]:
    """What a computation reads; all of it belongs to its own sub-batch."""
    phase, block, part, _ = operation
    starts_layer = block % len(BLOCKS) == 0
    match phase:
        case Phase.FORWARD:
            if block:
                yield Operation(Phase.FORWARD, block - 1, part).reduced
        case Phase.RECOMPUTE:
            if fine or starts_layer:  # reads what forward saved
                if block:
                    yield Operation(Phase.FORWARD, block - 1, part).reduced
            else:
                yield Operation(Phase.RECOMPUTE, block - 1, part).reduced
        case Phase.BACKWARD:
            again = Operation(Phase.RECOMPUTE, block, part)
            # What follows a block's collective (dropout, residual) is recomputed from the collective's
            # output, unless recomputation starts there.
            yield again if fine else again.reduced
            last = block == blocks - 1
            yield Operation(Phase.FORWARD if last else Phase.BACKWARD, block + (not last), part).reduced


def simulate_step(
    schedule: SubBatchSchedule, times: Sequence[BlockTimes]
) -> dict[Operation, tuple[int, int]]:
    """When every operation begins and ends, in nanoseconds, as both streams run in their orders.

    ``times`` holds all blocks, in the order of the forward pass.
    """
    orders = {Stream.COMPUTE: schedule.compute, Stream.INTRA: schedule.communication}
    found, stuck = run_in_order(orders, schedule.after.__getitem__, lambda op: times[op.block].of(op))
    assert not stuck, "the streams wait for each other for ever"
    return found


def total_ns(times: Mapping[Operation, tuple[int, int]]) -> int:
    """Length of a step."""
    return max(end_ns for _, end_ns in times.values())


def layer_times(
    profile: BlockProfile, *, hidden: int, degree: int, batch: int, sub_batches: int
) -> tuple[BlockTimes, ...]:
    """Times of a layer's blocks for a replica's batch; the first sub-batches are the larger ones."""
    parts = profile.split(hidden, degree, batch, parts=sub_batches)
    return tuple(
        BlockTimes(
            forward_ns=tuple(part.forward_ns[place] for part in parts),
            backward_ns=tuple(part.backward_ns[place] for part in parts),
            collective_ns=tuple(part.collective_ns for part in parts),
        )
        for place in range(len(BLOCKS))
    )
