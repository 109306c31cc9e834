"""Sizes on one rank, which determine the graphs of a model's parts."""

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
    """Model shape, micro-batch and parallel degrees, from which all sizes of parts on one rank follow."""

    shape: ModelShape
    tp: int
    micro_batch: int
    """Number of samples in a micro-batch, which a group of ``tp`` ranks processes together."""
    kinds: tuple[str, ...] = ()
    """Kind of every layer, including variants; empty: the kinds in the model's shape."""
    own: int = 0
    """Tensor-parallel degree of the part if it differs from ``tp`` (set by `of_kind`), else 0."""
    cp: int = 1
    ep: int = 1
    recompute: str = "none"
    """Recompute policy of parts without a policy of their own (`own_recompute`)."""
    context: str = "all_gather"
    """How context parallelism exchanges keys and values: ``all_gather`` or ``ring``."""
    streams: Mapping[str, Stream] = field(default_factory=dict)
    """Axis -> stream of its collectives; an axis that is not listed stays inside the node."""

    def of_kind(self, kind: str) -> "PartSizes":
        """Return the sizes for a layer of the given kind, which may have its own tensor-parallel degree."""
        return replace(self, own=own_degree(kind))

    @property
    def tensor(self) -> int:
        """Number of ranks over which the part's matrices are cut."""
        return self.own or self.tp

    @property
    def tensor_axis(self) -> str:
        """Name of the axis over which the part's matrices are cut."""
        return tensor_axis(self.own) if self.own else "tp"

    def degree(self, axis: str) -> int:
        """Return the number of ranks along an axis over which layers communicate."""
        return {"tp": self.tp, self.tensor_axis: self.tensor, "cp": self.cp, "ep": self.ep}[axis]

    def stream(self, axis: str) -> Stream:
        """Return the stream on which collectives over an axis run."""
        return self.streams.get(axis, Stream.INTRA)

    @property
    def tokens(self) -> int:
        """Number T of tokens of a micro-batch inside the tensor-parallel region: 1/cp of them, or for a part
        with its own degree, 1/cp of the samples that its group of ranks processes."""
        return self.local_tokens * self.tensor

    @property
    def local_tokens(self) -> int:
        """Number t of a micro-batch's tokens that a rank holds outside the tensor-parallel region (sequence
        parallelism)."""
        return self.micro_batch * self.shape.sequence // self.cp // self.tp

    @property
    def vocabulary_rows(self) -> int:
        """Number of rows of the embedding table on the rank that holds most."""
        return -(-self.shape.vocabulary // self.tensor)


def part_sizes(
    shape: ModelShape,
    layout: ParallelLayout,
    micro_batch: int,
    streams: Mapping[str, Stream] | None = None,
    context: str = "all_gather",
    recompute: str = "none",
) -> PartSizes:
    """Return the sizes of a model's parts on a rank of a layout.

    ``streams``: mesh axis -> stream of its collectives, by default inside the node; ``recompute``: one
    policy, or a policy for each layer (`policies_of`).
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
