"""How many layers every chunk of a pipeline has."""

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from braid.scheduling.spec import ParallelLayout


@cache
def layer_counts(layout: "ParallelLayout", layers: int) -> tuple[int, ...]:
    """Layers per chunk (see `ParallelLayout.layers_of`)."""
    size, head, late = layout.chunks, layout.head_layers, layout.late_layers
    each, more = divmod(layers + head, size)
    inner = sorted(range(size), key=lambda c: (-min(c, size - 1 - c), -c if layout.folded else c))[:more]
    counts = [each + (c in inner) for c in range(size)]
    counts[0] -= late
    counts[-1] += late - head
    for end, key, count in (("first", "late_layers", late), ("last", "head_layers", head)):
        if counts[0 if end == "first" else -1] < 1:
            raise ValueError(
                f"parallel.{key}={count} leaves the {end} of {size} chunks of {layers} layers without "
                f"a layer; lower it"
            )
    return tuple(counts)
