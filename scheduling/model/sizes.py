"""Sizes on one rank, from which the graphs of a model's parts are written."""

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
    """Tokens and degrees of one rank; all other sizes follow from them and the model's shape."""

    shape: ModelShape
    tp: int
    micro_batch: int
    """Number of samples that ``tp`` ranks process together."""
    kinds: tuple[str, ...] = ()
    """Kind of every layer, with variants; empty: the kinds of the model."""
    own: int = 0
    """Tensor-parallel degree of the part's kind (`of_kind`); 0: ``tp``."""
    cp: int = 1
    ep: int = 1
    recompute: str = "none"
    """Recompute policy of parts without a policy of their own (`own_recompute`)."""
    context: str = "all_gather"
    """How context parallelism exchanges keys and values: ``all_gather`` or ``ring``."""
    streams: Mapping[str, Stream] = field(default_factory=dict)
    """Stream of the collectives along each axis; an axis without an entry stays inside the node."""

    def of_kind(self, kind: str) -> "PartSizes":
        """Return the sizes for layers of a kind."""
        return replace(self, own=own_degree(kind))

    @property
    def tensor(self) -> int:
        """Number of ranks that the part's matrices are cut over."""
        return self.own or self.tp

    @property
    def tensor_axis(self) -> str:
        """The axis of the ranks that the part's matrices are cut over."""
        return tensor_axis(self.own) if self.own else "tp"

    def degree(self, axis: str) -> int:
        """Return the degree of an axis that layers communicate over."""
        return {"tp": self.tp, self.tensor_axis: self.tensor, "cp": self.cp, "ep": self.ep}[axis]

    def stream(self, axis: str) -> Stream:
        """Return the stream of the collectives along an axis."""
        return self.streams.get(axis, Stream.INTRA)

    @property
    def tokens(self) -> int:
        """Number T of tokens of a micro-batch on a rank of context parallelism; for a part with a degree of
        its own, of the samples of its group of ranks."""
        return self.local_tokens * self.tensor

    @property
    def local_tokens(self) -> int:
        """Number t of tokens of a micro-batch on a rank outside the tensor-parallel region."""
        return self.micro_batch * self.shape.sequence // self.cp // self.tp

    @property
    def vocabulary_rows(self) -> int:
        """Number of rows of the vocabulary on the fullest rank."""
        return -(-self.shape.vocabulary // self.tensor)


def part_sizes(
    shape: ModelShape,
    layout: ParallelLayout,
    micro_batch: int,
    streams: Mapping[str, Stream] | None = None,
    context: str = "all_gather",
    recompute: str = "none",
) -> PartSizes:
    """Return the sizes on a rank of a layout.

    ``streams``: stream of each mesh axis, by default inside the node; ``recompute``: see `policies_of`.
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
