"""What a planner is given: the model's shape, the layout of ranks, the size of a step.

All checks raise `ValueError` with the configuration keys, their values and what would be right.
"""

from dataclasses import dataclass, fields
from typing import Final

FAMILIES: Final = ("llama", "gpt")

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

    def __post_init__(self) -> None:
        names = ("hidden", "ffn", "layers", "heads", "kv_heads", "head_dim", "vocabulary", "sequence")
        _require_positive("model", self, names)
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.heads={self.heads} is not a multiple of model.kv_heads={self.kv_heads}; "
                f"each key-value head must serve the same number of query heads"
            )
        if self.family == "llama" and self.head_dim % 2:
            raise ValueError(f"model.head_dim={self.head_dim} must be even for rotary embedding")

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate beside its up projection (SwiGLU)."""
        return self.family != "gpt"

    @property
    def biases(self) -> bool:
        """Whether linear layers have biases."""
        return self.family == "gpt"

    @property
    def query_width(self) -> int:
        """Elements of all query heads of one token."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of all key (or value) heads of one token."""
        return self.kv_heads * self.head_dim

    def parameters(self) -> int:
        """Number of parameters of the whole model."""
        norm = self.hidden * (2 if self.biases else 1)
        qkv = self.query_width + 2 * self.kv_width
        mlp_in = self.ffn * (2 if self.gated else 1)
        layer = 2 * norm + self.hidden * (qkv + self.query_width + mlp_in + self.ffn)
        if self.biases:
            layer += qkv + self.hidden + mlp_in + self.hidden
        tables = self.vocabulary * self.hidden * (1 if self.tied_head else 2)
        positions = self.sequence * self.hidden if self.family == "gpt" else 0
        return self.layers * layer + norm + tables + positions


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Degrees of the mesh axes, and whether the pipeline is folded.

    Unfolded, stage i holds chunk i of ``pp`` chunks. Folded (DHelix section 4.1), stage i holds the chunks
    i and 2p-1-i of 2p, so that a micro-batch travels down the stages and back up.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    folded: bool = False

    def __post_init__(self) -> None:
        _require_positive("parallel", self, ("dp", "tp", "pp", "cp", "ep"))

    @property
    def ranks(self) -> int:
        """Number of ranks the layout needs."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def chunks(self) -> int:
        """Number of chunks the layers are cut into."""
        return 2 * self.pp if self.folded else self.pp

    def degree(self, axis: str) -> int:
        """Number of ranks along a mesh axis."""
        return int(getattr(self, axis))

    def stage_of(self, chunk: int) -> int:
        """The pipeline stage that holds a chunk."""
        return chunk if chunk < self.pp else 2 * self.pp - 1 - chunk

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """The chunks that a pipeline stage holds, in the order of the model."""
        return tuple(c for c in range(self.chunks) if self.stage_of(c) == stage)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Position of a rank along every mesh axis."""
        position = {}
        for axis in reversed(AXES):
            rank, position[axis] = divmod(rank, self.degree(axis))
        return position

    def rank_at(self, position: dict[str, int]) -> int:
        """The rank at a position; inverse of `coordinate`."""
        rank = 0
        for axis in AXES:
            rank = rank * self.degree(axis) + position[axis]
        return rank

    def describe(self) -> str:
        """The layout in one line, such as ``dp 2 x tp 2 (folded)``."""
        axes = [f"{f.name} {getattr(self, f.name)}" for f in fields(self) if f.name != "folded"]
        busy = [text for text in axes if not text.endswith(" 1")] or ["1 rank"]
        return " x ".join(busy) + (" (folded)" if self.folded else "")


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


def check_fit(shape: ModelShape, layout: ParallelLayout, workload: Workload) -> None:
    """Raise `ValueError` where model, layout and batch cannot be cut into equal parts."""
    for axis in ("cp", "ep"):
        if layout.degree(axis) > 1:
            raise ValueError(
                f"parallel.{axis}={layout.degree(axis)} is not available in this version; "
                f"set parallel.{axis} to 1"
            )
    for key, value in (("heads", shape.heads), ("kv_heads", shape.kv_heads), ("ffn", shape.ffn)):
        if value % layout.tp:
            raise ValueError(
                f"model.{key}={value} is not divisible by parallel.tp={layout.tp}; "
                f"set parallel.tp to one of {_divisors(value)}"
            )
    rows = -(-shape.vocabulary // layout.tp)
    if (layout.tp - 1) * rows >= shape.vocabulary:
        raise ValueError(
            f"model.vocabulary={shape.vocabulary} leaves a rank of parallel.tp={layout.tp} without rows; "
            f"set model.vocabulary to {rows * layout.tp}"
        )
    if shape.layers % layout.chunks:
        chunks = f"2 x parallel.pp={2 * layout.pp}" if layout.folded else f"parallel.pp={layout.pp}"
        raise ValueError(
            f"model.layers={shape.layers} is not divisible by {chunks} chunks"
            f"{' of the folded pipeline' if layout.folded else ''}; "
            f"use a multiple of {layout.chunks} layers, or another parallel.pp"
        )
    tokens = workload.micro_batch * shape.sequence
    if tokens % layout.tp:
        raise ValueError(
            f"train.micro_batch={workload.micro_batch} x model.sequence={shape.sequence} tokens are not "
            f"divisible by parallel.tp={layout.tp}, as sequence parallelism needs"
        )
    samples = workload.micro_batch * layout.dp
    if workload.global_batch % samples:
        below = workload.global_batch // samples * samples
        near = " or ".join(str(n) for n in (below, below + samples) if n)
        raise ValueError(
            f"train.global_batch={workload.global_batch} is not divisible by train.micro_batch="
            f"{workload.micro_batch} x parallel.dp={layout.dp}; use {near}"
        )


def _divisors(value: int) -> str:
    return ", ".join(str(n) for n in range(1, value + 1) if value % n == 0)
