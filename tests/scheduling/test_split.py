"""Collectives in chunks: the same data flow, the same work, the same saved values."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.scheduling.fusion import fuse
from braid.scheduling.graph_builder import AxisPlacement
from braid.scheduling.layers import built_in_parts, layer_part
from braid.scheduling.lowering.lower import Choices, scheduled_parts, training_schedule
from braid.scheduling.lowering.recompute import RECOMPUTE_POLICIES
from braid.scheduling.lowering.split import WAYS, split_collectives
from braid.scheduling.operators import Chunk, Graph, Kind, Operator, Part, Stream
from braid.scheduling.planner.decide import Outcome, evaluate, modelled
from braid.scheduling.profile import Profile, TransferFit, with_chunks
from braid.scheduling.schedule import Barrier, PassKind, Schedule, Side, Start
from braid.scheduling.schedule_text import parse, write
from braid.scheduling.sizes import PartSizes
from braid.scheduling.spec import ModelShape
from braid.scheduling.validate import ScheduleError, linked
from tests.scheduling.cases import (
    GPT,
    LLAMA,
    MICRO_BATCH,
    layout_for,
    model_parts,
    parts_for,
    setting_for,
)
from tests.scheduling.plans import SMALL, cluster, lowered, setting

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
IN_WAYS = pytest.mark.parametrize("ways", [1, 2, 4, 3])


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
        **{name: layer_part(s) for name, s in sizes.items()},
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
@IN_WAYS
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
@IN_WAYS
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
        assert value.alias_of is None
        assert value.chunk_of == origin.name
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
    case = setting_for("intra_batch", layout, 3, model=shape, recompute=recompute)
    schedule = training_schedule(case, parts)
    linked(schedule, layout, case.model.layers, parts)
    texts = program_lines(schedule, "F:layer")
    if ways > 1:
        # The second chunk of a gather is on the link while the GEMM works on the first.
        begin = texts.index(f"start attention_gather.2of{ways} on intra")
        assert begin < texts.index(f"compute qkv.1of{ways}") < texts.index(f"wait attention_gather.2of{ways}")


def program_lines(schedule: Schedule, sides: str) -> list[str]:
    """A program as it reads in the schedule's text."""
    block = write(schedule).partition(f"program {sides}\n")[2].partition("\n\n")[0]
    return [line.strip() for line in block.splitlines()]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_operators_know_what_they_are_a_chunk_of(recompute: str) -> None:
    """Also in a run of several layers, and where they are computed again; the others are whole."""
    layer = model_parts(LLAMA, 2, recompute)["layer"]
    split = split_collectives(layer, 4)
    for part in (split, fuse([split, split])):
        for op in (*part.forward.operators, *part.backward.operators):
            own = whole(replace(op, name=op.own_name))
            if own == op.own_name:
                assert op.chunk is None
                continue
            assert op.chunk is not None
            number = int(op.own_name.rpartition(".")[2].partition("of")[0])
            assert op.chunk == Chunk(own, number, 4, "tp")
            assert op.key == f"layer/{own.removesuffix('.again')}.{number}of4"


def run_alone(schedule: str, split: int, profile: Profile | None = None) -> Outcome:
    """A small setting, lowered and simulated with nothing decided."""
    bench = modelled(cluster(gpus=2), profile)(setting(schedule, tp=2, split=split))
    return lowered(bench, Choices())


@pytest.mark.parametrize("split", WAYS)
def test_a_schedule_says_into_how_many_chunks(split: int) -> None:
    schedule = run_alone("intra_batch", split).code.schedule
    assert f"\nsplit {split}\n" in write(schedule)
    assert parse(write(schedule)) == schedule
    assert "\nsplit 1\n" in write(run_alone("megatron", 1).code.schedule)


@pytest.mark.parametrize("ways", [2, 4])
@pytest.mark.parametrize("operator", ["attention_gather", "qkv"])
def test_the_last_chunk_comes_last(operator: str, ways: int) -> None:
    """It completes the whole value: with another chunk still missing, readers of the whole would err."""
    layout = layout_for("intra_batch", 1, 2)
    case = setting_for("intra_batch", layout, 2, split=ways)
    parts = parts_for(case)
    assert parts == scheduled_parts(model_parts(LLAMA, 2), layout, LLAMA.layers, split=ways)
    schedule = training_schedule(case, parts)
    linked(schedule, layout, LLAMA.layers, parts)
    forward = (Side(PassKind.FORWARD, "layer"),)
    program = [*schedule.programs[forward]]
    own = [
        n
        for n, a in enumerate(program)
        if not isinstance(a, Start | Barrier) and a.operator.startswith(f"{operator}.")
    ]
    assert len(own) == ways
    if operator == "qkv":  # behind what it reads itself
        program.insert(own[-1], program.pop(own[-2]))
    else:
        program.insert(own[-2], program.pop(own[-1]))
    changed = replace(schedule, programs={**schedule.programs, forward: tuple(program)})
    cause = f"{operator}.{ways}of{ways} needs {operator}.{ways - 1}of{ways}, which is not done yet"
    with pytest.raises(ScheduleError, match=cause):
        linked(changed, layout, LLAMA.layers, parts)


def test_chunks_must_be_equal() -> None:
    """Of 12 tokens on a rank 8 chunks cannot be made; the planner does not try."""
    model = replace(SMALL, sequence=24)
    assert setting("intra_batch", tp=2, model=model, split=4).split == 4
    with pytest.raises(ValueError, match=r"^split=8 does not divide a rank's 12 tokens of a micro-batch$"):
        setting("intra_batch", tp=2, model=model, split=8)
    found = evaluate(setting("intra_batch", tp=2, model=model), cluster(gpus=2, intra=2e8))
    assert found.bench.setting.split in (2, 4)
    odd = evaluate(setting("intra_batch", tp=2, model=replace(SMALL, sequence=26)), cluster(gpus=2))
    assert odd.bench.setting.split == 1


def test_costs_of_chunks_follow_from_those_of_the_whole() -> None:
    """As a profile that was measured on whole operators has them."""
    whole = modelled(cluster(gpus=2))(setting("megatron", tp=2))
    layer = split_collectives(whole.layer, 4)
    profile = with_chunks(whole.profile, layer)
    assert profile.solo_ns["layer/qkv.3of4"] == pytest.approx(whole.profile.solo_ns["layer/qkv"] / 4, abs=1)
    assert profile.classes["layer/qkv.3of4"] == profile.classes["layer/qkv"]
    assert {k: v for k, v in profile.solo_ns.items() if "of4" not in k} == whole.profile.solo_ns
    gather = whole.profile.solo_ns["layer/attention_gather"]
    fit = TransferFit(latency_ns=gather / 2, ns_per_byte=1.0, stream=Stream.INTRA)
    slow = replace(whole.profile, transfers={**whole.profile.transfers, "tp/all_gather": fit})
    chunk = with_chunks(slow, layer).solo_ns["layer/attention_gather.1of4"]
    assert chunk == pytest.approx(gather / 2 + gather / 8, abs=1)
    assert with_chunks(profile, layer) == profile


def test_a_measured_profile_prices_every_number_of_chunks() -> None:
    whole = modelled(cluster(gpus=2))(setting("megatron", tp=2))
    serial = run_alone("megatron", 1, whole.profile).step_ns
    for split in WAYS:
        assert run_alone("intra_batch", split, whole.profile).step_ns < serial
