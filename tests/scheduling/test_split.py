"""Collectives in chunks: the same data flow, the same work, the same saved values."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.scheduling.graph_builder import AxisPlacement
from braid.scheduling.layers import PartSizes, built_in_parts, transformer_layer
from braid.scheduling.lowering.lower import training_schedule
from braid.scheduling.lowering.recompute import RECOMPUTE_POLICIES
from braid.scheduling.lowering.split import split_collectives
from braid.scheduling.operators import Graph, Kind, Operator, Part
from braid.scheduling.spec import ModelShape
from braid.scheduling.validate import validate
from tests.scheduling.cases import GPT, LLAMA, MICRO_BATCH, layout_for, model_parts

MOE = ModelShape(
    family="moe",
    hidden=64,
    ffn=96,
    layers=8,
    heads=8,
    kv_heads=4,
    head_dim=8,
    vocabulary=96,
    sequence=16,
    experts=8,
    top_k=2,
)
WAYS = pytest.mark.parametrize("ways", [1, 2, 4, 3])


def layers() -> dict[str, Part]:
    """Layers with all kinds of collectives."""
    axes = {axis: AxisPlacement(degree=2) for axis in ("tp", "cp", "ep")}
    sizes = {
        "moe": PartSizes(shape=MOE, tp=2, micro_batch=MICRO_BATCH, cp=2, ep=2, axes=axes),
        "ring": PartSizes(shape=LLAMA, tp=2, micro_batch=MICRO_BATCH, cp=2, context="ring", axes=axes),
    }
    return {
        "llama": model_parts(LLAMA, 2)["layer"],
        "gpt": model_parts(GPT, 2)["layer"],
        "full": model_parts(LLAMA, 2, "full")["layer"],
        **{name: transformer_layer(s) for name, s in sizes.items()},
    }


LAYERS = pytest.mark.parametrize("layer", layers().values(), ids=layers().keys())


def whole(op: Operator) -> str:
    """The name of the operator that a chunk is of."""
    name, _, rest = op.name.rpartition(".")
    return name if "of" in rest and rest.replace("of", "").isdigit() else op.name


def pieces(graph: Graph) -> dict[str, list[Operator]]:
    """The operators of a split graph by the operator that they are chunks of."""
    found: dict[str, list[Operator]] = {}
    for op in graph.operators:
        found.setdefault(whole(op), []).append(op)
    return found


@LAYERS
@WAYS
def test_the_same_work_in_chunks(layer: Part, ways: int) -> None:
    split = split_collectives(layer, ways)
    for before, after in ((layer.forward, split.forward), (layer.backward, split.backward)):
        chunks = pieces(after)
        assert set(chunks) == {op.name for op in before.operators}
        for op in before.operators:
            parts = chunks[op.name]
            assert len(parts) in (1, ways)
            assert all(
                (p.kind, p.phase, p.module, p.stream, p.axis)
                == (op.kind, op.phase, op.module, op.stream, op.axis)
                for p in parts
            )
            assert 0 <= op.flops - sum(p.flops for p in parts) < ways
            assert 0 <= op.bytes - sum(p.bytes for p in parts) < ways


@LAYERS
@WAYS
def test_the_same_values_reach_everybody(layer: Part, ways: int) -> None:
    split = split_collectives(layer, ways)
    assert split.saved() == layer.saved()
    for width in (2, 4):
        assert split.saved_bytes(width) == layer.saved_bytes(width)
    assert {n: v for n, v in split.values.items() if n in layer.values} == dict(layer.values)
    for graph, given_before in (
        (split.forward, {*split.inputs}),
        (split.backward, {*split.saved(), *split.constants, f"d.{split.output}"}),
    ):
        there = set(given_before)
        for op in graph.operators:
            assert set(op.reads) <= there, f"{op.name} reads what is not there"
            assert not set(op.writes) & there, f"{op.name} writes again"
            there |= set(op.writes)
    wanted = {name for op in layer.forward.operators for name in op.writes}
    assert wanted <= {name for op in split.forward.operators for name in op.writes}


@LAYERS
def test_chunks_of_a_value_are_slices_of_its_memory(layer: Part) -> None:
    split = split_collectives(layer, 2)
    new = {name: value for name, value in split.values.items() if name not in layer.values}
    assert new
    for name, value in new.items():
        origin = layer.values[name.rpartition(".")[0]]
        assert value.alias_of == (origin.alias_of or origin.name)
        assert value.elements == origin.elements // 2


def test_what_is_split_of_a_layer() -> None:
    """Gathers go ahead of their GEMM's chunks; scatters follow theirs, in turns."""
    split = split_collectives(model_parts(LLAMA, 2)["layer"], 2)
    assert [op.name for op in split.forward.operators] == [
        "attention_norm",
        "attention_gather.1of2",
        "attention_gather.2of2",
        "qkv.1of2",
        "qkv.2of2",
        "attention",
        "projection.1of2",
        "attention_scatter.1of2",
        "projection.2of2",
        "attention_scatter.2of2",
        "attention_residual",
        "mlp_norm",
        "mlp_gather.1of2",
        "mlp_gather.2of2",
        "mlp_in.1of2",
        "mlp_in.2of2",
        "activation",
        "mlp_out.1of2",
        "mlp_scatter.1of2",
        "mlp_out.2of2",
        "mlp_scatter.2of2",
        "mlp_residual",
    ]
    chunked = {whole(op) for op in split.backward.operators if op.name != whole(op)}
    assert chunked == {
        "mlp_scatter.grad",
        "mlp_out.dgrad",
        "mlp_in.dgrad",
        "mlp_gather.grad",
        "attention_scatter.grad",
        "projection.dgrad",
        "qkv.dgrad",
        "attention_gather.grad",
    }
    # A GEMM's first chunk needs the first chunk of what was gathered alone; weight gradients need all of it.
    assert split.forward.named("qkv.1of2").reads == ("attention_gather.out.1of2",)
    assert "attention_gather.out" in split.backward.named("qkv.wgrad").reads


