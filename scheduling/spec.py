"""What a planner is given: the model's shape, the layout of ranks, the size of a step.

All checks raise `ValueError` with the configuration keys, their values and what would be right.
"""

from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property
from math import ceil
from typing import Final

from braid.scheduling.layer_counts import layer_counts
from braid.scheduling.mesh import MeshShape, Position, training_mesh
from braid.scheduling.pattern import DENSE, UNIFORM, kinds_of, pattern_of
from braid.scheduling.rotary import RotaryScaling

FAMILIES: Final = ("llama", "gpt", "moe")

CONTEXT_MODES: Final = ("all_gather", "ring")

ZERO_STAGES: Final = (0, 1, 2, 3)

AXES: Final = ("pp", "dp", "cp", "tp")
"""Mesh axes, outermost first; the last one varies fastest with the rank."""


def _require_positive(section: str, record: object, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(record, name)
        if value < 1:
            raise ValueError(f"{section}.{name}={value} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder-only transformer.

    ``llama``: RMSNorm, rotary embedding, grouped-query attention, SwiGLU, no biases.
    ``gpt``: LayerNorm, learned positions, GELU, biases.
    ``moe``: Llama with ``experts`` SwiGLU experts of width ``ffn``, of which every token visits ``top_k``.
    """

    family: str
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    sequence: int
    tied_head: bool = False
    norm_eps: float = 1e-5
    rotary_base: float = 10000.0
    rotary_scaling: RotaryScaling | None = None
    qkv_bias: bool = False
    """Biases on queries, keys and values, in a family that has no others."""
    head_norm: bool = False
    """RMSNorm over every head of queries and keys, before they are turned by their positions."""
    experts: int = 0
    top_k: int = 0
    capacity_factor: float = 0.0
    """Tokens that an expert takes of each rank, over the average number: what is beyond is dropped, what is
    missing is padded. 0: each takes what comes."""
    expert_ffn: int = 0
    """Width of an expert; 0: ``ffn``, which layers without experts have."""
    shared_experts: int = 0
    """Experts that every token visits beside those that it chooses, as one MLP."""
    softmax_after: bool = False
    """Gates are a softmax over the chosen experts' scores, not some of one over all experts'."""
    normalised: bool = True
    """Gates of a token are divided by their sum."""
    balance_loss: float = 0.0
    """Factor of the loss that balances experts (Fedus et al. 2021)."""
    balance_rate: float = 0.0
    """Step of the bias on every expert's score that balances experts without a loss (Wang et al. 2024)."""
    z_loss: float = 0.0
    """Factor of the loss that keeps the router's logits small (Zoph et al. 2022)."""
    documents: bool = False
    """Whether tokens attend to those of their own document only."""
    pattern: str = UNIFORM
    """Kinds of layers, repeated until there are ``layers``: ``2*layer wide``; kept as short as it can be."""

    def __post_init__(self) -> None:
        sizes = ("hidden", "ffn", "layers", "heads", "kv_heads", "head_dim", "vocabulary", "sequence")
        _require_positive("model", self, sizes)
        object.__setattr__(self, "pattern", pattern_of(self.kinds))
        if self.family not in FAMILIES:
            raise ValueError(f"model.family={self.family!r} must be one of {', '.join(FAMILIES)}")
        self._check_experts()
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.heads={self.heads} is not a multiple of model.kv_heads={self.kv_heads}; "
                f"each key-value head must serve the same number of query heads"
            )
        if self.family != "gpt" and self.head_dim % 2:
            raise ValueError(f"model.head_dim={self.head_dim} must be even for rotary embedding")
        if self.family == "gpt":
            for key in ("rotary_scaling", "qkv_bias", "head_norm"):
                if value := getattr(self, key):
                    raise ValueError(
                        f"model.{key}={value} does not go with model.family gpt, which has learned "
                        f"positions, biases on all matrices and no norms of heads; leave it out"
                    )

    def _check_experts(self) -> None:
        if self.family != "moe":
            if self.experts or self.top_k:
                raise ValueError(
                    f"model.experts={self.experts} and model.top_k={self.top_k} need model.family moe"
                )
            return
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(
                f"model.top_k={self.top_k} must be between 1 and model.experts={self.experts} "
                f"for model.family moe"
            )
        for name in (
            "capacity_factor",
            "balance_loss",
            "balance_rate",
            "z_loss",
            "expert_ffn",
            "shared_experts",
        ):
            if not getattr(self, name) >= 0:
                raise ValueError(f"model.{name}={getattr(self, name)} must be at least 0")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of every layer: the name of its part."""
        return kinds_of(self.pattern, self.layers)

    @property
    def expert_layers(self) -> int:
        """How many layers have experts."""
        return self.layers - self.kinds.count(DENSE) if self.experts else 0

    @property
    def expert_width(self) -> int:
        """Elements of an expert's activation for one token."""
        return self.expert_ffn or self.ffn

    def capacity(self, tokens: int) -> int:
        """Rows that every expert takes of a rank with so many tokens, where it has a capacity."""
        return max(1, ceil(tokens * self.top_k * self.capacity_factor / self.experts))

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate beside its up projection (SwiGLU)."""
        return self.family != "gpt"

    @property
    def biases(self) -> bool:
        """Whether linear layers and norms have biases."""
        return self.family == "gpt"

    @property
    def biases_of_qkv(self) -> bool:
        """Whether queries, keys and values have biases."""
        return self.biases or self.qkv_bias

    @property
    def query_width(self) -> int:
        """Elements of all query heads of one token."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of all key (or value) heads of one token."""
        return self.kv_heads * self.head_dim

    def parameters(self) -> int:
        """Number of parameters of the whole model; a layer of the user's own counts as one of the family."""
        norm = self.hidden * (2 if self.biases else 1)
        qkv = self.query_width + 2 * self.kv_width
        mlp_in = self.ffn * (2 if self.gated else 1)
        mlp = self.hidden * (mlp_in + self.ffn)
        routed = 3 * self.hidden * self.expert_width * (self.experts + self.shared_experts)
        routed += (self.hidden + (self.balance_rate > 0)) * self.experts
        experts = self.expert_layers * (routed - mlp)
        layer = 2 * norm + self.hidden * (qkv + self.query_width) + mlp
        if self.biases:
            layer += self.hidden + mlp_in + self.hidden
        if self.biases_of_qkv:
            layer += qkv
        if self.head_norm:
            layer += 2 * self.head_dim
        tables = self.vocabulary * self.hidden * (1 if self.tied_head else 2)
        positions = self.sequence * self.hidden if self.family == "gpt" else 0
        return self.layers * layer + experts + norm + tables + positions


class Placement(StrEnum):
    """Which chunks of the model a pipeline stage holds."""

    LINEAR = "linear"
    """Stage i holds chunk i of p."""
    FOLDED = "folded"
    """Stage i holds the chunks i and 2p-1-i of 2p: down the stages and back up (DHelix section 4.1)."""
    INTERLEAVED = "interleaved"
    """Stage i holds the chunks i and p+i of 2p: down the stages twice (Narayanan et al. 2021)."""
    BIDIRECTIONAL = "bidirectional"
    """Two copies of the model, chunks 0 to p-1 down the stages, p to 2p-1 up (DHelix figure 6b)."""


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
    late_layers: int = 0
    """Layers that the first chunk of a folded pipeline leaves to the last one, which is on the same stage.

    Activations of the first chunk wait longest for their gradients, those of the last not at all: less memory
    on the stage that also holds both vocabulary tables, but chunks of different sizes pair worse.
    """

    def __post_init__(self) -> None:
        _require_positive("parallel", self, ("dp", "tp", "pp", "cp", "ep"))
        if self.zero not in ZERO_STAGES:
            raise ValueError(f"parallel.zero={self.zero} must be one of {', '.join(map(str, ZERO_STAGES))}")
        if self.shards and (self.shards < 2 or self.dp % self.shards or not self.zero):
            known = ", ".join(str(n) for n in range(2, self.dp + 1) if self.dp % n == 0) or "0"
            raise ValueError(
                f"parallel.shards={self.shards} needs parallel.zero of 1 or more and must divide "
                f"parallel.dp={self.dp}; set it to one of {known}, or to 0 for all"
            )
        if self.dp * self.cp * (2 if self.placement is Placement.BIDIRECTIONAL else 1) == 1:
            object.__setattr__(self, "zero", 0)
        if self.late_layers < 0:
            raise ValueError(f"parallel.late_layers={self.late_layers} must be 0 or more")
        if self.late_layers and not self.folded:
            raise ValueError(
                f"parallel.late_layers={self.late_layers} needs the first and the last chunk on one stage, "
                f"as schedules over the folded model have them (such as braid); set it to 0 for "
                f"a {self.placement} pipeline"
            )

    @cached_property
    def replicas(self) -> int:
        """Groups of ranks of ``dp`` each of which has all states, cut over its ranks; 1: all together."""
        return self.dp // self.shards if self.shards else 1

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same experts."""
        return self.dp * self.cp // self.ep

    @property
    def share_ranks(self) -> int:
        """Ranks over which states are cut (ZeRO)."""
        return self.dp // self.replicas * self.cp if self.zero else 1

    @property
    def ranks(self) -> int:
        """Number of ranks the layout needs."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def folded(self) -> bool:
        """Whether a micro-batch visits every stage on its way down and again on its way back up."""
        return self.placement is Placement.FOLDED

    @cached_property
    def chunks(self) -> int:
        """Number of chunks on all stages together; of a bidirectional pipeline, those of both copies."""
        return self.pp if self.placement is Placement.LINEAR else 2 * self.pp

    @cached_property
    def copies(self) -> int:
        """Copies of the model in one pipeline."""
        return 2 if self.placement is Placement.BIDIRECTIONAL else 1

    @cached_property
    def chunks_per_copy(self) -> int:
        """Number of chunks the layers are cut into."""
        return self.chunks // self.copies

    @property
    def ends_apart(self) -> bool:
        """Whether the first and the last chunk of the model are on different stages."""
        return self.stage_of(0) != self.stage_of(self.chunks_per_copy - 1)

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
        chunks = sorted(range(self.chunks), key=lambda chunk: chunk % self.chunks_per_copy)
        return tuple(tuple(c for c in chunks if self.stage_of(c) == stage) for stage in range(self.pp))

    def neighbour(self, chunk: int, distance: int) -> int | None:
        """The chunk that far along the model, of the same copy; None beyond its ends."""
        other = chunk + distance
        size = self.chunks_per_copy
        return other if 0 <= other < self.chunks and other // size == chunk // size else None

    def layers_of(self, chunk: int, layers: int) -> range:
        """The layers of a model of ``layers`` layers that a chunk holds.

        The head counts as ``head_layers`` of them, in the last chunk. Where they do not divide evenly, the
        chunks in the middle hold one more: the ends of the model hold the embedding and the head. Of the two
        chunks of a stage of the folded model it is the later one, whose activations wait less. The last chunk
        takes ``late_layers`` of the first one's. `ValueError` where one of the two keeps no layer.
        """
        counts = layer_counts(self, layers)
        place = chunk % self.chunks_per_copy
        return range(sum(counts[:place]), sum(counts[: place + 1]))

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
            if f.name not in ("placement", "head_layers", "zero", "shards", "late_layers")
        ]
        busy = [text for text in axes if not text.endswith(" 1")] or ["1 rank"]
        late = f", {self.late_layers} late" if self.late_layers else ""
        placed = "" if self.placement is Placement.LINEAR else f" ({self.placement}{late})"
        over = f" over {self.shards}" if self.replicas > 1 else ""
        return " x ".join(busy) + placed + (f", ZeRO {self.zero}{over}" if self.zero else "")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The batch of one optimizer step, in samples of ``ModelShape.sequence`` tokens."""

    global_batch: int
    micro_batch: int

    def __post_init__(self) -> None:
        _require_positive("train", self, ("global_batch", "micro_batch"))

    def micro_batches(self, layout: ParallelLayout) -> int:
        """Micro-batches that each data-parallel replica runs in one step."""
        return self.global_batch // (self.micro_batch * layout.dp)
