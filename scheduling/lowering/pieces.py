"""Collectives and the GEMMs beside them in pieces of tokens, so that a micro-batch overlaps with itself.

This is MegaScale's (and Centauri's workload partition of a MatMul along its rows): piece i of a GEMM runs
while piece i+1 of the all-gather before it, or piece i-1 of the reduce-scatter behind it, is on the link.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from braid.scheduling.operators import Graph, Kind, Operator, Part, Pass, Piece, Value
from braid.scheduling.pattern import is_layer

WAYS = (2, 4, 8)
"""Numbers of pieces that are tried, and measured."""


def in_pieces(part: Part, ways: int, only: Collection[str] | None = None) -> Part:
    """The part with every all-gather before, and reduce-scatter behind, a GEMM in ``ways`` pieces.

    ``only``: names of the collectives to cut (default: all that have such a GEMM). Weight gradients keep
    the whole tensors. A piece's result is part of the whole value's memory; the last piece completes it.
    (Executed, a piece also has its rows side by side for itself while it is under way: 1/``ways`` more.)
    """
    if ways < 1:
        raise ValueError(f"pieces={ways} must be at least 1")
    values = dict(part.values)
    forward = _cut(part.forward, ways, only, values)
    backward = _cut(part.backward, ways, only, values)
    return replace(part, forward=forward, backward=backward, values=values)


def with_pieces(parts: Mapping[str, Part], ways: int) -> dict[str, Part]:
    """The parts of a model with all-gathers of the layers in ``ways`` pieces (``intra_batch``); 1: as is."""
    if ways == 1:
        return dict(parts)
    layers = {name: part for name, part in parts.items() if is_layer(name)}
    return {**parts, **{n: in_pieces(part, ways, gathers_of(part)) for n, part in layers.items()}}


def gathers_of(part: Part) -> frozenset[str]:
    """The all-gathers of both passes: what MegaScale cuts, as DHelix describes it (section 2.3)."""
    operators = (*part.forward.operators, *part.backward.operators)
    return frozenset(op.name for op in operators if op.kind is Kind.ALL_GATHER)


def gemms_in_pieces(part: Part) -> frozenset[str]:
    """The GEMMs, by key, that such a layer can run in pieces: they turn one value into one other."""
    graphs, only = (part.forward, part.backward), gathers_of(part)
    gemms = [graph.named(gemm) for graph in graphs for _, gemm in _pairs(graph, only)]
    return frozenset(op.key for op in gemms if len(op.reads) == len(op.writes) == 1)


def _cut(graph: Graph, ways: int, only: Collection[str] | None, values: dict[str, Value]) -> Graph:
    chosen = dict(_pairs(graph, only))
    gemms = {gemm: collective for collective, gemm in chosen.items()}
    operators: list[Operator] = []
    for op in graph.operators:
        if op.name in chosen or op.name in gemms:
            pair = (op.name, chosen[op.name]) if op.name in chosen else (gemms[op.name], op.name)
            first = min(pair, key=lambda name: graph.operators.index(graph.named(name)))
            if op.name == first:
                gathers = first == pair[0]
                operators += _pieces(graph.named(pair[0]), graph.named(pair[1]), ways, gathers, values)
            continue
        operators.append(op)
    return Graph(operators=tuple(operators))


def _pairs(graph: Graph, only: Collection[str] | None) -> Iterator[tuple[str, str]]:
    """Collective and GEMM, each in at most one pair."""
    taken: set[str] = set()
    for op in graph.operators:
        if only is not None and op.name not in only:
            continue
        partner = None
        if op.kind is Kind.ALL_GATHER:
            partner = _reader(graph, op)
        elif op.kind is Kind.REDUCE_SCATTER:
            partner = _writer(graph, op)
        if partner is not None and partner.name not in taken:
            taken.add(partner.name)
            yield op.name, partner.name


def _reader(graph: Graph, gather: Operator) -> Operator | None:
    """The GEMM that reads what was gathered, weight gradients aside."""
    return next(
        (
            op
            for op in graph.operators
            if _is_gemm(op) and gather.writes[0] in op.reads and op.phase is not Pass.WEIGHT_GRADIENT
        ),
        None,
    )


def _writer(graph: Graph, scatter: Operator) -> Operator | None:
    return next((op for op in graph.operators if _is_gemm(op) and scatter.reads[0] in op.writes), None)


def _is_gemm(op: Operator) -> bool:
    return op.kind in (Kind.GEMM, Kind.GROUPED_GEMM)


def _pieces(
    collective: Operator, gemm: Operator, ways: int, gathers: bool, values: dict[str, Value]
) -> list[Operator]:
    """Pieces of both, in the order of a pipeline: those of a gather first, those of a scatter in turns."""
    first, second = (collective, gemm) if gathers else (gemm, collective)
    pieces: list[list[Operator]] = [[], []]
    for n in range(1, ways + 1):
        for place, op in enumerate((first, second)):
            last = n == ways
            writes = tuple(_part(name, n, ways, values) for name in op.writes)
            reads = tuple(
                f"{name}.{n}of{ways}" if place == 1 and name in first.writes else name for name in op.reads
            )
            pieces[place].append(
                replace(
                    op,
                    name=f"{op.name}.{n}of{ways}",
                    own_name=f"{op.name}.{n}of{ways}",
                    measured_as=f"{op.measured_as}.{n}of{ways}",
                    piece=Piece(op.name, n, ways, collective.axis or ""),
                    reads=reads,
                    writes=(*writes, *op.writes) if last else writes,
                    flops=op.flops // ways,
                    bytes=op.bytes // ways,
                )
            )
    if gathers:
        return [*pieces[0], *pieces[1]]
    return [op for both in zip(*pieces, strict=True) for op in both]


def _part(name: str, number: int, ways: int, values: dict[str, Value]) -> str:
    """A piece of a value: a slice of its memory."""
    whole = values[name]
    piece = f"{name}.{number}of{ways}"
    values[piece] = replace(whole, name=piece, elements=whole.elements // ways, alias_of=None, piece_of=name)
    return piece
