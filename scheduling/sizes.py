"""Sizes on one rank that the graphs of a model's parts are written with."""

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    streams: Mapping[str, Stream] = field(default_factory=dict)
    """Where the collectives along an axis run; inside the node where nothing else is said."""

    def degree(self, axis: str) -> int:
        """Of an axis that layers communicate over."""
        return {"tp": self.tp, "cp": self.cp, "ep": self.ep}[axis]

    def stream(self, axis: str) -> Stream:
        """Of the collectives along an axis."""
        return self.streams.get(axis, Stream.INTRA)

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
    streams: Mapping[str, Stream] | None = None,
    context: str = "all_gather",
) -> PartSizes:
    """Sizes for a layout; ``streams``: of mesh axes, by default inside the node."""
    return PartSizes(
        shape=shape,
        tp=layout.tp,
        micro_batch=micro_batch,
        cp=layout.cp,
        ep=layout.ep,
        context=context,
        streams=streams or {},
    )
