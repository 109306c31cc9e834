"""Orders of several passes' operators that need no search: those of other systems, and one behind the other.

Each takes what a program is for, and the parts; it gives what `programs.program_of` reads.
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
"""What a collective can hide behind: norms and residuals are too short."""


def one_behind_the_other(sides: Sides, parts: Mapping[str, Part]) -> Order:
    """All operators of the first pass, those of the second, and so on."""
    graphs = enumerate(_graphs(sides, parts))
    return tuple(Issue(turn, op.name) for turn, graph in graphs for op in graph)


def round_robin(strands: Sequence[Sequence[Item]]) -> tuple[Item, ...]:
    """One item of each strand, the last strand first, and so on (Wavelet)."""
    return tuple(
        strand[number]
        for number in range(max(map(len, strands)))
        for strand in reversed(strands)
        if number < len(strand)
    )


def by_turns(sides: Sides, parts: Mapping[str, Part]) -> Order:
    """One operator of each pass by turns."""
    graphs = enumerate(_graphs(sides, parts))
    return round_robin([[Issue(turn, op.name) for op in graph] for turn, graph in graphs])


def beside_exchanges(sides: Sides, parts: Mapping[str, Part]) -> Order:
    """The order in which Megatron-Core and torchtitan overlap the exchanges of experts, for a forward and a
    backward pass: each all-to-all stands behind the other pass's attention, or experts, which hide it.

    Passes without exchanges run one behind the other.
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
    """Operators up to and with an all-to-all, those up to and with the next one, and so on."""
    stretch: list[str] = []
    for op in graph:
        stretch.append(op.name)
        if op.kind is Kind.ALL_TO_ALL:
            yield stretch
            stretch = []
    yield stretch


def across_passes(sides: Sides, parts: Mapping[str, Part]) -> Order:
    """Two sub-batches by turns: each goes on up to a collective, which the other one then hides.

    Oases' cross-pass schedule (section IV-A, algorithm 1): no turn ends with a pass, so what is recomputed
    hides collectives of the backward pass. Where recomputation repeats no collective, every operator comes
    right before what needs it (IV-B; line 18), else a layer's is done before its backward pass. The paper's
    all-reduce is here a reduce-scatter, norms on shares of tokens, and an all-gather: the latter two go into
    the middle of the other sub-batch's turn.
    """
    return tuple(_in_turn([_just_in_time(graph) for graph in _graphs(sides, parts)]))


def within_passes(sides: Sides, parts: Mapping[str, Part]) -> Order:
    """The same within each pass alone: all waits where recomputation of a layer begins and where it ends.

    Merak's schedule, as Oases describes it (section IV-A, figure 4b).
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
    """The same operators; what is recomputed comes right before its first reader, unless it communicates."""
    again = {name: op for op in graph if op.phase is Phase.RECOMPUTE for name in op.writes}
    if any(op.kind.communicates for op in again.values()):
        return list(graph)
    placed: dict[str, Operator] = {}

    def place(op: Operator) -> None:
        if op.name in placed:
            return
        for name in op.reads:
            if name in again and again[name] is not op:
                place(again[name])
        placed[op.name] = op

    for op in graph:
        if op.phase is not Phase.RECOMPUTE:
            place(op)
    for op in graph:
        place(op)
    return list(placed.values())


def _in_turn(graphs: Sequence[Sequence[Operator]]) -> Iterator[Issue]:
    """Steps of sub-batches that go on by turns up to a collective behind heavy operators.

    What stands before the heavy operators of a turn, up to its last collective, is put into the middle of the
    turn before: what it waits for has come by then, and its own collective comes by the end.
    """
    stretches = [list(_cut_behind_heavy(graph)) for graph in graphs]
    turns = [
        (number, *own[place])
        for place in range(max(map(len, stretches)))
        for number, own in enumerate(stretches)
        if place < len(own)
    ]
    for (number, light, heavy), following in zip(turns, [*turns[1:], None], strict=True):
        if (number, light, heavy) == turns[0]:
            yield from (Issue(number, op.name) for op in light)
        steps = [Issue(number, op.name) for op in heavy]
        beside = [] if following is None else [Issue(following[0], op.name) for op in following[1]]
        own = following is not None and following[0] == number
        middle = len(steps) if own else _middle(heavy)
        yield from (*steps[:middle], *beside, *steps[middle:])


def _cut_behind_heavy(
    graph: Sequence[Operator],
) -> Iterator[tuple[list[Operator], list[Operator]]]:
    """Turns: operators up to the last collective before any heavy one; those up to the collective behind."""
    light: list[Operator] = []
    heavy: list[Operator] = []
    for op in graph:
        heavy.append(op)
        if not op.kind.communicates:
            continue
        if any(one.kind in _HEAVY for one in heavy):
            yield light, heavy
            light, heavy = [], []
        else:
            light, heavy = [*light, *heavy], []
    yield light, heavy


def _middle(ops: Sequence[Operator]) -> int:
    """The place before which half of the operators' work is done."""
    half, done = sum(op.flops for op in ops) / 2, 0
    for place, op in enumerate(ops):
        if done >= half:
            return place
        done += op.flops
    return len(ops)


_ORDERS: Mapping[PairMethod, _FixedOrder] = {
    PairMethod.TURNS: by_turns,
    PairMethod.EXCHANGES: beside_exchanges,
    PairMethod.WITHIN_PASSES: within_passes,
    PairMethod.ACROSS_PASSES: across_passes,
}


def fixed_order(method: PairMethod | None, sides: Sides, parts: Mapping[str, Part]) -> Order | None:
    """How passes that meet are ordered where nothing else was decided; None where it has to be."""
    if method is not None and method in _ORDERS:
        return _ORDERS[method](sides, parts)
    alike = len({side.kind for side in sides}) == 1
    return one_behind_the_other(sides, parts) if alike else None
