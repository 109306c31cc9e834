"""Layers with experts and with context parallelism: FLOPs, bytes, data flow.

In the formulas: T tokens of a micro-batch on a rank of context parallelism, s the sequence, h hidden, Q and K
the widths of query and of key (or value) heads, f the width of an expert.
"""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.builder import LayerBuilder
from braid.scheduling.model.layers import built_in_parts, layer_part
from braid.scheduling.model.operators import Part
from braid.scheduling.model.recompute import RECOMPUTE_POLICIES
from braid.scheduling.model.shape import ModelShape
from braid.scheduling.model.sizes import PartSizes
from tests.scheduling.cases import GPT, LLAMA, MOE, QWEN
from tests.scheduling.test_graphs import check_data_flow

B = 2
"""Samples of a micro-batch."""

CASES = pytest.mark.parametrize(
    ("shape", "tp", "cp", "ep", "context"),
    [
        (MOE, 2, 2, 2, "all_gather"),
        (MOE, 2, 4, 8, "ring"),
        (LLAMA, 1, 4, 1, "all_gather"),
        (LLAMA, 2, 4, 1, "ring"),
        (GPT, 2, 2, 1, "ring"),
        (QWEN, 2, 1, 1, "all_gather"),
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


def test_an_own_operator_that_may_need_all_tokens_is_refused_with_some() -> None:
    def graph(g: LayerBuilder, **how: bool) -> str:
        x = g.input()
        return g.residual("sum", g.custom("mixer", g.norm("norm", x), **how), x)

    sizes = PartSizes(LLAMA, ParallelLayout(cp=2), B)
    with pytest.raises(ValueError, match=r"^parallel.cp=2 leaves layer 'own' .*'mixer' may need all; set"):
        layer_part(sizes, "own", graph)
    assert layer_part(sizes, "own", partial(graph, per_token=True)).forward.named("mixer")
