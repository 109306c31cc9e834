"""Layers with experts and with context parallelism: operators, FLOPs, bytes, what is saved, data flow.

In the formulas: T tokens of a micro-batch on a rank of context parallelism, s the sequence, h hidden, Q and K
the widths of query and of key (or value) heads, f the width of an expert.
"""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.builder import LayerBuilder
from braid.scheduling.model.layers import built_in_parts, layer_part
from braid.scheduling.model.operators import Kind, Part, Precision
from braid.scheduling.model.recompute import RECOMPUTE_POLICIES
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.model.sizes import PartSizes
from braid.scheduling.model.units import chunk_parameters
from tests.scheduling.cases import GPT, LLAMA, MOE, QWEN
from tests.scheduling.test_graphs import both, check_data_flow, names

B = 2
"""Samples of a micro-batch."""

FORWARD = """
attention_norm attention_gather qkv attention_split kv_gather attention projection attention_scatter
attention_residual mlp_norm router router_rows_ep router_rows_tp router_rows permute dispatch expert_gather
expert_order expert_in activation expert_out expert_return expert_scatter combine unpermute mlp_residual
"""
BACKWARD = """
mlp_residual.grad unpermute.grad combine.grad expert_scatter.grad expert_return.grad
expert_out.dgrad expert_out.wgrad activation.grad expert_in.dgrad expert_in.wgrad expert_order.grad
expert_gather.grad dispatch.grad permute.grad
router.dgrad router.mlp_norm.out.add router.wgrad mlp_norm.grad attention_residual.grad
attention_scatter.grad projection.dgrad projection.wgrad attention.grad kv_gather.grad
attention_split.grad qkv.dgrad qkv.wgrad attention_gather.grad attention_norm.grad
"""
RING = """
attention_norm attention_gather qkv attention_split kv_shift_1 attention_0 kv_shift_2 attention_1
kv_shift_3 attention_2 attention projection attention_scatter attention_residual mlp_norm mlp_gather
mlp_in activation mlp_out mlp_scatter mlp_residual
"""
CASES = pytest.mark.parametrize(
    ("shape", "tp", "cp", "ep", "context"),
    [
        (MOE, 1, 1, 1, "all_gather"),
        (MOE, 2, 1, 1, "all_gather"),
        (MOE, 1, 1, 4, "all_gather"),
        (MOE, 2, 2, 2, "all_gather"),
        (MOE, 2, 4, 8, "ring"),
        (LLAMA, 2, 2, 1, "all_gather"),
        (LLAMA, 1, 4, 1, "all_gather"),
        (LLAMA, 2, 4, 1, "ring"),
        (LLAMA, 4, 2, 1, "ring"),
        (GPT, 2, 2, 1, "ring"),
        *[(shape, tp, 1, 1, "all_gather") for shape in (LLAMA, QWEN, GPT) for tp in (1, 2, 4)],
    ],
)


def parts_of(
    shape: ModelShape, tp: int, cp: int, ep: int, context: str = "all_gather", recompute: str = "none"
) -> dict[str, Part]:
    """Parts whose experts and context are parallel between nodes."""
    streams = {"cp": Stream.INTER, "ep": Stream.INTER}
    layout = ParallelLayout(dp=ep, tp=tp, cp=cp, ep=ep)
    return built_in_parts(PartSizes(shape, layout, B, streams, context, recompute))


def layer_of(
    shape: ModelShape, tp: int, cp: int, ep: int, context: str = "all_gather", recompute: str = "none"
) -> Part:
    """The layer of those."""
    return parts_of(shape, tp, cp, ep, context, recompute)["layer"]


# -- operators ---------------------------------------------------------------------------------------------


def test_operators_of_experts_and_gathered_context() -> None:
    layer = layer_of(MOE, 2, 2, 2)
    assert names(layer.forward) == FORWARD.split()
    assert names(layer.backward) == BACKWARD.split()


