"""Sizes on one rank that the graphs of a model's parts are written with."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.mesh.mesh import tensor_axis
from braid.scheduling.model.recompute import of_all, with_policies
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.text.pattern import own_degree


@dataclass(frozen=True, kw_only=True)
class PartSizes:
    """Tokens and degrees of one rank; with the model's shape all other sizes follow (`LayerBuilder`)."""

    shape: ModelShape
    tp: int
    micro_batch: int
    """Samples of ``tp`` ranks together."""
    kinds: tuple[str, ...] = ()
    """Of every layer, with variants; empty: those of the model."""
    own: int = 0
    """The tensor-parallel degree of a part's own (`of_kind`); 0: ``tp``."""
    cp: int = 1
    ep: int = 1
    recompute: str = "none"
    """The policy of parts that have none of their own (`own_recompute`)."""
    context: str = "all_gather"
    """How context parallelism exchanges keys and values: ``all_gather`` or ``ring``."""
    streams: Mapping[str, Stream] = field(default_factory=dict)
    """Where the collectives along an axis run; inside the node where nothing else is said."""

    def of_kind(self, kind: str) -> "PartSizes":
        """Those of a kind of layer."""
        return replace(self, own=own_degree(kind))

    @property
    def tensor(self) -> int:
        """Ranks that the part's matrices are cut over."""
        return self.own or self.tp

    @property
    def tensor_axis(self) -> str:
        """The axis of these ranks."""
        return tensor_axis(self.own) if self.own else "tp"

    def degree(self, axis: str) -> int:
        """Of an axis that layers communicate over."""
        return {"tp": self.tp, self.tensor_axis: self.tensor, "cp": self.cp, "ep": self.ep}[axis]

    def stream(self, axis: str) -> Stream:
        """Of the collectives along an axis."""
        return self.streams.get(axis, Stream.INTRA)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank of context parallelism, T; those of the samples of a group of
        ranks that the part is cut over, where the part has a degree of its own."""
        return self.local_tokens * self.tensor

    @property
    def local_tokens(self) -> int:
        """Tokens of a micro-batch outside the tensor-parallel region, t."""
        return self.micro_batch * self.shape.sequence // self.cp // self.tp

    @property
    def vocabulary_rows(self) -> int:
        """Rows of the vocabulary on the fullest rank."""
        return -(-self.shape.vocabulary // self.tensor)


def part_sizes(
    shape: ModelShape,
    layout: ParallelLayout,
    micro_batch: int,
    streams: Mapping[str, Stream] | None = None,
    context: str = "all_gather",
    recompute: str = "none",
) -> PartSizes:
    """Sizes for a layout.

    ``streams``: of mesh axes, by default inside the node; ``recompute``: of all layers, or of each.
    """
    return PartSizes(
        shape=shape,
        tp=layout.tp,
        micro_batch=micro_batch,
        kinds=with_policies(layout.kinds(shape.kinds), recompute),
        recompute=of_all(recompute, shape.layers),
        cp=layout.cp,
        ep=layout.ep,
        context=context,
        streams=streams or {},
    )
