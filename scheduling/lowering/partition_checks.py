"""What a partition may say of a model on a layout: one clear line for everything else."""

from collections.abc import Mapping
from math import prod

from braid.scheduling.lowering.beside import can_be_cut, operators_beside
from braid.scheduling.operators import Kind, Part
from braid.scheduling.partition import PARTITIONED, Partition
from braid.scheduling.pattern import is_layer
from braid.scheduling.spec import ParallelLayout


def check_partition(one: Partition, parts: Mapping[str, Part], layout: ParallelLayout) -> None:
    """`ValueError` for what the model's layers or the layout do not have, or what would not be exact."""
    first, _, second = one.what.partition("/")
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
    ranks = {"dp": layout.share_ranks if layout.zero else layout.dp * layout.cp}.get(axis)
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
