"""What a partition of a collective can cut; every other partition is refused with one line."""

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Final

from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.mesh.partition import PARTITIONED, Partition
from braid.scheduling.model.operators import Graph, Kind, Operator, Part, Phase, Precision
from braid.scheduling.text.pattern import is_layer

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
    return len(op.reads) == len(op.writes) == 1 and op.phase is not Phase.WEIGHT_GRADIENT


def _reader(graph: Graph, value: str, found: Sequence[Operator]) -> Operator | None:
    readers = (op for op in graph.operators if value in op.reads and op.phase is not Phase.WEIGHT_GRADIENT)
    return next((op for op in readers if op not in found), None)


def _writer(graph: Graph, value: str) -> Operator | None:
    return next((op for op in graph.operators if value in op.writes), None)


def check_partition(one: Partition, parts: Mapping[str, Part], layout: ParallelLayout) -> None:
    """`ValueError` for what the model's layers or the layout do not have, or what would not be exact."""
    first, second = one.where, one.collective
    axis = first
    if first in parts:
        operators = (*parts[first].forward.operators, *parts[first].backward.operators)
        found = next((op for op in operators if op.name == second), None)
        part = parts[first]
        if found is None or not is_layer(first) or not can_be_cut(part, found):
            known = [op.name for op in operators if can_be_cut(part, op)] if is_layer(first) else []
            raise ValueError(
                f"partition {one.what}: that is no all-gather or reduce-scatter of a layer; "
                f"{first} has {', '.join(known) or 'none'}"
            )
        axis = found.axis or ""
        _check_stages(one, found.kind)
        graphs = (parts[first].forward, parts[first].backward)
        graph = next(g for g in graphs if any(op is found for op in g.operators))
        beside = len(operators_beside(graph, found, one.operators))
        if one.operators > beside:
            raise ValueError(
                f"partition {one.what}: operators={one.operators}, but {beside} beside it can be cut"
            )
    elif first not in PARTITIONED or second not in set(Kind):
        raise ValueError(
            f"partition {one.what}: there is no such part or axis; parts are {', '.join(parts)}, "
            f"axes {', '.join(PARTITIONED)}"
        )
    else:
        _check_kind(one, axis, second)
        if axis == "dp" and (second == Kind.ALL_REDUCE) == bool(layout.zero):
            used = f"{Kind.REDUCE_SCATTER} and {Kind.ALL_GATHER}" if layout.zero else str(Kind.ALL_REDUCE)
            raise ValueError(
                f"partition {one.what}: with parallel.zero={layout.zero} replicas use {used}; give that"
            )
    ranks = {"dp": layout.share_ranks if layout.zero else layout.data_ranks}.get(axis)
    ranks = ranks or layout.degree(axis)
    if one.mesh and prod(one.mesh) != ranks:
        raise ValueError(
            f"partition {one.what}: mesh={'x'.join(map(str, one.mesh))} has {prod(one.mesh)} ranks, "
            f"the axis {axis} has {ranks}"
        )


def _check_stages(one: Partition, kind: Kind) -> None:
    if one.about_own and one.dim == "width":
        raise ValueError(
            f"partition {one.what}: along the width a product needs all rows at once, which order=1,0,1 "
            f"brings in two; give every dim of the mesh once"
        )
    if kind is not Kind.ALL_GATHER and (one.about_own or one.delivered):
        what = "order=1,0,1" if one.about_own else "what is cut as delivered"
        raise ValueError(f"partition {one.what}: {what} is for all-gathers; give every dim of the mesh once")


def _check_kind(one: Partition, axis: str, kind: str) -> None:
    """Of all collectives of a kind."""
    known = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER) + (() if axis == "tp" else (Kind.ALL_REDUCE,))
    if kind not in known:
        raise ValueError(f"partition {one.what}: over {axis} it can be of {', '.join(known)}")
    if axis == "dp" and (one.pieces > 1 or one.dim or one.about_own):
        raise ValueError(
            f"partition {one.what}: what replicas share is cut in buckets; give a mesh and an order alone"
        )
    _check_stages(one, Kind(kind))