def test_chunks_overlap_with_each_other() -> None:
    """Only the second chunk of a GEMM behind a gather depends on the second chunk of the gather."""
    split = split_collectives(model_parts(LLAMA, 2)["layer"], 2)
    for first, second in (("attention_gather", "qkv"), ("projection", "attention_scatter")):
        for n in (1, 2):
            producer = split.forward.named(f"{first}.{n}of2")
            assert set(split.forward.named(f"{second}.{n}of2").reads) <= set(producer.writes)
    early = set(split.forward.named("attention_scatter.1of2").reads)
    assert not early & set(split.forward.named("projection.2of2").writes)


def test_only_the_chosen_collectives_are_split() -> None:
    layer = model_parts(LLAMA, 2)["layer"]
    split = split_collectives(layer, 4, only=("mlp_scatter", "qkv"))
    chunked = {whole(op) for op in split.forward.operators if op.name != whole(op)}
    assert chunked == {"mlp_out", "mlp_scatter"}
    assert split.backward == layer.backward
    assert split_collectives(layer, 2, only=()) == layer


def test_what_has_no_gemm_beside_it_stays_whole() -> None:
    single = model_parts(LLAMA, 1)["layer"]
    assert split_collectives(single, 4) == single
    split = split_collectives(layers()["moe"], 2)
    chunked = {whole(op) for op in split.forward.operators if op.name != whole(op)}
    assert not {"dispatch", "combine", "kv_gather"} & chunked
    assert {"expert_gather", "expert_in", "expert_out", "expert_scatter"} <= chunked
    assert all(split.forward.named(f"expert_in.{n}of2").kind is Kind.GROUPED_GEMM for n in (1, 2))


@pytest.mark.parametrize("ways", [0, -1])
def test_no_chunks_are_refused(ways: int) -> None:
    with pytest.raises(ValueError, match=rf"^chunks={ways} must be at least 1$"):
        split_collectives(model_parts(LLAMA, 2)["layer"], ways)


@given(st.integers(1, 8), st.sampled_from(RECOMPUTE_POLICIES), st.sampled_from([LLAMA, GPT]))
@settings(max_examples=30, deadline=None)
def test_schedules_with_split_graphs_are_valid(ways: int, recompute: str, shape: ModelShape) -> None:
    axes = {"tp": AxisPlacement(degree=2)}
    parts = built_in_parts(PartSizes(shape=shape, tp=2, micro_batch=MICRO_BATCH, axes=axes), recompute)
    parts["layer"] = split_collectives(parts["layer"], ways)
    layout = layout_for("intra_batch", 2, 2)
    schedule = training_schedule("intra_batch", layout, 3, parts)
    validate(schedule, layout, parts)
    texts = [str(action) for action in schedule.programs["layer", next(iter(schedule.programs))[1]]]
    if ways > 1:
        # The second chunk of a gather is on the link while the GEMM works on the first.
        begin = texts.index(f"start attention_gather.2of{ways} on intra")
        assert begin < texts.index(f"compute qkv.1of{ways}") < texts.index(f"wait attention_gather.2of{ways}")