def test_operators_of_a_ring() -> None:
    """Attention over what is there while the next keys and values come: the last step needs no shift."""
    layer = layer_of(LLAMA, 2, 4, 1, "ring")
    assert names(layer.forward) == RING.split()
    for step in (1, 2):
        assert f"kv_shift_{step}.out" in layer.forward.named(f"kv_shift_{step + 1}").reads
        assert f"kv_shift_{step}.out" in layer.forward.named(f"attention_{step}").reads
        assert f"attention_{step - 1}.partial" in layer.forward.named(f"attention_{step}").reads
    shifts = [op for op in both(layer) if op.kind is Kind.SEND_RECEIVE]
    assert len(shifts) == 6
    assert {op.axis for op in shifts} == {"cp"}


# -- FLOPs and bytes ---------------------------------------------------------------------------------------


def forward_flops(shape: ModelShape) -> int:
    """A layer's forward pass of a micro-batch on all ranks together."""
    tokens = B * shape.sequence
    qkv = shape.query_width + 2 * shape.kv_width
    flops = 2 * tokens * shape.hidden * (qkv + shape.query_width)
    flops += 2 * tokens * shape.sequence * shape.query_width
    matrices = 3 if shape.gated else 2
    visits = tokens * max(1, shape.top_k)
    flops += 2 * visits * matrices * shape.hidden * shape.ffn
    return flops + 2 * tokens * shape.hidden * shape.experts


@CASES
def test_flops(shape: ModelShape, tp: int, cp: int, ep: int, context: str) -> None:
    layer = layer_of(shape, tp, cp, ep, context)
    assert layer.forward.flops * tp * cp == forward_flops(shape)
    assert layer.backward.flops == 2 * layer.forward.flops
    for op in layer.forward.operators:
        backward = sum(b.flops for b in layer.backward.operators if b.module == op.name)
        assert backward == 2 * op.flops, op.name


