"""The operator graphs of the built-in model parts: embedding, Llama and GPT layers, head.

With tensor and sequence parallelism a layer has 14 forward and 18 backward operators (DHelix section 4.2).
Between collectives that gather and scatter tokens, a rank holds all T tokens of its part of the sequence and
its part of the width; outside it holds t = T/tp tokens of full width (sequence parallelism). Context
parallelism cuts the sequence once more: T counts the tokens of one of its ranks; keys and values are gathered
(``all_gather``) or passed around while attending (``ring``). Expert parallelism sends every token to the
ranks that hold its experts and back.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from braid.scheduling.graph_builder import AxisPlacement, GraphBuilder
from braid.scheduling.lowering.recompute import with_recompute
from braid.scheduling.operators import Kind, Part, Precision, Stream
from braid.scheduling.spec import ModelShape, ParallelLayout


@dataclass(frozen=True, kw_only=True)
class PartSizes:
    """Sizes on one rank that a layer's graph is written with."""

    shape: ModelShape
    tp: int
    micro_batch: int
    cp: int = 1
    ep: int = 1
    context: str = "all_gather"
    """How context parallelism exchanges keys and values: ``all_gather`` or ``ring``."""
    axes: Mapping[str, AxisPlacement] = field(default_factory=dict)

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
    context: str = "all_gather",
) -> PartSizes:
    """Sizes for a layout; ``axes`` places mesh axes on streams (by default all inside the node)."""
    placed = axes or axes_on(layout, {})
    return PartSizes(
        shape=shape,
        tp=layout.tp,
        micro_batch=micro_batch,
        cp=layout.cp,
        ep=layout.ep,
        context=context,
        axes=placed,
    )


def axes_on(layout: ParallelLayout, streams: Mapping[str, Stream]) -> dict[str, AxisPlacement]:
    """The axes that layers communicate over, on streams; inside the node where nothing else is said."""
    return {
        axis: AxisPlacement(degree=layout.degree(axis), stream=streams.get(axis, Stream.INTRA))
        for axis in ("tp", "cp", "ep")
    }


