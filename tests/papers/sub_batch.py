"""Schedules of a tensor-parallel training step with recomputation in sub-batches (Oases section IV).

The four here hold the same computation on a rank's two streams; they differ in sub-batches, in waiting, and
``fine`` in leaving out collectives. A collective starts when it is its turn on the communication stream and
its input is there. Recomputation takes as long as the forward pass.
"""

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.schedule.timeline import run_in_order
from tests.papers.block_profile import BLOCKS


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


Times = dict[Operation, tuple[int, int]]
"""When every operation begins and ends, in nanoseconds."""


def step_times(kind: SubBatching, layers: int, ns: Callable[[Operation], int]) -> Times:
    """A step: forward through all layers, then recomputation and backward from the last.

    ``ns``: what an operation takes. Both streams run in their orders.
    """
    fine = kind is SubBatching.FINE
    passes = list(_passes(kind, layers))
    compute = [operation for order in passes for operation in order]
    collectives = [op.reduced for op in compute if not (fine and op.phase is Phase.RECOMPUTE)]
    after = {op: tuple(_inputs(op, layers * len(BLOCKS), fine)) for op in compute}
    after |= {collective: (collective._replace(collective=False),) for collective in collectives}
    if kind in (SubBatching.MEGATRON, SubBatching.MERAK):
        for before, order in pairwise(passes):
            after[order[0]] += (before[-1].reduced,)
    orders = {Stream.COMPUTE: compute, Stream.INTRA: collectives}
    found, stuck = run_in_order(orders, after.__getitem__, ns)
    assert not stuck, "the streams wait for each other for ever"
    return found


def total_ns(times: Times) -> int:
    """Length of a step."""
    return max(end_ns for _, end_ns in times.values())


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
