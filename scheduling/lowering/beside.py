"""What a partition of a layer's collective may cut with it."""

from collections.abc import Collection, Sequence
from typing import Final

from braid.scheduling.operators import Graph, Kind, Operator, Part, Pass, Precision

CUT: Final = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
"""Kinds of collectives of layers that may be cut."""


def can_be_cut(part: Part, op: Operator) -> bool:
    """Whether a partition may divide an operator: a collective of rows of which every rank has as many."""
    return op.kind in CUT and len(op.reads) == 1 and part.values[op.reads[0]].precision is not Precision.INDEX


def operators_beside(graph: Graph, op: Operator, most: int) -> list[Operator]:
    """Operators that can be cut with a collective, nearest first: a GEMM, and what works row by row."""
    found: list[Operator] = []
    gathers = op.kind is Kind.ALL_GATHER
    while len(found) < most:
        value = (found[-1] if found else op).writes[0] if gathers else (found[-1] if found else op).reads[0]
        nearest = _reader(graph, value, found) if gathers else _writer(graph, value)
        kinds: Collection[Kind] = (Kind.ACTIVATION,) if found else (Kind.GEMM,)
        if nearest is None or nearest.kind not in kinds or not _plain(nearest):
            break
        found.append(nearest)
    return found


def _plain(op: Operator) -> bool:
    return len(op.reads) == len(op.writes) == 1 and op.phase is not Pass.WEIGHT_GRADIENT


def _reader(graph: Graph, value: str, found: Sequence[Operator]) -> Operator | None:
    readers = (op for op in graph.operators if value in op.reads and op.phase is not Pass.WEIGHT_GRADIENT)
    return next((op for op in readers if op not in found), None)


def _writer(graph: Graph, value: str) -> Operator | None:
    return next((op for op in graph.operators if value in op.writes), None)
