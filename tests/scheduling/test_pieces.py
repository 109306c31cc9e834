"""Collectives in pieces: the same data flow, the same work, the same saved values."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.scheduling.layers import built_in_parts, layer_part
from braid.scheduling.lowering.lower import Choices, scheduled_parts, training_schedule
from braid.scheduling.lowering.pieces import WAYS, in_pieces
from braid.scheduling.lowering.recompute import RECOMPUTE_POLICIES
from braid.scheduling.operators import Graph, Kind, Operator, Part, Piece, Stream
from braid.scheduling.planner.decide import Outcome, evaluate, modelled
from braid.scheduling.profile import Profile, TransferFit, with_piece_costs
from braid.scheduling.schedule import Barrier, PassKind, Schedule, Side, Start
from braid.scheduling.schedule_text import parse, write
from braid.scheduling.sizes import PartSizes
from braid.scheduling.spec import ModelShape
from braid.scheduling.units import joined
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
    sizes = {
        "moe": PartSizes(shape=MOE, tp=2, micro_batch=MICRO_BATCH, cp=2, ep=2),
        "ring": PartSizes(shape=LLAMA, tp=2, micro_batch=MICRO_BATCH, cp=2, context="ring"),
    }
    return {
        "llama": model_parts(LLAMA, 2)["layer"],
        "gpt": model_parts(GPT, 2)["layer"],
        "full": model_parts(LLAMA, 2, "full")["layer"],
        **{name: layer_part(s) for name, s in sizes.items()},
    }


LAYERS = pytest.mark.parametrize("layer", layers().values(), ids=layers().keys())


def whole(op: Operator) -> str:
    """The name of the operator that a piece is of."""
    name, _, rest = op.name.rpartition(".")
    return name if "of" in rest and rest.replace("of", "").isdigit() else op.name


def by_whole(graph: Graph) -> dict[str, list[Operator]]:
    """The operators of a cut graph by the operator that they are pieces of."""
    found: dict[str, list[Operator]] = {}
    for op in graph.operators:
        found.setdefault(whole(op), []).append(op)
    return found


@LAYERS
@IN_WAYS
def test_the_same_work_in_pieces(layer: Part, ways: int) -> None:
    cut = in_pieces(layer, ways)
    for before, after in ((layer.forward, cut.forward), (layer.backward, cut.backward)):
        pieces = by_whole(after)
        assert set(pieces) == {op.name for op in before.operators}
        for op in before.operators:
            parts = pieces[op.name]
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
    cut = in_pieces(layer, ways)
    assert cut.saved() == layer.saved()
    for width in (2, 4):
        assert cut.saved_bytes(width) == layer.saved_bytes(width)
    assert {n: v for n, v in cut.values.items() if n in layer.values} == dict(layer.values)
    for graph, given_before in (
        (cut.forward, {*cut.inputs}),
        (cut.backward, {*cut.saved(), *cut.constants, f"d.{cut.output}"}),
    ):
        there = set(given_before)
        for op in graph.operators:
            assert set(op.reads) <= there, f"{op.name} reads what is not there"
            assert not set(op.writes) & there, f"{op.name} writes again"
            there |= set(op.writes)
    wanted = {name for op in layer.forward.operators for name in op.writes}
    assert wanted <= {name for op in cut.forward.operators for name in op.writes}


@LAYERS
def test_pieces_of_a_value_are_slices_of_its_memory(layer: Part) -> None:
    cut = in_pieces(layer, 2)
    new = {name: value for name, value in cut.values.items() if name not in layer.values}
    assert new
    for name, value in new.items():
        origin = layer.values[name.rpartition(".")[0]]
        assert value.alias_of is None
        assert value.piece_of == origin.name
        assert value.elements == origin.elements // 2


def test_what_is_cut_of_a_layer() -> None:
    """Gathers go ahead of their GEMM's pieces; scatters follow theirs, in turns."""
    cut = in_pieces(model_parts(LLAMA, 2)["layer"], 2)
    assert [op.name for op in cut.forward.operators] == [
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
    found = {whole(op) for op in cut.backward.operators if op.name != whole(op)}
    assert found == {
        "mlp_scatter.grad",
        "mlp_out.dgrad",
        "mlp_in.dgrad",
        "mlp_gather.grad",
        "attention_scatter.grad",
        "projection.dgrad",
        "qkv.dgrad",
        "attention_gather.grad",
    }
    # A GEMM's first piece needs the first piece of what was gathered alone; weight gradients need all of it.
    assert cut.forward.named("qkv.1of2").reads == ("attention_gather.out.1of2",)
    assert "attention_gather.out" in cut.backward.named("qkv.wgrad").reads


def test_pieces_overlap_with_each_other() -> None:
    """Only the second piece of a GEMM behind a gather depends on the second piece of the gather."""
    cut = in_pieces(model_parts(LLAMA, 2)["layer"], 2)
    for first, second in (("attention_gather", "qkv"), ("projection", "attention_scatter")):
        for n in (1, 2):
            producer = cut.forward.named(f"{first}.{n}of2")
            assert set(cut.forward.named(f"{second}.{n}of2").reads) <= set(producer.writes)
    early = set(cut.forward.named("attention_scatter.1of2").reads)
    assert not early & set(cut.forward.named("projection.2of2").writes)


def test_only_the_chosen_collectives_are_cut() -> None:
    layer = model_parts(LLAMA, 2)["layer"]
    cut = in_pieces(layer, 4, only=("mlp_scatter", "qkv"))
    found = {whole(op) for op in cut.forward.operators if op.name != whole(op)}
    assert found == {"mlp_out", "mlp_scatter"}
    assert cut.backward == layer.backward
    assert in_pieces(layer, 2, only=()) == layer


def test_what_has_no_gemm_beside_it_stays_whole() -> None:
    single = model_parts(LLAMA, 1)["layer"]
    assert in_pieces(single, 4) == single
    cut = in_pieces(layers()["moe"], 2)
    found = {whole(op) for op in cut.forward.operators if op.name != whole(op)}
    assert not {"dispatch", "combine", "kv_gather"} & found
    assert {"expert_gather", "expert_in", "expert_out", "expert_scatter"} <= found
    assert all(cut.forward.named(f"expert_in.{n}of2").kind is Kind.GROUPED_GEMM for n in (1, 2))


@pytest.mark.parametrize("ways", [0, -1])
def test_no_pieces_are_refused(ways: int) -> None:
    with pytest.raises(ValueError, match=rf"^pieces={ways} must be at least 1$"):
        in_pieces(model_parts(LLAMA, 2)["layer"], ways)


@given(st.integers(1, 8), st.sampled_from(RECOMPUTE_POLICIES), st.sampled_from([LLAMA, GPT]))
@settings(max_examples=30, deadline=None)
def test_schedules_with_cut_graphs_are_valid(ways: int, recompute: str, shape: ModelShape) -> None:
    parts = built_in_parts(PartSizes(shape=shape, tp=2, micro_batch=MICRO_BATCH), recompute)
    parts["layer"] = in_pieces(parts["layer"], ways)
    layout = layout_for("intra_batch", 2, 2)
    case = setting_for("intra_batch", layout, 3, model=shape, recompute=recompute)
    schedule = training_schedule(case, parts)
    linked(schedule, layout, case.model.kinds, parts)
    texts = program_lines(schedule, "F:layer")
    if ways > 1:
        # The second piece of a gather is on the link while the GEMM works on the first.
        begin = texts.index(f"start attention_gather.2of{ways} on intra")
        assert begin < texts.index(f"compute qkv.1of{ways}") < texts.index(f"wait attention_gather.2of{ways}")


def program_lines(schedule: Schedule, sides: str) -> list[str]:
    """A program as it reads in the schedule's text."""
    block = write(schedule).partition(f"program {sides}\n")[2].partition("\n\n")[0]
    return [line.strip() for line in block.splitlines()]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_operators_know_what_they_are_a_piece_of(recompute: str) -> None:
    """Also in a unit of several layers, and where they are computed again; the others are whole."""
    layer = model_parts(LLAMA, 2, recompute)["layer"]
    cut = in_pieces(layer, 4)
    for part in (cut, joined([cut, cut])):
        for op in (*part.forward.operators, *part.backward.operators):
            own = whole(replace(op, name=op.own_name))
            if own == op.own_name:
                assert op.piece is None
                continue
            assert op.piece is not None
            number = int(op.own_name.rpartition(".")[2].partition("of")[0])
            assert op.piece == Piece(own, number, 4, "tp")
            assert op.key == f"layer/{own.removesuffix('.again')}.{number}of4"


def run_alone(schedule: str, pieces: int, profile: Profile | None = None) -> Outcome:
    """A small setting, lowered and simulated with nothing decided."""
    bench = modelled(cluster(gpus=2), profile)(setting(schedule, tp=2, pieces=pieces))
    return lowered(bench, Choices())


@pytest.mark.parametrize("pieces", WAYS)
def test_a_schedule_says_into_how_many_pieces(pieces: int) -> None:
    schedule = run_alone("intra_batch", pieces).code.schedule
    assert f"\npieces {pieces}\n" in write(schedule)
    assert parse(write(schedule)) == schedule
    assert "\npieces 1\n" in write(run_alone("megatron", 1).code.schedule)


@pytest.mark.parametrize("ways", [2, 4])
@pytest.mark.parametrize("operator", ["attention_gather", "qkv"])
def test_the_last_piece_comes_last(operator: str, ways: int) -> None:
    """It completes the whole value: with another piece still missing, readers of the whole would err."""
    layout = layout_for("intra_batch", 1, 2)
    case = setting_for("intra_batch", layout, 2, pieces=ways)
    parts = parts_for(case)
    assert parts == scheduled_parts(model_parts(LLAMA, 2), layout, LLAMA.layers, pieces=ways)
    schedule = training_schedule(case, parts)
    linked(schedule, layout, LLAMA.kinds, parts)
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
        linked(changed, layout, LLAMA.kinds, parts)


def test_pieces_must_be_equal() -> None:
    """Of 12 tokens on a rank 8 pieces cannot be made; the planner does not try."""
    model = replace(SMALL, sequence=24)
    assert setting("intra_batch", tp=2, model=model, pieces=4).pieces == 4
    with pytest.raises(ValueError, match=r"^pieces=8 does not divide a rank's 12 tokens of a micro-batch$"):
        setting("intra_batch", tp=2, model=model, pieces=8)
    found = evaluate(setting("intra_batch", tp=2, model=model), cluster(gpus=2, intra=2e8))
    assert found.bench.setting.pieces in (2, 4)
    odd = evaluate(setting("intra_batch", tp=2, model=replace(SMALL, sequence=26)), cluster(gpus=2))
    assert odd.bench.setting.pieces == 1


def test_costs_of_pieces_follow_from_those_of_the_whole() -> None:
    """As a profile that was measured on whole operators has them."""
    whole = modelled(cluster(gpus=2))(setting("megatron", tp=2))
    layer = in_pieces(whole.members["layer"], 4)
    profile = with_piece_costs(whole.profile, [layer])
    assert profile.solo_ns["layer/qkv.3of4"] == pytest.approx(whole.profile.solo_ns["layer/qkv"] / 4, abs=1)
    assert profile.classes["layer/qkv.3of4"] == profile.classes["layer/qkv"]
    assert {k: v for k, v in profile.solo_ns.items() if "of4" not in k} == whole.profile.solo_ns
    gather = whole.profile.solo_ns["layer/attention_gather"]
    fit = TransferFit(latency_ns=gather / 2, ns_per_byte=1.0, stream=Stream.INTRA)
    slow = replace(whole.profile, transfers={**whole.profile.transfers, "tp/all_gather": fit})
    piece = with_piece_costs(slow, [layer]).solo_ns["layer/attention_gather.1of4"]
    assert piece == pytest.approx(gather / 2 + gather / 8, abs=1)
    assert with_piece_costs(profile, [layer]) == profile


def test_a_measured_profile_prices_every_number_of_pieces() -> None:
    whole = modelled(cluster(gpus=2))(setting("megatron", tp=2))
    serial = run_alone("megatron", 1, whole.profile).step_ns
    for ways in WAYS:
        assert run_alone("intra_batch", ways, whole.profile).step_ns < serial
