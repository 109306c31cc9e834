"""The operator graphs of the built-in model parts: embedding, Llama and GPT layers, head.

With tensor and sequence parallelism a layer has 14 forward and 18 backward operators (DHelix section 4.2).
Context parallelism cuts the sequence, expert parallelism sends every token to the ranks that hold its experts
and back.
"""

from braid.scheduling.layer_builder import LayerBuilder
from braid.scheduling.lowering.recompute import with_recompute
from braid.scheduling.operators import Kind, Part
from braid.scheduling.sizes import PartSizes


def transformer_layer(g: LayerBuilder) -> str:
    """One pre-norm transformer layer: Llama and GPT differ in modules, not in structure; MoE in its MLP."""
    shape = g.shape
    x = g.input()
    a = g.norm("attention_norm", x)
    a = g.gather("attention_gather", a)
    a = g.columns("qkv", a, shape.query_width + 2 * shape.kv_width)
    a = g.attention("attention", a)
    a = g.rows("projection", a, shape.hidden)
    a = g.scatter("attention_scatter", a)
    x = g.residual("attention_residual", a, x)
    m = g.norm("mlp_norm", x)
    m = _experts(g, m) if shape.experts else _mlp(g, m)
    return g.residual("mlp_residual", m, x)


def _mlp(g: LayerBuilder, m: str) -> str:
    m = g.gather("mlp_gather", m)
    m = g.columns("mlp_in", m, g.shape.ffn * (2 if g.shape.gated else 1))
    m = g.activation("activation", m)
    m = g.rows("mlp_out", m, g.shape.hidden)
    return g.scatter("mlp_scatter", m)


def _experts(g: LayerBuilder, m: str) -> str:
    """Route, dispatch, two grouped GEMMs, combine; experts are cut over ``ep``, their width over ``tp``."""
    gates, choice = g.router("router", m)
    m = g.permute("permute", m, choice)
    m = g.all_to_all("dispatch", m)
    m = g.gather("expert_gather", m)
    m = g.columns("expert_in", m, 2 * g.shape.ffn, Kind.GROUPED_GEMM)
    m = g.activation("activation", m)
    m = g.rows("expert_out", m, g.shape.hidden, Kind.GROUPED_GEMM)
    m = g.scatter("expert_scatter", m)
    m = g.all_to_all("combine", m)
    return g.unpermute("unpermute", m, gates, choice)


def layer_part(sizes: PartSizes) -> Part:
    """The built-in layer."""
    g = LayerBuilder("layer", sizes)
    return g.build(transformer_layer(g))


def embedding(sizes: PartSizes) -> Part:
    """Vocabulary-parallel embedding, and learned positions for GPT."""
    g = LayerBuilder("embedding", sizes)
    x = g.embedding("embedding", g.token_ids("tokens"))
    x = g.scatter("embedding_scatter", x)
    return g.build(g.positions("positions", x) if sizes.shape.family == "gpt" else x)


def head(sizes: PartSizes) -> Part:
    """Final norm, vocabulary-parallel logits and cross-entropy; its output is the sum of token losses.

    Its backward pass needs nothing from elsewhere and runs at once, so that the logits, the largest value of
    all, are never kept between two blocks.
    """
    g = LayerBuilder("head", sizes)
    x, targets, scale = g.input(), g.token_ids("targets"), g.factor("loss_scale")
    h = g.norm("final_norm", x)
    h = g.gather("head_gather", h)
    logits = g.columns("head", h, sizes.vocabulary_rows * sizes.tp)
    return g.build(g.cross_entropy("loss", logits, targets, scale)).at_once()


def built_in_parts(sizes: PartSizes, recompute: str = "none") -> dict[str, Part]:
    """The parts of a built-in model by name, under a recompute policy."""
    parts = (embedding(sizes), layer_part(sizes), head(sizes))
    return {part.name: with_recompute(part, recompute) for part in parts}
