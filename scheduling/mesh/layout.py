"""Defines which ranks hold what: degrees of the mesh axes, and the stage of each chunk of the model.

All checks raise `ValueError` with the configuration keys, their values and a remedy.
"""

from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache, cached_property
from itertools import pairwise
from typing import Final

from braid.scheduling.mesh.mesh import MeshShape, Position, training_mesh
from braid.scheduling.text.pattern import Variant, counted

ZERO_STAGES: Final = (0, 1, 2, 3)

AXES: Final = ("pp", "dp", "cp", "tp")
"""Mesh axes, outermost first; the index along the last one changes fastest with the rank."""


def require_at_least_one(section: str, record: object, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(record, name)
        if value < 1:
            raise ValueError(f"{section}.{name}={value} must be at least 1")


class Placement(StrEnum):
    """Rule by which chunks of the model are assigned to pipeline stages."""

    LINEAR = "linear"
    """Stage i of p holds chunk i of p."""
    FOLDED = "folded"
    """Stage i of p holds chunks i and 2p-1-i of 2p: down the stages and back up (DHelix section 4.1)."""
    INTERLEAVED = "interleaved"
    """Stage i of p holds chunks i and p+i of 2p: down the stages twice (Narayanan et al. 2021)."""


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Degrees of the mesh axes, and the placement of the model's chunks on pipeline stages.

    ``ep`` ranks of the data-parallel axis divide the experts of a mixture of experts among themselves.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    placement: Placement = Placement.LINEAR
    head_layers: int = 0
    """Number of layers as which the head counts when layers are divided evenly among chunks."""
    zero: int = 0
    """ZeRO stage, which says what data-parallel ranks shard. 1: optimizer states; 2: gradients too; 3:
    parameters too. Parameters are gathered once a step, at stage 3 before each use. It is 0 if dp x cp is
    1."""
    shards: int = 0
    """Number of ranks of ``dp`` over which ZeRO shards states. If it is less than ``dp``, several groups of
    so many ranks hold the same states and sum gradients among themselves (hybrid sharding). 0: all ranks of
    ``dp``."""
    tensor_degrees: tuple[int, ...] = ()
    """Tensor-parallel degree of every layer, each a divisor of ``tp``. A layer of degree t is cut over t
    neighbouring ranks, and each group of t ranks processes some samples of a micro-batch. Empty: every layer
    has the degree ``tp``."""

    def __post_init__(self) -> None:
        require_at_least_one("parallel", self, ("dp", "tp", "pp", "cp", "ep"))
        if self.zero not in ZERO_STAGES:
            raise ValueError(f"parallel.zero={self.zero} must be one of {', '.join(map(str, ZERO_STAGES))}")
        if self.shards and (self.shards < 2 or self.dp % self.shards or not self.zero):
            divisors = ", ".join(str(n) for n in range(2, self.dp + 1) if self.dp % n == 0) or "0"
            raise ValueError(
                f"parallel.shards={self.shards} needs parallel.zero of 1 or more and must divide "
                f"parallel.dp={self.dp}; set it to one of {divisors}, or to 0 for all"
            )
        if self.data_ranks == 1:
            object.__setattr__(self, "zero", 0)
        if {*self.tensor_degrees} == {self.tp}:
            object.__setattr__(self, "tensor_degrees", ())
        for degree, larger in pairwise((*self.own_degrees, self.tp)):
            if degree < 1 or larger % degree:
                raise ValueError(
                    f"parallel.tensor_degrees: {degree} does not divide {larger} (parallel.tp={self.tp}); "
                    f"use degrees each of which divides the next larger one, and parallel.tp"
                )

    @property
    def own_degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees below ``tp`` that some layers have, ascending."""
        return tuple(sorted({*self.tensor_degrees} - {self.tp}))

    def kinds(self, kinds: tuple[str, ...]) -> tuple[str, ...]:
        """Return the kind of every layer, given the kinds in the model's pattern.

        Layers with a tensor-parallel degree below ``tp`` get a `Variant` of their kind.
        """
        if not self.tensor_degrees:
            return kinds
        degrees = zip(kinds, self.tensor_degrees, strict=True)
        return tuple(kind if degree == self.tp else Variant(kind, degree) for kind, degree in degrees)

    @property
    def sample_ranks(self) -> int:
        """Number of ranks that process different samples."""
        return self.dp

    @property
    def data_ranks(self) -> int:
        """Number of ranks (dp x cp) that have the same non-expert parameters and process different tokens."""
        return self.sample_ranks * self.cp

    @cached_property
    def replicas(self) -> int:
        """Number of groups of ``dp`` ranks that each hold all states, sharded inside the group; above 1 only
        with hybrid sharding."""
        return self.dp // self.shards if self.shards else 1

    @property
    def expert_replicas(self) -> int:
        """Number of ranks that hold the same experts."""
        return self.data_ranks // self.ep

    @property
    def share_ranks(self) -> int:
        """Number of ranks over which ZeRO shards states; 1 without ZeRO."""
        return self.data_ranks // self.replicas if self.zero else 1

    @property
    def ranks(self) -> int:
        return self.data_ranks * self.tp * self.pp

    @property
    def folded(self) -> bool:
        """Whether a micro-batch visits every stage on its way down and again on its way back up."""
        return self.placement is Placement.FOLDED

    @cached_property
    def chunks(self) -> int:
        """Number of chunks into which the model is cut, over all stages."""
        return self.pp if self.placement is Placement.LINEAR else 2 * self.pp

    @property
    def ends_apart(self) -> bool:
        """Whether the first and the last chunk of the model are on different stages."""
        return self.stage_of(0) != self.stage_of(self.chunks - 1)

    def degree(self, axis: str) -> int:
        return int(getattr(self, axis))

    def stage_of(self, chunk: int) -> int:
        """Return the pipeline stage that holds a chunk."""
        if chunk < self.pp:
            return chunk
        return chunk - self.pp if self.placement is Placement.INTERLEAVED else 2 * self.pp - 1 - chunk

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """Return the chunks that a pipeline stage holds, in the order of the model."""
        return self._chunks_by_stage[stage]

    @cached_property
    def _chunks_by_stage(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(chunk for chunk in range(self.chunks) if self.stage_of(chunk) == stage)
            for stage in range(self.pp)
        )

    def neighbour(self, chunk: int, distance: int) -> int | None:
        """Return the chunk that is ``distance`` chunks further along the model; None beyond its ends."""
        target = chunk + distance
        return target if 0 <= target < self.chunks else None

    def layers_of(self, chunk: int, layers: int) -> range:
        """Return the indices of the layers that a chunk holds, in a model of ``layers`` layers.

        The head counts as ``head_layers`` layers of the last chunk. If layers do not divide evenly, chunks in
        the middle of the model hold one more, since the first and the last chunk also hold embedding and
        head. In the folded model the later of a stage's two chunks holds it, since its activations wait less.
        Raises `ValueError` if the first or last chunk would hold no layer.
        """
        counts = layer_counts(self, layers)
        return range(sum(counts[:chunk]), sum(counts[: chunk + 1]))

    def is_first(self, chunk: int) -> bool:
        """Return whether a chunk is the model's first, which holds the embedding."""
        return self.neighbour(chunk, -1) is None

    def is_last(self, chunk: int) -> bool:
        """Return whether a chunk is the model's last, which holds the head."""
        return self.neighbour(chunk, 1) is None

    @cached_property
    def mesh(self) -> MeshShape:
        """Mesh in which each rank of the layout has a coordinate along every axis."""
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
        """Factors of the mesh along which ranks process different samples: ``replica``, and ``dp`` without
        ``cp``."""
        joined = dict(self.mesh.joined)
        return ("replica", *(name for name in joined["dp"] if name not in joined["cp"]))

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinate along every factor of the mesh, by factor."""
        return self.mesh.position(rank)

    def rank_at(self, position: Position) -> int:
        """Return the rank with the given coordinates; this inverts `coordinate`."""
        return self.mesh.rank_at(position)

    def describe(self) -> str:
        """Return the layout in one line, such as ``dp 2 x tp 2 (folded), ZeRO 1``."""
        axes = [f.name for f in fields(self) if f.name in ("dp", "tp", "pp", "cp", "ep")]
        busy = [f"{axis} {degree}" for axis in axes if (degree := getattr(self, axis)) > 1] or ["1 rank"]
        placed = "" if self.placement is Placement.LINEAR else f" ({self.placement})"
        over = f" over {self.shards}" if self.replicas > 1 else ""
        degrees = f" ({' '.join(counted([*map(str, self.tensor_degrees)]))})" if self.tensor_degrees else ""
        return " x ".join(busy) + degrees + placed + (f", ZeRO {self.zero}{over}" if self.zero else "")


@cache
def layer_counts(layout: ParallelLayout, layers: int) -> tuple[int, ...]:
    """Return how many of the model's ``layers`` each chunk holds, by the rule in
    `ParallelLayout.layers_of`."""
    size, head = layout.chunks, layout.head_layers
    each, remainder = divmod(layers + head, size)
    inner = sorted(range(size), key=lambda c: (-min(c, size - 1 - c), -c if layout.folded else c))[:remainder]
    counts = [each + (c in inner) for c in range(size)]
    counts[-1] -= head
    if min(counts[0], counts[-1]) < 1:
        raise ValueError(
            f"model.layers={layers} leaves the first or the last of {size} chunks without a layer; lower "
            f"parallel.pp"
        )
    return tuple(counts)
