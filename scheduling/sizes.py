"""Sizes on one rank that the graphs of a model's parts are written with."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from braid.scheduling.graph_builder import AxisPlacement
from braid.scheduling.operators import Stream
from braid.scheduling.spec import ModelShape, ParallelLayout


@dataclass(frozen=True, kw_only=True)
class PartSizes:
    """Tokens and degrees of one rank; with the model's shape all other sizes follow (`LayerBuilder`)."""

    shape: ModelShape
    tp: int
    micro_batch: int
    cp: int = 1
    ep: int = 1
    context: str = "all_gather"
    """How context parallelism exchanges keys and values: ``all_gather`` or ``ring``."""
    axes: Mapping[str, AxisPlacement] = field(default_factory=dict)

    def degree(self, axis: str) -> int:
        """Of an axis that layers communicate over."""
        return {"tp": self.tp, "cp": self.cp, "ep": self.ep}[axis]

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank of context parallelism, T."""
        return self.micro_batch * self.shape.sequence // self.cp

    @property
    def local_tokens(self) -> int:
        """Tokens of a micro-batch outside the tensor-parallel region, t."""
        return self.tokens // self.tp

    @property
    def vocabulary_rows(self) -> int:
        """Rows of the vocabulary on the fullest rank."""
        return -(-self.shape.vocabulary // self.tp)


def part_sizes(
    shape: ModelShape,
    layout: ParallelLayout,
    micro_batch: int,
    axes: Mapping[str, AxisPlacement] | None = None,
    context: str = "all_gather",
) -> PartSizes:
    """Sizes for a layout; ``axes`` places mesh axes on streams (by default all inside the node)."""
    placed = axes or axes_on(layout, {})
    return PartSizes(
        shape=shape,
        tp=layout.tp,
        micro_batch=micro_batch,
        cp=layout.cp,
        ep=layout.ep,
        context=context,
        axes=placed,
    )


def axes_on(layout: ParallelLayout, streams: Mapping[str, Stream]) -> dict[str, AxisPlacement]:
    """The axes that layers communicate over, on streams; inside the node where nothing else is said."""
    return {
        axis: AxisPlacement(degree=layout.degree(axis), stream=streams.get(axis, Stream.INTRA))
        for axis in ("tp", "cp", "ep")
    }
