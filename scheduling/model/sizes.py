"""Sizes on one rank, which determine the graphs of a model's parts."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.mesh.mesh import tensor_axis
from braid.scheduling.model.recompute import with_policies
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.text.pattern import own_degree


@dataclass(frozen=True)
class PartSizes:
    """Model shape, layout and micro-batch, from which all sizes of parts on one rank follow."""

    shape: ModelShape
    layout: ParallelLayout
    micro_batch: int
    """Number of samples in a micro-batch, which a group of ``tp`` ranks processes together."""
    streams: Mapping[str, Stream] | None = None
    """Axis -> stream of its collectives; an axis that is not listed stays inside the node."""
    context: str = "all_gather"
    """How context parallelism exchanges keys and values: ``all_gather`` or ``ring``."""
    recompute: str = "none"
    """One recompute policy, or a policy for each layer (`policies_of`)."""
    own: int = 0
    """Tensor-parallel degree of the part if it differs from ``tp`` (set by `of_kind`), else 0."""

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Kind of every layer, including variants."""
        return with_policies(self.layout.kinds(self.shape.kinds), self.recompute)

    @property
    def tp(self) -> int:
        return self.layout.tp

    @property
    def cp(self) -> int:
        return self.layout.cp

    @property
    def ep(self) -> int:
        return self.layout.ep

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
        return self.tensor if axis == self.tensor_axis else self.layout.degree(axis)

    def stream(self, axis: str) -> Stream:
        """Return the stream on which collectives over an axis run."""
        return (self.streams or {}).get(axis, Stream.INTRA)

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