def transformer_layer(sizes: PartSizes) -> Part:
    """One pre-norm transformer layer: Llama and GPT differ in modules, not in structure; MoE in its MLP."""
    shape = sizes.shape
    g = GraphBuilder("layer", sizes.axes)
    x = g.input("x", sizes.local_tokens * shape.hidden)
    a = g.norm("attention_norm", x, sizes.local_tokens, statistics_each=sizes.norm_statistics)
    a = g.gather("attention_gather", a, "tp")
    qkv_width = shape.query_width + 2 * shape.kv_width
    a = g.gemm("qkv", a, sizes.tokens * qkv_width // sizes.tp, sizes.gemm_flops(shape.hidden, qkv_width))
    a = _attention(g, a, sizes)
    flops = sizes.gemm_flops(shape.query_width, shape.hidden)
    a = g.gemm("projection", a, sizes.tokens * shape.hidden, flops)
    a = g.scatter("attention_scatter", a, "tp")
    x = g.residual("attention_residual", a, x)
    m = g.norm("mlp_norm", x, sizes.local_tokens, statistics_each=sizes.norm_statistics)
    m = _experts(g, m, sizes) if shape.experts else _mlp(g, m, sizes)
    return g.build(g.residual("mlp_residual", m, x))


def _attention(g: GraphBuilder, qkv: str, sizes: PartSizes) -> str:
    """Causal attention over the whole sequence, of which a rank holds 1/cp.

    The sequence is cut so that every rank (and every step of the ring) has equal work.
    """
    shape, tp, cp = sizes.shape, sizes.tp, sizes.cp
    flops = 2 * sizes.tokens * shape.sequence * shape.query_width // tp
    """Scores and values, 2 x 2 x T x s x Q, halved because attention is causal."""
    outputs = sizes.tokens * shape.query_width // tp
    kv_elements = 2 * sizes.tokens * shape.kv_width // tp
    statistics = sizes.tokens * shape.heads // tp
    # Attention saves its turned q, k, v, and the log-sum-exp of every query head's scores.
    if cp == 1:
        return g.attention(
            "attention", qkv, outputs, flops, outputs + kv_elements, saved_statistics=statistics
        )
    if sizes.context == "all_gather":
        kv = g.gather("kv_gather", qkv, "cp", kv_elements)
        saved = outputs + cp * kv_elements
        return g.attention("attention", qkv, outputs, flops, saved, saved_statistics=statistics, more=(kv,))
    kv = g.shift("kv_shift_1", qkv, "cp", kv_elements)
    a = g.attention("attention_0", qkv, outputs, flops // cp, outputs + kv_elements, statistics)
    for step in range(1, cp):
        here = kv
        if step < cp - 1:
            kv = g.shift(f"kv_shift_{step + 1}", here, "cp", kv_elements)
        name = "attention" if step == cp - 1 else f"attention_{step}"
        a = g.attention(name, qkv, outputs, flops // cp, kv_elements, statistics, more=(here, a))
    return a


def _mlp(g: GraphBuilder, m: str, sizes: PartSizes) -> str:
    shape, tokens, tp = sizes.shape, sizes.tokens, sizes.tp
    width = shape.ffn * (2 if shape.gated else 1)
    m = g.gather("mlp_gather", m, "tp")
    m = g.gemm("mlp_in", m, tokens * width // tp, sizes.gemm_flops(shape.hidden, width))
    m = g.activation("activation", m, tokens * shape.ffn // tp)
    m = g.gemm("mlp_out", m, tokens * shape.hidden, sizes.gemm_flops(shape.ffn, shape.hidden))
    return g.scatter("mlp_scatter", m, "tp")


def _experts(g: GraphBuilder, m: str, sizes: PartSizes) -> str:
    """Route, dispatch, two grouped GEMMs, combine; experts are cut over ``ep`` and their width over ``tp``.

    With balanced routing every rank works on as many tokens as it sends, ``top_k`` times its own; a capacity
    factor below 1 drops tokens, one above 1 bounds how far a rank may be over the average.
    """
    shape, tp = sizes.shape, sizes.tp
    visits = round(sizes.local_tokens * shape.top_k * min(1.0, shape.capacity_factor))
    gates, choice = g.router("router", m, sizes.local_tokens, shape.experts, shape.top_k)
    m = g.permute("permute", m, choice, visits * shape.hidden)
    m = g.all_to_all("dispatch", m, "ep")
    m = g.gather("expert_gather", m, "tp")
    tokens = visits * tp
    flops = 2 * tokens * shape.hidden * shape.ffn // tp
    m = g.gemm("expert_in", m, tokens * 2 * shape.ffn // tp, 2 * flops, Kind.GROUPED_GEMM)
    m = g.activation("activation", m, tokens * shape.ffn // tp)
    m = g.gemm("expert_out", m, tokens * shape.hidden, flops, Kind.GROUPED_GEMM)
    m = g.scatter("expert_scatter", m, "tp")
    m = g.all_to_all("combine", m, "ep")
    return g.unpermute("unpermute", m, gates, choice, sizes.local_tokens * shape.hidden)


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
    """Final norm, vocabulary-parallel logits and cross-entropy; its output is the sum of token losses.

    Its backward pass needs nothing from elsewhere and runs at once, so that the logits, the largest value of
    all, are never kept between two blocks.
    """
    g = GraphBuilder("head", sizes.axes)
    x = g.input("x", sizes.local_tokens * sizes.shape.hidden)
    targets = g.constant("targets", sizes.tokens)
    scale = g.constant("loss_scale", 1, Precision.STATISTIC)
    h = g.norm("final_norm", x, sizes.local_tokens, statistics_each=sizes.norm_statistics)
    h = g.gather("head_gather", h, "tp")
    rows = sizes.vocabulary_rows
    logits = g.gemm("head", h, sizes.tokens * rows, sizes.gemm_flops(sizes.shape.hidden, rows * sizes.tp))
    return g.build(g.cross_entropy("loss", logits, targets, scale, sizes.tokens)).at_once()


def built_in_parts(sizes: PartSizes, recompute: str = "none") -> dict[str, Part]:
    """The parts of a built-in model by name, under a recompute policy."""
    parts = (embedding(sizes), transformer_layer(sizes), head(sizes))
    return {part.name: with_recompute(part, recompute) for part in parts}
