"""Builds the operator graphs of a model's parts: embedding, Llama, GPT and expert layers, head.

With tensor and sequence parallelism a layer has 14 forward and 18 backward operators (DHelix section 4.2),
and one more in each direction where queries and keys have norms. Context parallelism cuts the sequence;
expert parallelism sends every token to the ranks that hold its experts, and back.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from braid.scheduling.model.builder import LayerBuilder
from braid.scheduling.model.operators import Part
from braid.scheduling.model.parameters import Parameters
from braid.scheduling.model.recompute import policy_of_all, with_recompute
from braid.scheduling.model.sizes import PartSizes
from braid.scheduling.text.pattern import DENSE, ENDS, UNIFORM, base_kind, built_in_kinds, own_recompute

LayerGraph = Callable[[LayerBuilder], str]
"""A function that writes a layer's operators, beginning with ``g.input()``, and returns its output's name."""


def transformer_layer(g: LayerBuilder) -> str:
    """Write a pre-norm transformer layer of the shape's family and return the name of its output.

    In a mixture of experts, experts replace the MLP, except in layers of the kind ``dense``.
    """
    shape = g.shape
    x = g.input()
    a = g.norm("attention_norm", x)
    a = g.gather("attention_gather", a)
    qkv = {"q": shape.query_width, "k": shape.kv_width, "v": shape.kv_width}
    a = g.columns("qkv", a, sum(qkv.values()), bias=shape.biases_of_qkv, matrices=qkv)
    a = g.head_norm("head_norm", a) if shape.head_norm else a
    a = g.attention("attention", a)
    a = g.rows("projection", a, shape.hidden, matrix="o")
    a = g.scatter("attention_scatter", a)
    x = g.residual("attention_residual", a, x, bias=shape.bias_of_projection)
    m = g.norm("mlp_norm", x)
    m = _experts(g, m) if shape.experts and base_kind(g.name) != DENSE else _mlp(g, m)
    return g.residual("mlp_residual", m, x, bias=shape.biases)


def _mlp(g: LayerBuilder, m: str, prefix: str = "", width: int | None = None) -> str:
    """Write an MLP and return the name of its output.

    ``prefix``: what its operators' names begin with; ``width``: width of its activation, by default ``ffn``;
    with 0 nothing is written, and "" is returned.
    """
    width = g.shape.ffn if width is None else width
    if not width:
        return ""
    m = g.gather(f"{prefix}mlp_gather", m)
    inner = dict.fromkeys(("gate", "up") if g.shape.gated else ("up",), width)
    m = g.columns(f"{prefix}mlp_in", m, sum(inner.values()), bias=g.shape.biases, matrices=inner)
    m = g.activation(f"{prefix}activation", m)
    m = g.rows(f"{prefix}mlp_out", m, g.shape.hidden, matrix="down")
    return g.scatter(f"{prefix}mlp_scatter", m)


def _experts(g: LayerBuilder, m: str) -> str:
    """Write a mixture of experts (routing, dispatch, two grouped GEMMs, combine) and return its output's
    name.

    Experts are divided over ``ep``, and the width of each is cut over ``tp``.
    """
    shared = _mlp(g, m, "shared_", g.shape.shared_experts * g.shape.expert_width)
    to = g.router("router", m)
    m = g.permute("permute", m, to.choice)
    m = g.all_to_all("dispatch", m, to.sent, to.returned)
    m = g.gather("expert_gather", m, shares=to.shares)
    m = g.regroup("expert_order", m, to.sources)
    m = g.columns("expert_in", m, 2 * g.shape.expert_width, experts=to.sizes)
    m = g.activation("activation", m)
    m = g.rows("expert_out", m, g.shape.hidden, experts=to.sizes)
    m = g.regroup("expert_return", m, to.sources)
    m = g.scatter("expert_scatter", m, shares=to.shares)
    m = g.all_to_all("combine", m, to.returned, to.sent)
    m = g.unpermute("unpermute", m, to.gates, to.choice)
    return g.residual("expert_sum", shared, m) if shared else m


def layer_part(sizes: PartSizes, kind: str = UNIFORM, graph: LayerGraph = transformer_layer) -> Part:
    """Build a layer of the given kind from the function ``graph``, by default the family's own layer."""
    g = LayerBuilder(kind, sizes.of_kind(kind))
    return g.build(graph(g))


def embedding(sizes: PartSizes) -> Part:
    """Build the vocabulary-parallel embedding, with learned positions for GPT."""
    g = LayerBuilder(ENDS[0], sizes)
    x = g.embedding("embedding", g.token_ids("tokens"))
    x = g.scatter("embedding_scatter", x)
    x = g.positions("positions", x) if sizes.shape.family == "gpt" else x
    part = g.build(g.dropout("embedding_dropout", x))
    return part.without_gradients("embedding") if sizes.shape.lora is not None else part


def head(sizes: PartSizes) -> Part:
    """Build the head: final norm, vocabulary-parallel logits, and loss; its output is the loss of every
    token.

    Its backward pass needs no other part's gradient and runs at once, so that the logits, the largest value,
    are never kept between two blocks.
    """
    g = LayerBuilder(ENDS[1], sizes)
    x, targets, scale = g.input(), g.token_ids("targets"), g.factor("target_scale")
    h = g.norm("final_norm", x)
    h = g.gather("head_gather", h)
    logits = g.columns("head", h, sizes.vocabulary_rows * sizes.tp, bias=g.shape.head_bias, hidden=False)
    part = g.build(g.cross_entropy("loss", logits, targets, scale)).at_once()
    if not sizes.shape.tied_head:
        return part
    modules, frozen = (
        {**counts, "head": _tied(counts["head"])} if "head" in counts else counts
        for counts in (part.modules, part.frozen)
    )
    return replace(part, modules=modules, frozen=frozen)


def _tied(table: Parameters) -> Parameters:
    return Parameters(tuple(replace(tensor, held="tied") for tensor in table.tensors))


def model_parts(sizes: PartSizes, layers: Mapping[str, LayerGraph]) -> dict[str, Part]:
    """Build all parts of a model, with recomputation applied; return them by name.

    ``layers``: kind of layer -> function that writes its graph.
    """
    kinds, of_all = dict.fromkeys(sizes.kinds), policy_of_all(sizes.recompute, sizes.shape.layers)
    of_layers = (layer_part(sizes, kind, layers[base_kind(kind)]) for kind in kinds)
    parts = (embedding(sizes), *of_layers, head(sizes))
    return {p.name: with_recompute(p, own_recompute(p.name) or of_all) for p in parts}


def built_in_parts(sizes: PartSizes) -> dict[str, Part]:
    """Build the parts of a model that has only built-in layers; raise `ValueError` for user-defined
    layers."""
    shape, built_in = sizes.shape, built_in_kinds(sizes.shape.family)
    for kind in shape.kinds:
        if kind not in built_in:
            raise ValueError(
                f"model.pattern={shape.pattern!r}: {kind!r} is no built-in layer of the family "
                f"{shape.family}; those are {', '.join(built_in)}"
            )
    return model_parts(sizes, dict.fromkeys(built_in, transformer_layer))
