"""Which ranks hold what: degrees of the mesh axes, and where the chunks of a model are.

All checks raise `ValueError` with the configuration keys, their values and what would be right.
"""

from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache, cached_property
from itertools import pairwise
from typing import Final

from braid.scheduling.mesh.mesh import MeshShape, Position, training_mesh
from braid.scheduling.text.pattern import counted, variant

ZERO_STAGES: Final = (0, 1, 2, 3)

AXES: Final = ("pp", "dp", "cp", "tp")
"""Mesh axes, outermost first; the last one varies fastest with the rank."""


def require_at_least_one(section: str, record: object, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(record, name)
        if value < 1:
            raise ValueError(f"{section}.{name}={value} must be at least 1")


class Placement(StrEnum):
    """Which chunks of the model a pipeline stage holds."""

    LINEAR = "linear"
    """Stage i holds chunk i of p."""
    FOLDED = "folded"
    """Stage i holds the chunks i and 2p-1-i of 2p: down the stages and back up (DHelix section 4.1)."""
    INTERLEAVED = "interleaved"
    """Stage i holds the chunks i and p+i of 2p: down the stages twice (Narayanan et al. 2021)."""


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Degrees of the mesh axes, and the placement of the model's chunks on pipeline stages.

    ``ep`` ranks of the data-parallel axis share the experts of a mixture of experts between them.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    placement: Placement = Placement.LINEAR
    head_layers: int = 0
    """Layers that the head counts for when layers are shared out between chunks."""
    zero: int = 0
    """What is cut over the ranks that share parameters: optimizer states (1), gradients too (2), parameters
    too (3). Parameters are gathered before they are used: once a step, or (3) whenever they are. With one
    rank it is 0."""
    shards: int = 0
    """Ranks of ``dp`` over which that is cut; as many others hold the same, and sum up with them (hybrid
    sharding: inside a node, say). 0: all."""
    tensor_degrees: tuple[int, ...] = ()
    """Of every layer, its own tensor-parallel degree, which divides ``tp``: a layer of degree t is cut over t
    neighbouring ranks, and as many such groups as there are have some samples of a micro-batch each. Empty:
    all have ``tp``."""

    def __post_init__(self) -> None:
        require_at_least_one("parallel", self, ("dp", "tp", "pp", "cp", "ep"))
        if self.zero not in ZERO_STAGES:
            raise ValueError(f"parallel.zero={self.zero} must be one of {', '.join(map(str, ZERO_STAGES))}")
        if self.shards and (self.shards < 2 or self.dp % self.shards or not self.zero):
            known = ", ".join(str(n) for n in range(2, self.dp + 1) if self.dp % n == 0) or "0"
            raise ValueError(
                f"parallel.shards={self.shards} needs parallel.zero of 1 or more and must divide "
                f"parallel.dp={self.dp}; set it to one of {known}, or to 0 for all"
            )
        if self.data_ranks == 1:
            object.__setattr__(self, "zero", 0)
        if {*self.tensor_degrees} == {self.tp}:
            object.__setattr__(self, "tensor_degrees", ())
        for degree, more in pairwise((*self.own_degrees, self.tp)):
            if degree < 1 or more % degree:
                raise ValueError(
                    f"parallel.tensor_degrees: {degree} does not divide {more} (parallel.tp={self.tp}); use "
                    f"degrees each of which divides the next larger one, and parallel.tp"
                )

    @property
    def own_degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees below ``tp`` that some layers have, ascending."""
        return tuple(sorted({*self.tensor_degrees} - {self.tp}))

    @cached_property
    def _kinds(self) -> dict[tuple[str, ...], tuple[str, ...]]:
        return {}

    def kinds(self, kinds: tuple[str, ...]) -> tuple[str, ...]:
        """The kind of every layer of a model: a variant where it has a degree of its own."""
        if not self.tensor_degrees:
            return kinds
        if kinds not in self._kinds:
            degrees = zip(kinds, self.tensor_degrees, strict=True)
            self._kinds[kinds] = tuple(
                kind if degree == self.tp else variant(kind, degree) for kind, degree in degrees
            )
        return self._kinds[kinds]

    @property
    def sample_ranks(self) -> int:
        """Ranks that see different samples."""
        return self.dp

    @property
    def data_ranks(self) -> int:
        """Ranks that hold the same parameters, experts apart, and see different tokens: of dp and cp."""
        return self.sample_ranks * self.cp

    @cached_property
    def replicas(self) -> int:
        """Groups of ranks of ``dp`` each of which has all states, cut over its ranks; 1: all together."""
        return self.dp // self.shards if self.shards else 1

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same experts."""
        return self.data_ranks // self.ep

    @property
    def share_ranks(self) -> int:
        """Ranks over which states are cut (ZeRO)."""
        return self.data_ranks // self.replicas if self.zero else 1

    @property
    def ranks(self) -> int:
        """Number of ranks the layout needs."""
        return self.data_ranks * self.tp * self.pp

    @property
    def folded(self) -> bool:
        """Whether a micro-batch visits every stage on its way down and again on its way back up."""
        return self.placement is Placement.FOLDED

    @cached_property
    def chunks(self) -> int:
        """Number of chunks the layers are cut into, on all stages together."""
        return self.pp if self.placement is Placement.LINEAR else 2 * self.pp

    @property
    def ends_apart(self) -> bool:
        """Whether the first and the last chunk of the model are on different stages."""
        return self.stage_of(0) != self.stage_of(self.chunks - 1)

    def degree(self, axis: str) -> int:
        """Number of ranks along a mesh axis."""
        return int(getattr(self, axis))

    def stage_of(self, chunk: int) -> int:
        """The pipeline stage that holds a chunk."""
        if chunk < self.pp:
            return chunk
        return chunk - self.pp if self.placement is Placement.INTERLEAVED else 2 * self.pp - 1 - chunk

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """The chunks that a pipeline stage holds, in the order of the model."""
        return self._chunks_by_stage[stage]

    @cached_property
    def _chunks_by_stage(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(chunk for chunk in range(self.chunks) if self.stage_of(chunk) == stage)
            for stage in range(self.pp)
        )

    def neighbour(self, chunk: int, distance: int) -> int | None:
        """The chunk that far along the model; None beyond its ends."""
        other = chunk + distance
        return other if 0 <= other < self.chunks else None

    def layers_of(self, chunk: int, layers: int) -> range:
        """The layers of a model of ``layers`` layers that a chunk holds.

        The head counts as ``head_layers`` of them, in the last chunk. Where they do not divide evenly, the
        chunks in the middle hold one more: the ends of the model hold the embedding and the head. Of the two
        chunks of a stage of the folded model it is the later one, whose activations wait less. `ValueError`
        where the last chunk keeps no layer.
        """
        counts = layer_counts(self, layers)
        return range(sum(counts[:chunk]), sum(counts[: chunk + 1]))

    def is_first(self, chunk: int) -> bool:
        """Whether a chunk begins the model (and holds the embedding)."""
        return self.neighbour(chunk, -1) is None

    def is_last(self, chunk: int) -> bool:
        """Whether a chunk ends the model (and holds the head)."""
        return self.neighbour(chunk, 1) is None

    @cached_property
    def mesh(self) -> MeshShape:
        """The mesh of its ranks."""
        return training_mesh(
            pp=self.pp,
            replicas=self.replicas,
            dp=self.dp // self.replicas,
            cp=self.cp,
            ep=self.ep,
            tp=self.tp,
            degrees=self.own_degrees,
            sharded=self.zero > 0,
        )

    @cached_property
    def sample_factors(self) -> tuple[str, ...]:
        """Factors along which ranks see other samples: those of ``dp`` alone."""
        joined = dict(self.mesh.joined)
        return ("replica", *(name for name in joined["dp"] if name not in joined["cp"]))

    def coordinate(self, rank: int) -> dict[str, int]:
        """Position of a rank along every mesh axis."""
        return self.mesh.position(rank)

    def rank_at(self, position: Position) -> int:
        """The rank at a position; inverse of `coordinate`."""
        return self.mesh.rank_at(position)

    def describe(self) -> str:
        """The layout in one line, such as ``dp 2 x tp 2 (folded), ZeRO 1``."""
        axes = [
            f"{f.name} {getattr(self, f.name)}"
            for f in fields(self)
            if f.name in ("dp", "tp", "pp", "cp", "ep")
        ]
        busy = [text for text in axes if not text.endswith(" 1")] or ["1 rank"]
        placed = "" if self.placement is Placement.LINEAR else f" ({self.placement})"
        over = f" over {self.shards}" if self.replicas > 1 else ""
        own = f" ({' '.join(counted([*map(str, self.tensor_degrees)]))})" if self.tensor_degrees else ""
        return " x ".join(busy) + own + placed + (f", ZeRO {self.zero}{over}" if self.zero else "")


@cache
def layer_counts(layout: ParallelLayout, layers: int) -> tuple[int, ...]:
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
