"""The operator graphs of the built-in model parts: embedding, Llama and GPT layers, head.

With tensor and sequence parallelism a layer has 14 forward and 18 backward operators (DHelix section 4.2).
Between collectives that gather and scatter tokens, a rank holds all T tokens of the micro-batch and its part
of the width; outside it holds t = T/tp tokens of full width (sequence parallelism).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from braid.scheduling.graph_builder import AxisPlacement, GraphBuilder
from braid.scheduling.lowering.recompute import with_recompute
from braid.scheduling.operators import Part, Precision
from braid.scheduling.spec import ModelShape, ParallelLayout


@dataclass(frozen=True, kw_only=True)
class PartSizes:
    """Sizes on one rank that a layer's graph is written with."""

    shape: ModelShape
    tp: int
    micro_batch: int
    axes: Mapping[str, AxisPlacement] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch, T."""
        return self.micro_batch * self.shape.sequence

    @property
    def local_tokens(self) -> int:
        """Tokens of a micro-batch outside the tensor-parallel region, t."""
        return self.tokens // self.tp

    @property
    def vocabulary_rows(self) -> int:
        """Rows of the vocabulary on the fullest rank."""
        return -(-self.shape.vocabulary // self.tp)

    @property
    def norm_statistics(self) -> int:
        """Numbers that a norm saves of each token: RMSNorm one, LayerNorm two."""
        return 2 if self.shape.biases else 1

    def gemm_flops(self, inputs: int, outputs: int) -> int:
        """FLOPs of all tokens through a weight of ``inputs`` x ``outputs``, this rank's share."""
        return 2 * self.tokens * inputs * outputs // self.tp


def part_sizes(
    shape: ModelShape,
    layout: ParallelLayout,
    micro_batch: int,
    axes: Mapping[str, AxisPlacement] | None = None,
) -> PartSizes:
    """Sizes for a layout; ``axes`` places mesh axes on streams (by default all inside the node)."""
    placed = axes or {"tp": AxisPlacement(degree=layout.tp)}
    return PartSizes(shape=shape, tp=layout.tp, micro_batch=micro_batch, axes=placed)


def transformer_layer(sizes: PartSizes) -> Part:
    """One pre-norm transformer layer, Llama or GPT: they differ in modules, not in structure."""
    shape, tp = sizes.shape, sizes.tp
    tokens, local = sizes.tokens, sizes.local_tokens
    qkv_width = shape.query_width + 2 * shape.kv_width
    mlp_in_width = shape.ffn * (2 if shape.gated else 1)
    attention_flops = 2 * tokens * shape.sequence * shape.query_width // tp
    """Scores and values, 2 x 2 x T x s x Q, halved because attention is causal."""

    g = GraphBuilder("layer", sizes.axes)
    x = g.input("x", local * shape.hidden)
    a = g.norm("attention_norm", x, local, statistics_each=sizes.norm_statistics)
    a = g.gather("attention_gather", a, "tp")
    a = g.gemm("qkv", a, tokens * qkv_width // tp, sizes.gemm_flops(shape.hidden, qkv_width))
    # Attention saves its turned q, k, v, and the log-sum-exp of every query head's scores.
    a = g.attention(
        "attention",
        a,
        tokens * shape.query_width // tp,
        attention_flops,
        saved_elements=tokens * qkv_width // tp,
        saved_statistics=tokens * shape.heads // tp,
    )
    a = g.gemm("projection", a, tokens * shape.hidden, sizes.gemm_flops(shape.query_width, shape.hidden))
    a = g.scatter("attention_scatter", a, "tp")
    x = g.residual("attention_residual", a, x)
    m = g.norm("mlp_norm", x, local, statistics_each=sizes.norm_statistics)
    m = g.gather("mlp_gather", m, "tp")
    m = g.gemm("mlp_in", m, tokens * mlp_in_width // tp, sizes.gemm_flops(shape.hidden, mlp_in_width))
    m = g.activation("activation", m, tokens * shape.ffn // tp)
    m = g.gemm("mlp_out", m, tokens * shape.hidden, sizes.gemm_flops(shape.ffn, shape.hidden))
    m = g.scatter("mlp_scatter", m, "tp")
    return g.build(g.residual("mlp_residual", m, x))


def embedding(sizes: PartSizes) -> Part:
    """Vocabulary-parallel embedding, and learned positions for GPT."""
    g = GraphBuilder("embedding", sizes.axes)
    tokens = g.constant("tokens", sizes.tokens)
    x = g.embedding("embedding", tokens, sizes.tokens * sizes.shape.hidden)
    x = g.scatter("embedding_scatter", x, "tp")
    if sizes.shape.family == "gpt":
        x = g.positions("positions", x)
    return g.build(x)


def head(sizes: PartSizes) -> Part:
    """Final norm, vocabulary-parallel logits and cross-entropy; its output is the sum of token losses."""
    g = GraphBuilder("head", sizes.axes)
    x = g.input("x", sizes.local_tokens * sizes.shape.hidden)
    targets = g.constant("targets", sizes.tokens)
    scale = g.constant("loss_scale", 1, Precision.STATISTIC)
    h = g.norm("final_norm", x, sizes.local_tokens, statistics_each=sizes.norm_statistics)
    h = g.gather("head_gather", h, "tp")
    rows = sizes.vocabulary_rows
    logits = g.gemm("head", h, sizes.tokens * rows, sizes.gemm_flops(sizes.shape.hidden, rows * sizes.tp))
    return g.build(g.cross_entropy("loss", logits, targets, scale, sizes.tokens))


def built_in_parts(sizes: PartSizes, recompute: str = "none") -> dict[str, Part]:
    """The parts of a built-in model by name, under a recompute policy."""
    parts = (embedding(sizes), transformer_layer(sizes), head(sizes))
    return {part.name: with_recompute(part, recompute) for part in parts}
