"""Fixed orders of several passes' operators, found without a search: those of other systems, and the serial
one.

Each function takes a program's sides and the parts, and returns an order for `programs.program_of`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TypeVar

from braid.scheduling.generate.named import PairMethod
from braid.scheduling.generate.programs import graph_of
from braid.scheduling.model.operators import Kind, Operator, Part, Phase
from braid.scheduling.schedule.operations import Barrier
from braid.scheduling.schedule.order import Issue, Order
from braid.scheduling.schedule.schedule import Sides

Item = TypeVar("Item")
_FixedOrder = Callable[[Sides, Mapping[str, Part]], Order]

_HEAVY = frozenset((Kind.GEMM, Kind.ATTENTION, Kind.GROUPED_GEMM, Kind.CROSS_ENTROPY, Kind.CUSTOM))
"""Kinds of operators that take long enough to hide a collective; norms and residuals are too short."""


def one_behind_the_other(sides: Sides, parts: Mapping[str, Part]) -> Order:
    """Return the serial order: all operators of the first pass, then all of the second, and so on."""
    graphs = enumerate(_graphs(sides, parts))
    return tuple(Issue(turn, op.name) for turn, graph in graphs for op in graph)


def round_robin(strands: Sequence[Sequence[Item]]) -> tuple[Item, ...]:
    """Interleave sequences item by item, beginning with the last sequence (Wavelet's round robin).

    The first items of all sequences come first, then the second items, and so on.
    """
    return tuple(
        strand[number]
        for number in range(max(map(len, strands)))
        for strand in reversed(strands)
        if number < len(strand)
    )


def by_turns(sides: Sides, parts: Mapping[str, Part]) -> Order:
    """Return an order in which the passes take turns, one operator each."""
    graphs = enumerate(_graphs(sides, parts))
    return round_robin([[Issue(turn, op.name) for op in graph] for turn, graph in graphs])


def beside_exchanges(sides: Sides, parts: Mapping[str, Part]) -> Order:
    """Return the order in which Megatron-Core and torchtitan overlap the exchanges of experts, for a forward
    and a backward pass: each all-to-all follows the other pass's attention or experts, which hide it.

    Passes without exchanges run one after the other.
    """
    stretches = [list(_cut_at_exchanges(graph)) for graph in _graphs(sides, parts)]
    turns = list(reversed(range(len(sides))))  # the backward pass begins
    return tuple(
        Issue(turn, name)
        for number in range(max(map(len, stretches)))
        for turn in turns
        for name in (stretches[turn][number : number + 1] or [[]])[0]
    )


def _cut_at_exchanges(graph: Sequence[Operator]) -> Iterator[list[str]]:
    """Cut a pass's operators behind each all-to-all; yield the names of each stretch, also of the rest."""
    stretch: list[str] = []
    for op in graph:
        stretch.append(op.name)
        if op.kind is Kind.ALL_TO_ALL:
            yield stretch
            stretch = []
    yield stretch


def across_passes(sides: Sides, parts: Mapping[str, Part]) -> Order:
    """Return Oases' cross-pass order: two sub-batches take turns, each up to a collective that the other
    hides.

    Section IV-A, algorithm 1: no turn ends with a pass, so recomputed operators hide collectives of the
    backward pass. Where recomputation repeats no collective, every recomputed operator comes right before its
    first reader (IV-B; line 18), otherwise a layer's recomputation precedes its backward pass. The paper's
    all-reduce is a reduce-scatter, norms on shares of tokens, and an all-gather in Braid; norms and
    all-gather go into the middle of the other sub-batch's turn.
    """
    return tuple(_in_turn([_just_in_time(graph) for graph in _graphs(sides, parts)]))


def within_passes(sides: Sides, parts: Mapping[str, Part]) -> Order:
    """Return Merak's order: two sub-batches take turns, with barriers where recomputation begins and ends.

    Oases describes it in section IV-A, figure 4b.
    """
    stretches = [
        [list(ops) for _, ops in groupby(graph, lambda op: op.phase is Phase.RECOMPUTE)]
        for graph in _graphs(sides, parts)
    ]
    steps: list[Issue | Barrier] = []
    for graphs in zip(*stretches, strict=True):
        steps += [*_in_turn(graphs), Barrier()]
    return tuple(steps[:-1])


def _graphs(sides: Sides, parts: Mapping[str, Part]) -> list[tuple[Operator, ...]]:
    return [graph_of(parts[side.unit], side.kind).operators for side in sides]


def _just_in_time(graph: Sequence[Operator]) -> list[Operator]:
    """Move each recomputed operator right before its first reader, unless recomputation communicates."""
    again = {name: op for op in graph if op.phase is Phase.RECOMPUTE for name in op.writes}
    if any(op.kind.communicates for op in again.values()):
        return list(graph)
    ordered: dict[str, Operator] = {}

    def add(op: Operator) -> None:
        if op.name in ordered:
            return
        for name in op.reads:
            if name in again and again[name] is not op:
                add(again[name])
        ordered[op.name] = op

    for op in graph:
        if op.phase is not Phase.RECOMPUTE:
            add(op)
    for op in graph:
        add(op)
    return list(ordered.values())


def _in_turn(graphs: Sequence[Sequence[Operator]]) -> Iterator[Issue]:
    """Yield the steps of an order in which sub-batches take turns.

    A turn ends at a collective behind heavy operators (`_HEAVY`). The light operators with which a turn
    begins, up to the last collective before a heavy one, go into the middle of the previous turn: by then
    their inputs have arrived, and by the end of that turn their collective's result has arrived too.
    """
    stretches = [list(_cut_behind_heavy(graph)) for graph in graphs]
    turns = [
        (number, *cuts[index])
        for index in range(max(map(len, stretches)))
        for number, cuts in enumerate(stretches)
        if index < len(cuts)
    ]
    for (number, light, heavy), following in zip(turns, [*turns[1:], None], strict=True):
        if (number, light, heavy) == turns[0]:
            yield from (Issue(number, op.name) for op in light)
        steps = [Issue(number, op.name) for op in heavy]
        inserted = [] if following is None else [Issue(following[0], op.name) for op in following[1]]
        same_pass = following is not None and following[0] == number
        middle = len(steps) if same_pass else _middle(heavy)
        yield from (*steps[:middle], *inserted, *steps[middle:])


def _cut_behind_heavy(
    graph: Sequence[Operator],
) -> Iterator[tuple[list[Operator], list[Operator]]]:
    """Cut a pass into turns; yield each as (light operators up to the last collective before a heavy one, the
    operators from there to the next collective)."""
    light: list[Operator] = []
    heavy: list[Operator] = []
    for op in graph:
        heavy.append(op)
        if not op.kind.communicates:
            continue
        if any(heavy_op.kind in _HEAVY for heavy_op in heavy):
            yield light, heavy
            light, heavy = [], []
        else:
            light, heavy = [*light, *heavy], []
    yield light, heavy


def _middle(ops: Sequence[Operator]) -> int:
    """Return the index of the first operator before which half of all FLOPs are done."""
    half, done = sum(op.flops for op in ops) / 2, 0
    for index, op in enumerate(ops):
        if done >= half:
            return index
        done += op.flops
    return len(ops)


_ORDERS: Mapping[PairMethod, _FixedOrder] = {
    PairMethod.TURNS: by_turns,
    PairMethod.EXCHANGES: beside_exchanges,
    PairMethod.WITHIN_PASSES: within_passes,
    PairMethod.ACROSS_PASSES: across_passes,
}


def fixed_order(method: PairMethod | None, sides: Sides, parts: Mapping[str, Part]) -> Order | None:
    """Return the order of passes in a block that needs no decision; None if an order has to be searched.

    Methods of other systems have fixed orders; passes of one kind run one after the other.
    """
    if method is not None and method in _ORDERS:
        return _ORDERS[method](sides, parts)
    alike = len({side.kind for side in sides}) == 1
    return one_behind_the_other(sides, parts) if alike else None
