"""The order of blocks on every pipeline stage, one generator per kind of pipeline.

A generator gives only blocks; `braid.scheduling.generate.lower` adds communication and programs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from braid.scheduling.mesh.layout import ParallelLayout, Placement
from braid.scheduling.schedule.operations import Pass, PassKind, Strand
from braid.scheduling.schedule.schedule import Block

BlockOrder = tuple[tuple[Block, ...], ...]
"""Per stage, its blocks in order."""


def forward_pass(micro_batch: int, chunk: int) -> Pass:
    """A forward pass on strand alpha."""
    return Pass(PassKind.FORWARD, micro_batch, chunk)


def backward_pass(micro_batch: int, chunk: int, kind: PassKind = PassKind.BACKWARD) -> Pass:
    """A backward pass on strand alpha."""
    return Pass(kind, micro_batch, chunk)


def alone(*passes: Pass) -> list[Block]:
    """A block of each pass."""
    return [Block((one,)) for one in passes]


def one_forward_one_backward(layout: ParallelLayout, micro_batches: int) -> BlockOrder:
    """1F1B: stage i runs p-1-i forwards ahead, then alternates; one chunk per stage.

    Stage i holds at most p-i micro-batches (Narayanan et al. 2021).
    """
    return _alternating(layout, micro_batches, 1)


def eager_one_forward_one_backward(layout: ParallelLayout, micro_batches: int) -> BlockOrder:
    """1F1B that runs twice as far ahead: stage i 2(p-1-i) forwards.

    A message then has a whole forward and backward pass to arrive in; in 1F1B the next block waits for it.
    Stage i holds at most 2(p-i)-1 micro-batches (the eager-1F1B of Zhuang et al., MLSys 2023).
    """
    return _alternating(layout, micro_batches, 2)


def _alternating(layout: ParallelLayout, micro_batches: int, eagerness: int) -> BlockOrder:
    assert layout.placement is Placement.LINEAR, "1F1B runs one chunk per stage"
    stages = []
    for stage in range(layout.pp):
        ahead = min(eagerness * (layout.pp - 1 - stage), micro_batches)
        order = [forward_pass(m, stage) for m in range(ahead)]
        for m in range(micro_batches - ahead):
            order += [forward_pass(m + ahead, stage), backward_pass(m, stage)]
        order += [backward_pass(m, stage) for m in range(micro_batches - ahead, micro_batches)]
        stages.append(tuple(alone(*order)))
    return tuple(stages)


def layer_by_layer(layout: ParallelLayout, micro_batches: int, together: int) -> BlockOrder:
    """The first forward passes go through the model together, layer by layer; so do the last backward passes.

    A layer's parameters are then needed late, and its gradients are final early, while those passes have most
    of the model before them: gathers and sums over replicas hide behind it (Centauri's model tier). The
    activations of ``together`` micro-batches are held. With several stages it is 1F1B.
    """
    if layout.pp > 1:
        return one_forward_one_backward(layout, micro_batches)
    count = min(together, micro_batches)
    first = Block(tuple(forward_pass(m, 0) for m in range(count)))
    between = [
        one for m in range(micro_batches - count) for one in (backward_pass(m, 0), forward_pass(m + count, 0))
    ]
    last = Block(tuple(backward_pass(m, 0) for m in range(micro_batches - count, micro_batches)))
    return ((first, *alone(*between), last),)


def interleaved(layout: ParallelLayout, micro_batches: int) -> BlockOrder:
    """Interleaved 1F1B: two chunks a stage, p micro-batches through one before the other (Narayanan 2021).

    Half the bubble of 1F1B for more activations and twice the messages. `ValueError` unless the micro-batches
    are a multiple of the stages.
    """
    assert layout.placement is Placement.INTERLEAVED
    p, turns = layout.pp, 2
    if micro_batches % p:
        raise ValueError(
            f"overlap.schedule=interleaved needs a multiple of parallel.pp={p} micro-batches a replica, "
            f"train.global_batch and train.micro_batch give {micro_batches}; make them give "
            f"{-(-micro_batches // p) * p}, or use overlap.schedule=megatron"
        )
    total = turns * micro_batches

    def micro_batch(k: int) -> int:
        return k // (p * turns) * p + k % p

    stages = []
    for stage in range(p):
        forwards = [forward_pass(micro_batch(k), k // p % turns * p + stage) for k in range(total)]
        backwards = [
            backward_pass(micro_batch(k), (turns - 1 - k // p % turns) * p + stage) for k in range(total)
        ]
        ahead = min(total, 2 * (p - 1 - stage) + (turns - 1) * p)
        order = forwards[:ahead]
        for n in range(total - ahead):
            order += [forwards[ahead + n], backwards[n]]
        stages.append(tuple(alone(*order, *backwards[total - ahead :])))
    return tuple(stages)


@dataclass(frozen=True)
class _Visit:
    """What one journey brings to a stage at a time: a forward and a backward pass, either or both."""

    slot: int
    forward: Pass | None
    backward: Pass | None


def folded_w(layout: ParallelLayout, micro_batches: int) -> BlockOrder:
    """The W-shaped pipeline of the folded model (DHelix section 4.1, figure 8), on one strand.

    A journey goes down the stages and back up and carries the forward pass of micro-batch k together with
    the backward pass of micro-batch k-p; both travel the same way. Journeys start every second slot, so that
    those on their way down and up never meet: stage i is visited at 2k+i and at 2k+2p-1-i. Within a visit the
    backward block comes first, so that memory is freed before more is taken. Stage i of p holds at most
    min(2p, m+1+i, 2m) blocks of m micro-batches, each of half a stage's layers.
    """
    return tuple(
        tuple(Block((one,)) for visit in stage for one in (visit.backward, visit.forward) if one)
        for stage in _folded_visits(layout, micro_batches)
    )


def paired_w(layout: ParallelLayout, micro_batches: int) -> BlockOrder:
    """`folded_w` on two strands: the two blocks of a visit run at the same time.

    Micro-batches change strands every p, so that the two of a visit are always of different ones.
    """
    if layout.pp == 1 and not layout.folded:
        return _paired([_whole_visits(micro_batches)], 1)
    return _paired(_folded_visits(layout, micro_batches), layout.pp)


def twin_ended(layout: ParallelLayout, micro_batches: int) -> BlockOrder:
    """`paired_w` on one stage without lonely ends: two micro-batches are always side by side.

    F0|F1, then the backward pass of each micro-batch beside the forward pass of the next but one, and at last
    two backward passes. So the ends hide their communication too; two micro-batches' activations are held
    instead of one's. An odd number of micro-batches leaves the last two backward passes one after the other,
    as they come out on one strand. With several stages, where a pass waits at the ends for its turn on the
    others, or fewer than three micro-batches it is `paired_w`.
    """
    if layout.chunks > 1 or micro_batches < 3:
        return paired_w(layout, micro_batches)
    last = micro_batches - 1
    order = [Block((forward_pass(0, 0), forward_pass(1, 0)))]
    order += [Block((forward_pass(m + 2, 0), backward_pass(m, 0))) for m in range(last - 1)]
    ends = backward_pass(last - 1, 0), backward_pass(last, 0)
    order += alone(*ends) if micro_batches % 2 else [Block(ends)]
    # Alpha, beta, beta, alpha, and so on: neighbours differ at the ends, and next neighbours in between.
    return on_strands([order], lambda micro_batch: (micro_batch + 1) // 2 % 2)


def sub_batches(layout: ParallelLayout, micro_batches: int) -> BlockOrder:
    """1F1B of micro-batches two by two, side by side in every pass.

    The two are the sub-batches of one micro-batch of twice the size (Merak; Oases, section IV). The last one
    of an odd number goes by itself.
    """
    return _halved(one_forward_one_backward(layout, -(-micro_batches // 2)), micro_batches)


def folded_sub_batches(layout: ParallelLayout, micro_batches: int) -> BlockOrder:
    """The same on the folded pipeline (`folded_w`)."""
    if layout.pp == 1 and not layout.folded:
        return sub_batches(layout, micro_batches)
    return _halved(folded_w(layout, -(-micro_batches // 2)), micro_batches)


def _halved(pairs: BlockOrder, micro_batches: int) -> BlockOrder:
    """With two micro-batches side by side in the place of every one."""

    def both(block: Block) -> Block:
        (one,) = block.passes
        first = 2 * one.micro_batch
        return Block(tuple(one._replace(micro_batch=m) for m in (first, first + 1) if m < micro_batches))

    orders = [[both(block) for block in stage] for stage in pairs]
    return on_strands(orders, lambda micro_batch: micro_batch % 2)


def eager_paired_w(layout: ParallelLayout, micro_batches: int, hop: int = 2) -> BlockOrder:
    """`paired_w` where a hop to another stage takes ``hop`` slots instead of one.

    A message then has hop - 1 visits to arrive in; in `paired_w` the next visit waits for it. A micro-batch's
    backward pass begins hop (p-1) + 1 journeys after its forward pass instead of p: a stage of p holds twice
    as many blocks at most, each of half a stage's layers. To `paired_w` what eager 1F1B is to 1F1B.
    """
    return _paired(_folded_visits(layout, micro_batches, hop), hop * (layout.pp - 1) + 1)


def _whole_visits(micro_batches: int) -> list[_Visit]:
    """One stage that need not fold: the forward pass of the whole model beside the backward pass before."""
    return [
        _Visit(m, forward_pass(m, 0) if m < micro_batches else None, backward_pass(m - 1, 0) if m else None)
        for m in range(micro_batches + 1)
    ]


def _folded_visits(layout: ParallelLayout, micro_batches: int, hop: int = 1) -> list[list[_Visit]]:
    """Visits by stage. ``hop``: slots from a visit to that of the next stage; the fold itself takes one."""
    assert layout.folded, "the W-shaped pipeline needs the chunks i and 2p-1-i on stage i"
    p = layout.pp
    behind = hop * (p - 1) + 1  # journeys from a forward pass to its backward pass
    visits: list[list[_Visit]] = [[] for _ in range(p)]
    for journey in range(micro_batches + behind):
        for stage in range(p):
            down, up = stage, 2 * p - 1 - stage
            before_up = hop * (2 * (p - 1) - stage) + 1
            for slot, forward_chunk, backward_chunk in ((hop * stage, down, up), (before_up, up, down)):
                back = journey - behind
                backward = backward_pass(back, backward_chunk) if back >= 0 else None
                forward = forward_pass(journey, forward_chunk) if journey < micro_batches else None
                visits[stage].append(_Visit(2 * journey + slot, forward, backward))
    return [sorted(stage, key=lambda visit: visit.slot) for stage in visits]


def _paired(visits: list[list[_Visit]], stages: int) -> BlockOrder:
    def blocks(visit: _Visit) -> list[Block]:
        if visit.forward and visit.backward:
            return [Block((visit.forward, visit.backward))]
        return alone(*(one for one in (visit.backward, visit.forward) if one))

    return changing_strands(
        [[block for visit in stage for block in blocks(visit)] for stage in visits], stages
    )


def changing_strands(orders: Sequence[Sequence[Block]], every: int) -> BlockOrder:
    """The orders on two strands: micro-batches change them every so many."""
    return on_strands(orders, lambda micro_batch: micro_batch // every % 2)


def on_strands(orders: Sequence[Sequence[Block]], strand_of: Callable[[int], int]) -> BlockOrder:
    """The orders on strands; ``strand_of``: the number of a micro-batch's strand."""
    strands = list(Strand)

    def placed(block: Block) -> Block:
        return Block(tuple(one._replace(strand=strands[strand_of(one.micro_batch)]) for one in block.passes))

    return tuple(tuple(map(placed, order)) for order in orders)


def forward_only(layout: ParallelLayout, micro_batches: int) -> BlockOrder:
    """Forward passes alone, for validation, through all chunks of a stage; any number of micro-batches.

    Where a micro-batch visits a stage twice, its second visit waits for those behind it, as in the training
    schedules.
    """
    match layout.placement:
        case Placement.LINEAR:
            return tuple(
                tuple(alone(*(forward_pass(m, stage) for m in range(micro_batches))))
                for stage in range(layout.pp)
            )
        case Placement.FOLDED:
            return _forwards_of(folded_w(layout, micro_batches))
        case Placement.INTERLEAVED:
            groups = [range(m, min(m + layout.pp, micro_batches)) for m in range(0, micro_batches, layout.pp)]
            return tuple(
                tuple(
                    Block((forward_pass(m, chunk),))
                    for group in groups
                    for chunk in layout.chunks_of(stage)
                    for m in group
                )
                for stage in range(layout.pp)
            )


def _forwards_of(order: BlockOrder) -> BlockOrder:
    return tuple(
        tuple(alone(*(one for block in stage for one in block.passes if one.forward))) for stage in order
    )
