"""Generates the order of blocks on every pipeline stage, with one function for each kind of pipeline.

These functions return only blocks; `braid.scheduling.generate.lower` adds communication and programs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from braid.scheduling.mesh.layout import ParallelLayout, Placement
from braid.scheduling.schedule.operations import Pass, PassKind, Strand
from braid.scheduling.schedule.schedule import Block

BlockOrder = tuple[tuple[Block, ...], ...]
"""For every stage, its blocks in the order in which they run."""


def forward_pass(micro_batch: int, chunk: int) -> Pass:
    """Return a forward pass on strand alpha."""
    return Pass(PassKind.FORWARD, micro_batch, chunk)


def backward_pass(micro_batch: int, chunk: int, kind: PassKind = PassKind.BACKWARD) -> Pass:
    """Return a backward pass on strand alpha."""
    return Pass(kind, micro_batch, chunk)


def alone(*passes: Pass) -> list[Block]:
    """Return a list of blocks that each run one of the passes."""
    return [Block((pass_,)) for pass_ in passes]


def one_forward_one_backward(layout: ParallelLayout, micro_batches: int, eagerness: int = 1) -> BlockOrder:
    """Return the 1F1B pipeline with one chunk per stage: stage i runs p-1-i forward passes ahead, then
    alternates.

    Stage i holds at most p-i micro-batches (Narayanan et al. 2021). With ``eagerness`` 2 twice as many passes
    run ahead, so that a message has the time of a forward and a backward pass to arrive, where the next block
    would wait for it, and stage i holds at most 2(p-i)-1 (eager-1F1B of Zhuang et al., MLSys 2023).
    """
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
    """Return the order in which the first ``together`` forward passes run as one block, layer by layer, and
    so do the last backward passes.

    A layer's parameters are then needed late, and its gradients are final early, while most of the model is
    still to run: parameter gathers and gradient sums hide behind it (Centauri's model tier). The activations
    of ``together`` micro-batches are held. With several stages the order is that of 1F1B.
    """
    if layout.pp > 1:
        return one_forward_one_backward(layout, micro_batches)
    count = min(together, micro_batches)
    first = Block(tuple(forward_pass(m, 0) for m in range(count)))
    between = [
        p for m in range(micro_batches - count) for p in (backward_pass(m, 0), forward_pass(m + count, 0))
    ]
    last = Block(tuple(backward_pass(m, 0) for m in range(micro_batches - count, micro_batches)))
    return ((first, *alone(*between), last),)


def interleaved(layout: ParallelLayout, micro_batches: int) -> BlockOrder:
    """Return interleaved 1F1B (Narayanan 2021): a stage has two chunks, and p micro-batches visit one chunk
    before they visit the other.

    It has half the bubble of 1F1B, more activations and twice the messages. Raises `ValueError` unless the
    number of micro-batches is a multiple of the number of stages.
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
    """Passes that one journey through the stages (`folded_w`) brings to a stage in a time slot: a forward
    pass, a backward pass, or both."""

    slot: int
    forward: Pass | None
    backward: Pass | None


def folded_w(layout: ParallelLayout, micro_batches: int) -> BlockOrder:
    """Return the W-shaped pipeline of the folded model (DHelix section 4.1, figure 8), on one strand.

    A journey goes down the stages and back up and carries the forward pass of micro-batch k together with the
    backward pass of micro-batch k-p; both travel the same way. Journeys start every second slot, so that
    journeys down and up never meet: stage i is visited at 2k+i and at 2k+2p-1-i. Within a visit the backward
    block comes first and frees memory. Stage i of p holds at most min(2p, m+1+i, 2m) blocks of m
    micro-batches, each of half a stage's layers.
    """
    return tuple(
        tuple(Block((p,)) for visit in stage for p in (visit.backward, visit.forward) if p)
        for stage in _folded_visits(layout, micro_batches)
    )


def paired_w(layout: ParallelLayout, micro_batches: int) -> BlockOrder:
    """Return `folded_w` on two strands: the forward and the backward pass of a visit run as one block.

    The strand changes after every p micro-batches, so that both passes are always on different strands.
    """
    if layout.pp == 1 and not layout.folded:
        return _paired([_whole_visits(micro_batches)], 1)
    return _paired(_folded_visits(layout, micro_batches), layout.pp)


def twin_ended(layout: ParallelLayout, micro_batches: int) -> BlockOrder:
    """Return `paired_w` for one stage, but with two micro-batches side by side also at the step's begin and
    end.

    The blocks are F0|F1, then the backward pass of each micro-batch m beside the forward pass of m+2, and at
    last two backward passes. So the step's begin and end hide their communication too, and activations of two
    micro-batches are held instead of one. If the number of micro-batches is odd, the last two backward passes
    run one after the other, since both are on one strand. With several stages, where the first and last
    passes wait for other stages, or with fewer than three micro-batches the result is `paired_w`.
    """
    if layout.chunks > 1 or micro_batches < 3:
        return paired_w(layout, micro_batches)
    last = micro_batches - 1
    order = [Block((forward_pass(0, 0), forward_pass(1, 0)))]
    order += [Block((forward_pass(m + 2, 0), backward_pass(m, 0))) for m in range(last - 1)]
    ends = backward_pass(last - 1, 0), backward_pass(last, 0)
    order += alone(*ends) if micro_batches % 2 else [Block(ends)]
    # Strands alpha, beta, beta, alpha, ...: neighbours differ at the ends, next neighbours in between.
    return on_strands([order], lambda micro_batch: (micro_batch + 1) // 2 % 2)


def sub_batches(layout: ParallelLayout, micro_batches: int) -> BlockOrder:
    """Return 1F1B of pairs of micro-batches, which run side by side in every pass.

    A pair are the two sub-batches of a micro-batch of twice the size (Merak; Oases, section IV). If the
    number of micro-batches is odd, the last one runs by itself.
    """
    return _halved(one_forward_one_backward(layout, -(-micro_batches // 2)), micro_batches)


def folded_sub_batches(layout: ParallelLayout, micro_batches: int) -> BlockOrder:
    """Return pairs of micro-batches side by side, like `sub_batches`, on the folded pipeline (`folded_w`)."""
    if layout.pp == 1 and not layout.folded:
        return sub_batches(layout, micro_batches)
    return _halved(folded_w(layout, -(-micro_batches // 2)), micro_batches)


def _halved(pairs: BlockOrder, micro_batches: int) -> BlockOrder:
    """Replace each micro-batch in the blocks of ``pairs`` by two micro-batches side by side, on two
    strands."""

    def both(block: Block) -> Block:
        (pass_,) = block.passes
        first = 2 * pass_.micro_batch
        return Block(tuple(pass_._replace(micro_batch=m) for m in (first, first + 1) if m < micro_batches))

    orders = [[both(block) for block in stage] for stage in pairs]
    return on_strands(orders, lambda micro_batch: micro_batch % 2)


def eager_paired_w(layout: ParallelLayout, micro_batches: int, hop: int = 2) -> BlockOrder:
    """Return `paired_w` with ``hop`` time slots instead of one from a stage to the next, as eager 1F1B does.

    A message then has hop - 1 visits to arrive in; in `paired_w` the next visit waits for it. A micro-batch's
    backward pass begins hop (p-1) + 1 journeys after its forward pass instead of p: a stage holds at most
    hop times as many blocks, each of half a stage's layers.
    """
    return _paired(_folded_visits(layout, micro_batches, hop), hop * (layout.pp - 1) + 1)


def _whole_visits(micro_batches: int) -> list[_Visit]:
    """Return the visits of a single, unfolded stage: the forward pass of each micro-batch beside the backward
    pass of the previous one."""
    return [
        _Visit(m, forward_pass(m, 0) if m < micro_batches else None, backward_pass(m - 1, 0) if m else None)
        for m in range(micro_batches + 1)
    ]


def _folded_visits(layout: ParallelLayout, micro_batches: int, hop: int = 1) -> list[list[_Visit]]:
    """Return, for each stage of the folded pipeline, its visits in the order of time.

    ``hop``: time slots from a stage to the next; the turn at the last stage takes one.
    """
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
        return alone(*(p for p in (visit.backward, visit.forward) if p))

    return changing_strands(
        [[block for visit in stage for block in blocks(visit)] for stage in visits], stages
    )


def changing_strands(orders: Sequence[Sequence[Block]], every: int) -> BlockOrder:
    """Assign micro-batches to two strands in turn, ``every`` consecutive micro-batches to each."""
    return on_strands(orders, lambda micro_batch: micro_batch // every % 2)


def on_strands(orders: Sequence[Sequence[Block]], strand_of: Callable[[int], int]) -> BlockOrder:
    """Return the blocks with each pass on the strand of its micro-batch.

    ``strand_of``: function from micro-batch to strand (0: alpha, 1: beta).
    """
    strands = list(Strand)

    def placed(block: Block) -> Block:
        return Block(tuple(p._replace(strand=strands[strand_of(p.micro_batch)]) for p in block.passes))

    return tuple(tuple(map(placed, order)) for order in orders)


def forward_only(layout: ParallelLayout, micro_batches: int) -> BlockOrder:
    """Return the blocks of a validation step: only forward passes, for any number of micro-batches.

    If a micro-batch visits a stage twice, its second visit comes after first visits of later micro-batches,
    as in the training schedules.
    """
    match layout.placement:
        case Placement.LINEAR:
            return tuple(
                tuple(alone(*(forward_pass(m, stage) for m in range(micro_batches))))
                for stage in range(layout.pp)
            )
        case Placement.FOLDED:
            return tuple(
                tuple(alone(*(p for block in stage for p in block.passes if p.forward)))
                for stage in folded_w(layout, micro_batches)
            )
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
