"""The operator graphs of a model's parts: embedding, Llama, GPT and expert layers, head.

With tensor and sequence parallelism a layer has 14 forward and 18 backward operators (DHelix section 4.2),
one more of each where queries and keys have norms.
Context parallelism cuts the sequence, expert parallelism sends every token to the ranks that hold its experts
and back.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from braid.scheduling.model.builder import LayerBuilder
from braid.scheduling.model.operators import Part
from braid.scheduling.model.recompute import with_recompute
from braid.scheduling.model.sizes import PartSizes
from braid.scheduling.text.pattern import DENSE, ENDS, UNIFORM, base_kind, built_in_kinds, own_recompute

LayerGraph = Callable[[LayerBuilder], str]
"""Writes a layer's operators, from ``g.input()`` on, and returns the value that it hands on."""


def transformer_layer(g: LayerBuilder) -> str:
    """One pre-norm transformer layer: Llama and GPT differ in modules, not in structure; MoE in its MLP.

    In a mixture of experts the kind ``dense`` has none.
    """
    shape = g.shape
    x = g.input()
    a = g.norm("attention_norm", x)
    a = g.gather("attention_gather", a)
    a = g.columns("qkv", a, shape.query_width + 2 * shape.kv_width, bias=shape.biases_of_qkv)
    a = g.head_norm("head_norm", a) if shape.head_norm else a
    a = g.attention("attention", a)
    a = g.rows("projection", a, shape.hidden)
    a = g.scatter("attention_scatter", a)
    x = g.residual("attention_residual", a, x, bias=shape.bias_of_projection)
    m = g.norm("mlp_norm", x)
    m = _experts(g, m) if shape.experts and base_kind(g.name) != DENSE else _mlp(g, m)
    return g.residual("mlp_residual", m, x, bias=shape.biases)


def _mlp(g: LayerBuilder, m: str, prefix: str = "", width: int | None = None) -> str:
    """``prefix``: of its operators' names; ``width``: of its activation, by default the model's; 0: none."""
    width = g.shape.ffn if width is None else width
    if not width:
        return ""
    m = g.gather(f"{prefix}mlp_gather", m)
    m = g.columns(f"{prefix}mlp_in", m, width * (2 if g.shape.gated else 1), bias=g.shape.biases)
    m = g.activation(f"{prefix}activation", m)
    m = g.rows(f"{prefix}mlp_out", m, g.shape.hidden)
    return g.scatter(f"{prefix}mlp_scatter", m)


def _experts(g: LayerBuilder, m: str) -> str:
    """Route, dispatch, two grouped GEMMs, combine; experts are cut over ``ep``, their width over ``tp``."""
    shared = _mlp(g, m, "shared_", g.shape.shared_experts * g.shape.expert_width)
    to = g.router("router", m)
    m = g.permute("permute", m, to.choice)
    m = g.all_to_all("dispatch", m, to.there, to.back)
    m = g.gather("expert_gather", m, shares=to.shares)
    m = g.regroup("expert_order", m, to.sources)
    m = g.columns("expert_in", m, 2 * g.shape.expert_width, experts=to.sizes)
    m = g.activation("activation", m)
    m = g.rows("expert_out", m, g.shape.hidden, experts=to.sizes)
    m = g.regroup("expert_return", m, to.sources)
    m = g.scatter("expert_scatter", m, shares=to.shares)
    m = g.all_to_all("combine", m, to.back, to.there)
    m = g.unpermute("unpermute", m, to.gates, to.choice)
    return g.residual("expert_sum", shared, m) if shared else m


def layer_part(sizes: PartSizes, kind: str = UNIFORM, graph: LayerGraph = transformer_layer) -> Part:
    """A layer of a kind, which its graph is written for; by default the family's own."""
    g = LayerBuilder(kind, sizes.of_kind(kind))
    return g.build(graph(g))


def embedding(sizes: PartSizes) -> Part:
    """Vocabulary-parallel embedding, and learned positions for GPT."""
    g = LayerBuilder(ENDS[0], sizes)
    x = g.embedding("embedding", g.token_ids("tokens"))
    x = g.scatter("embedding_scatter", x)
    return g.build(g.positions("positions", x) if sizes.shape.family == "gpt" else x)


def head(sizes: PartSizes) -> Part:
    """Final norm, vocabulary-parallel logits and cross-entropy; its output is the loss of every token.

    Its backward pass needs nothing from elsewhere and runs at once, so that the logits, the largest value of
    all, are never kept between two blocks.
    """
    g = LayerBuilder(ENDS[1], sizes)
    x, targets, scale = g.input(), g.token_ids("targets"), g.factor("loss_scale")
    h = g.norm("final_norm", x)
    h = g.gather("head_gather", h)
    logits = g.columns("head", h, sizes.vocabulary_rows * sizes.tp, bias=g.shape.head_bias)
    part = g.build(g.cross_entropy("loss", logits, targets, scale)).at_once()
    if not sizes.shape.tied_head:
        return part
    table = part.modules["head"]
    return replace(part, modules={**part.modules, "head": replace(table, tied=table.dense)})


def model_parts(sizes: PartSizes, layers: Mapping[str, LayerGraph]) -> dict[str, Part]:
    """The parts of a model by name, with what they recompute; ``layers``: the graph of every kind in it."""
    kinds = dict.fromkeys(sizes.kinds or sizes.shape.kinds)
    of_layers = (layer_part(sizes, kind, layers[base_kind(kind)]) for kind in kinds)
    parts = (embedding(sizes), *of_layers, head(sizes))
    return {p.name: with_recompute(p, own_recompute(p.name) or sizes.recompute) for p in parts}


def built_in_parts(sizes: PartSizes) -> dict[str, Part]:
    """The parts of a model that has no layers of the user's own; `ValueError` if it has."""
    shape, known = sizes.shape, built_in_kinds(sizes.shape.family)
    for kind in shape.kinds:
        if kind not in known:
            raise ValueError(
                f"model.pattern={shape.pattern!r}: {kind!r} is no built-in layer of the family "
                f"{shape.family}; those are {', '.join(known)}"
            )
    return model_parts(sizes, dict.fromkeys(known, transformer_layer))
