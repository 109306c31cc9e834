"""The order of blocks on every pipeline stage, one generator per schedule.

A generator gives only blocks; `braid.scheduling.lowering.lower` adds communication and programs.
"""

from collections.abc import Callable, Mapping
from typing import Final

from braid.scheduling.schedule import Block, Direction
from braid.scheduling.spec import ParallelLayout, Placement

BlockOrder = tuple[tuple[Block, ...], ...]


def _forward(micro_batch: int, chunk: int) -> Block:
    return Block(Direction.FORWARD, micro_batch, chunk)


def _backward(micro_batch: int, chunk: int) -> Block:
    return Block(Direction.BACKWARD, micro_batch, chunk)


def one_forward_one_backward(layout: ParallelLayout, micro_batches: int) -> BlockOrder:
    """1F1B: stage i runs p-1-i forwards ahead, then alternates; one chunk per stage.

    Stage i holds at most p-i micro-batches (Narayanan et al. 2021).
    """
    assert not layout.folded, "1F1B runs one chunk per stage"
    stages = []
    for stage in range(layout.pp):
        ahead = min(layout.pp - 1 - stage, micro_batches)
        order = [_forward(m, stage) for m in range(ahead)]
        for m in range(micro_batches - ahead):
            order += [_forward(m + ahead, stage), _backward(m, stage)]
        order += [_backward(m, stage) for m in range(micro_batches - ahead, micro_batches)]
        stages.append(tuple(order))
    return tuple(stages)


def folded_w(layout: ParallelLayout, micro_batches: int) -> BlockOrder:
    """The W-shaped pipeline of the folded model (DHelix section 4.1, figure 8), on one strand.

    A journey goes down the stages and back up and carries the forward pass of micro-batch k together with
    the backward pass of micro-batch k-p; both travel the same way. Journeys start every second slot, so that
    those on their way down and up never meet: stage i is visited at 2k+i and at 2k+2p-1-i. Within a visit the
    backward block comes first, so that memory is freed before more is taken. Stage i of p holds at most
    min(2p, m+1+i, 2m) blocks of m micro-batches, each of half a stage's layers.
    """
    assert layout.folded, "the W-shaped pipeline needs the chunks i and 2p-1-i on stage i"
    p = layout.pp
    visits: list[list[tuple[int, tuple[Block, ...]]]] = [[] for _ in range(p)]
    for journey in range(micro_batches + p):
        for stage in range(p):
            down, up = stage, 2 * p - 1 - stage
            for hop, forward_chunk, backward_chunk in ((stage, down, up), (2 * p - 1 - stage, up, down)):
                blocks = []
                if journey >= p:
                    blocks.append(_backward(journey - p, backward_chunk))
                if journey < micro_batches:
                    blocks.append(_forward(journey, forward_chunk))
                visits[stage].append((2 * journey + hop, tuple(blocks)))
    return tuple(tuple(block for _, blocks in sorted(stage) for block in blocks) for stage in visits)


def forward_only(layout: ParallelLayout, micro_batches: int) -> BlockOrder:
    """Forward passes alone, for validation: micro-batch after micro-batch through all chunks of a stage.

    In a folded pipeline a micro-batch's second visit waits for those behind it, as in `folded_w`.
    """
    if not layout.folded:
        return tuple(tuple(_forward(m, s) for m in range(micro_batches)) for s in range(layout.pp))
    return tuple(
        tuple(block for block in stage if block.direction is Direction.FORWARD)
        for stage in folded_w(layout, micro_batches)
    )


GENERATORS: Final[Mapping[str, Callable[[ParallelLayout, int], BlockOrder]]] = {
    "megatron": one_forward_one_backward,
    "folded": folded_w,
}
"""Training schedules by the names that users know."""


PLACEMENTS: Final[Mapping[str, Placement]] = {"megatron": Placement.LINEAR, "folded": Placement.FOLDED}
"""Where a schedule needs the model's chunks to be."""
