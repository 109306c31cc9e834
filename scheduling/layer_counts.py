"""How many layers every chunk of a pipeline has."""

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from braid.scheduling.spec import ParallelLayout


@cache
def layer_counts(layout: "ParallelLayout", layers: int) -> tuple[int, ...]:
    """Layers per chunk (see `ParallelLayout.layers_of`)."""
    size, head = layout.chunks, layout.head_layers
    each, more = divmod(layers + head, size)
    inner = sorted(range(size), key=lambda c: (-min(c, size - 1 - c), -c if layout.folded else c))[:more]
    counts = [each + (c in inner) for c in range(size)]
    counts[-1] -= head
    if min(counts[0], counts[-1]) < 1:
        raise ValueError(
            f"model.layers={layers} leaves the first or the last of {size} chunks without a layer; lower "
            f"parallel.pp"
        )
    return tuple(counts)