@CASES
def test_bytes_of_collectives(shape: ModelShape, tp: int, cp: int, ep: int, context: str) -> None:
    """Two bytes an element; as much in the backward pass as in the forward pass."""
    layer = layer_of(shape, tp, cp, ep, context)
    tokens = B * shape.sequence // cp
    dense = 2 * tokens * shape.hidden * (tp - 1) // tp
    visits = max(1, shape.top_k)
    kv = 2 * (2 * tokens * shape.kv_width // tp)
    expected = {
        "tp": 2 * dense + 2 * dense * visits,
        "cp": kv * (cp - 1),
        "ep": 2 * (2 * tokens // tp * visits * shape.hidden * (ep - 1) // ep) if shape.experts else 0,
    }
    told = [op for op in layer.forward.operators if op.name.startswith("router_rows_")]
    for op in told:  # eight bytes a number, of the ranks of ep, then of all that have the same experts
        degree, ranks = (tp, tp * ep) if op.axis == "tp" else (ep, ep)
        assert op.bytes == 8 * shape.experts * ranks * (degree - 1) // degree
    for graph in (layer.forward, layer.backward):
        rows = [op for op in graph.operators if op not in told]
        assert {axis: sum(op.bytes for op in rows if op.axis == axis) for axis in expected} == expected
        assert all((op.bytes > 0) == op.kind.communicates for op in graph.operators)


@pytest.mark.parametrize("factor", [0.5, 1.0, 6.0])
def test_work_is_what_experts_have_room_for(factor: float) -> None:
    """With a capacity, whatever comes: rows that nothing fills are computed too. Nobody tells any counts."""
    all_of_it, some = layer_of(MOE, 2, 1, 2), layer_of(replace(MOE, capacity_factor=factor), 2, 1, 2)
    for name in ("expert_in", "expert_out"):
        assert some.forward.named(name).flops == factor * all_of_it.forward.named(name).flops
    assert some.forward.named("dispatch").bytes == factor * all_of_it.forward.named("dispatch").bytes
    assert not [op for op in some.forward.operators if op.name.startswith("router_rows_")]


# -- data flow and what is saved ---------------------------------------------------------------------------


@given(
    shape=st.sampled_from([MOE, LLAMA, QWEN, GPT]),
    degrees=st.tuples(*(st.sampled_from([1, 2, 4]) for _ in range(3))),
    context=st.sampled_from(["all_gather", "ring"]),
    recompute=st.sampled_from(RECOMPUTE_POLICIES),
)
@settings(max_examples=80, deadline=None)
def test_data_flows_as_it_should(
    shape: ModelShape, degrees: tuple[int, int, int], context: str, recompute: str
) -> None:
    tp, cp, ep = degrees
    parts = parts_of(shape, tp, cp, ep if shape.experts else 1, context, recompute)
    assert "d.loss" not in parts["head"].values
    for part in parts.values():
        check_data_flow(part)
    if cp == 1 and not shape.experts:
        assert not any("@" in name for part in parts.values() for name in part.values), "an addition"


def test_gradients_of_the_same_value_are_added() -> None:
    """The norm feeds router and experts, queries every step of a ring, and keys the next shift, too."""
    layer = layer_of(MOE, 2, 2, 2)
    additions = {op.writes[0] for op in layer.backward.operators if op.kind is Kind.ADD}
    assert additions == {"d.mlp_norm.out"}
    assert all(op.flops == 0 for op in layer.backward.operators if op.kind is Kind.ADD)
    ring = layer_of(LLAMA, 2, 3, 1, "ring").backward.operators
    q, kv = "attention_split.q", "attention_split.kv"
    added = Counter(op.name.partition(".")[2] for op in ring if op.kind is Kind.ADD)
    assert added == {f"{q}.add": 2, f"{kv}.add": 1, "kv_shift_1.out.add": 1}


def test_choices_have_no_gradient() -> None:
    layer = layer_of(MOE, 1, 1, 1)
    indices = [name for name, value in layer.values.items() if value.precision is Precision.INDEX]
    assert {"router.choice", "router.counts", "router_rows.sources"} <= set(indices)
    assert not [name for name in indices if f"d.{name}" in layer.values]
    assert "d.router.out" in layer.backward.named("unpermute.grad").writes


def test_expert_parallelism_shares_out_parameters_not_activations() -> None:
    """Every rank works on as many tokens as it sends."""
    layers = {ep: layer_of(MOE, 2, 1, ep) for ep in (1, 2, 4, 8)}
    orders = {ep: 0 if ep == 8 else 8 * 2 * MOE.experts for ep in layers}  # rows by source and expert
    assert len({layer.saved_bytes(2) - orders[ep] for ep, layer in layers.items()}) == 1
    layouts = [ParallelLayout(dp=8, tp=2, ep=ep) for ep in (1, 2, 4, 8)]
    held = [chunk_parameters(parts_of(MOE, 2, 1, own.ep), own, MOE.kinds, 0) for own in layouts]
    each = MOE.layers * 3 * MOE.hidden * MOE.ffn // 2
    assert [parameters.experts for parameters in held] == [0, each * 4, each * 2, each]
    dense = {parameters.dense for parameters in held[1:]}
    assert dense == {held[0].dense - each * 8}, "experts that all ranks have are parameters like any other"


def test_an_own_operator_that_may_need_all_tokens_is_refused_with_some() -> None:
    def graph(g: LayerBuilder, **how: bool) -> str:
        x = g.input()
        return g.residual("sum", g.custom("mixer", g.norm("norm", x), **how), x)

    sizes = PartSizes(LLAMA, ParallelLayout(cp=2), B)
    with pytest.raises(ValueError, match=r"^parallel.cp=2 leaves layer 'own' .*'mixer' may need all; set"):
        layer_part(sizes, "own", graph)
    assert layer_part(sizes, "own", partial(graph, per_token=True)).forward.named("mixer")
