"""Axes of the mesh over which gradients, and the squares of their norm, are summed."""

from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.mesh.mesh import beyond
from braid.scheduling.model.shape import ModelShape

SUMMED = ("dp", "replica", "edp")
"""Axes over which replicas sum gradients."""
SHARED = ("dp", "edp")
"""Axes among these whose ranks hold shards (ZeRO)."""


def gradient_axes(model: ModelShape, layout: ParallelLayout, chunk: int) -> tuple[str, ...]:
    """Axes over which the gradients of a chunk are summed, one after the other.

    ``tp``: parameters that every tensor-parallel rank holds whole, each with its own tokens, and inside it
    ranks that hold the same of layers with a degree of their own (`axes_beyond`); ``ends``: a
    table that is held by the first and the last stage; ``dp``: replicas, which see other samples or (cp)
    tokens; ``replica``: those that hold the same shares, behind the others; ``edp``: those of the same
    experts.
    """
    at_end = layout.is_first(chunk) or layout.is_last(chunk)
    found = {
        "tp": layout.tp > 1,
        **dict.fromkeys(axes_beyond(layout, chunk), True),
        "ends": model.tied_head and layout.ends_apart and at_end,
        "dp": layout.dp * layout.cp > 1,
        "replica": layout.replicas > 1,
        "edp": model.experts > 0 and layout.ep > 1 and layout.expert_replicas > 1,
    }
    return tuple(axis for axis, needed in found.items() if needed)


def axes_beyond(layout: ParallelLayout, chunk: int) -> tuple[str, ...]:
    """Axes inside ``tp`` over which gradients of a chunk's parts are summed, whose degrees are their own."""
    degrees: set[int] = set()
    if layout.tensor_degrees:
        layers = layout.layers_of(chunk, len(layout.tensor_degrees))
        degrees |= {layout.tensor_degrees[layer] for layer in layers}
    return tuple(beyond(degree) for degree in sorted(degrees) if 1 < degree < layout.tp)


def norm_axes(layout: ParallelLayout) -> tuple[str, ...]:
    """Axes along which gradients differ, over which the squares of the norm are summed, one by one."""
    shared = layout.share_ranks > 1
    experts = layout.ep > 1 and not shared
    found = {"tp": layout.tp > 1, "pp": layout.pp > 1, "dp": shared, "ep": experts}
    return tuple(axis for axis, needed in found.items() if needed)
