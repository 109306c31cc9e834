"""Checks whether a partition can cut its collective; an impossible one is refused with a one-line error."""

from collections.abc import Mapping
from math import prod
from typing import Final

from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.mesh.partition import PARTITIONED, Partition
from braid.scheduling.model.operators import Graph, Kind, Operator, Part, Phase, Precision
from braid.scheduling.text.pattern import is_layer

CUT: Final = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
"""Kinds of collectives inside layers that partitions may cut."""


def can_be_cut(part: Part, op: Operator) -> bool:
    """Return whether a partition may cut an operator: an all-gather or reduce-scatter of equally many rows
    per rank, and not of indices."""
    return op.kind in CUT and len(op.reads) == 1 and part.values[op.reads[0]].precision is not Precision.INDEX


def operators_beside(graph: Graph, op: Operator, most: int) -> list[Operator]:
    """Return up to ``most`` operators that can be cut together with a collective, nearest first.

    They are a GEMM, then activations; they follow a gather, or precede a scatter.
    """
    chain: list[Operator] = []
    for kind in (Kind.GEMM, *(Kind.ACTIVATION,) * most)[:most]:
        last = chain[-1] if chain else op
        if op.kind is Kind.ALL_GATHER:
            value = last.writes[0]
            beside = (o for o in graph.operators if value in o.reads and o.phase is not Phase.WEIGHT_GRADIENT)
        else:
            value = last.reads[0]
            beside = (o for o in graph.operators if value in o.writes)
        nearest = next((o for o in beside if o not in chain), None)
        if nearest is None or nearest.kind is not kind or not len(nearest.reads) == len(nearest.writes) == 1:
            break
        chain.append(nearest)
    return chain


def check_partition(partition: Partition, parts: Mapping[str, Part], layout: ParallelLayout) -> None:
    """Raise `ValueError` if layers or layout lack what a partition cuts, or if cutting would change
    results."""
    first, second = partition.what
    axis = first
    if first in parts:
        operators = (*parts[first].forward.operators, *parts[first].backward.operators)
        collective = next((op for op in operators if op.name == second), None)
        part = parts[first]
        if collective is None or not is_layer(first) or not can_be_cut(part, collective):
            names = [op.name for op in operators if can_be_cut(part, op)] if is_layer(first) else []
            raise ValueError(
                f"partition {partition.what}: that is no all-gather or reduce-scatter of a layer; "
                f"{first} has {', '.join(names) or 'none'}"
            )
        axis = collective.axis or ""
        _check_stages(partition, collective.kind)
        graphs = (parts[first].forward, parts[first].backward)
        graph = next(g for g in graphs if any(op is collective for op in g.operators))
        adjacent = len(operators_beside(graph, collective, partition.operators))
        if partition.operators > adjacent:
            raise ValueError(
                f"partition {partition.what}: operators={partition.operators}, but {adjacent} beside it "
                f"can be cut"
            )
    elif first not in PARTITIONED or second not in set(Kind):
        raise ValueError(
            f"partition {partition.what}: there is no such part or axis; parts are {', '.join(parts)}, "
            f"axes {', '.join(PARTITIONED)}"
        )
    else:
        _check_kind(partition, axis, second)
        if axis == "dp" and (second == Kind.ALL_REDUCE) == bool(layout.zero):
            used = f"{Kind.REDUCE_SCATTER} and {Kind.ALL_GATHER}" if layout.zero else str(Kind.ALL_REDUCE)
            raise ValueError(
                f"partition {partition.what}: with parallel.zero={layout.zero} replicas use {used}; give that"
            )
    ranks = {"dp": layout.share_ranks if layout.zero else layout.data_ranks}.get(axis)
    ranks = ranks or layout.degree(axis)
    if partition.mesh and prod(partition.mesh) != ranks:
        raise ValueError(
            f"partition {partition.what}: mesh={'x'.join(map(str, partition.mesh))} has "
            f"{prod(partition.mesh)} ranks, the axis {axis} has {ranks}"
        )


def _check_stages(partition: Partition, kind: Kind) -> None:
    if partition.about_own and partition.dim == "width":
        raise ValueError(
            f"partition {partition.what}: along the width a product needs all rows at once, which "
            f"order=1,0,1 brings in two; give every dim of the mesh once"
        )
    if kind is not Kind.ALL_GATHER and (partition.about_own or partition.delivered):
        cut = "order=1,0,1" if partition.about_own else "what is cut as delivered"
        raise ValueError(
            f"partition {partition.what}: {cut} is for all-gathers; give every dim of the mesh once"
        )


def _check_kind(partition: Partition, axis: str, kind: str) -> None:
    """Raise `ValueError` if a partition of all collectives of a kind over an axis is impossible."""
    kinds = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER) + (() if axis == "tp" else (Kind.ALL_REDUCE,))
    if kind not in kinds:
        raise ValueError(f"partition {partition.what}: over {axis} it can be of {', '.join(kinds)}")
    if axis == "dp" and (partition.pieces > 1 or partition.dim or partition.about_own):
        raise ValueError(
            f"partition {partition.what}: what replicas share is cut in buckets; give a mesh and an "
            f"order alone"
        )
    _check_stages(partition, Kind(kind))
