"""Collectives in stages and pieces: the same data flow, the same work, the same saved values."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.scheduling.cost.profile import TransferFit, with_piece_costs
from braid.scheduling.generate.lower import Choices, training_schedule
from braid.scheduling.generate.partitions import cut_gemms, with_partitions
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.mesh.partition import parse_partition
from braid.scheduling.model.layers import layer_part
from braid.scheduling.model.operators import Graph, Part
from braid.scheduling.model.sizes import PartSizes
from braid.scheduling.plan.decide import modelled
from braid.scheduling.schedule.text import parse, write
from braid.scheduling.schedule.validate import ScheduleError, linked
from tests.scheduling.cases import (
    LLAMA,
    MICRO_BATCH,
    choices_for,
    layout_for,
    model_parts,
    parts_for,
    setting_for,
)
from tests.scheduling.partition_cases import SHAPES, Cut, cuts
from tests.scheduling.plans import SMALL, cluster, lowered, setting

MESHES = {2: (), 4: ((2, 2),), 8: ((2, 4), (4, 2), (2, 2, 2))}
"""Of so many tensor-parallel ranks."""


def partitioned(part: Part, tp: int, *texts: str, **more: int) -> Part:
    """A layer, cut."""
    partitions = tuple(map(parse_partition, texts))
    return with_partitions({part.name: part}, partitions, ParallelLayout(tp=tp, **more))[part.name]


def in_pieces(part: Part, ways: int) -> Part:
    """A layer of two ranks with gathers and scatters in pieces of tokens, with the GEMMs beside them."""
    kinds = ("all_gather", "reduce_scatter")
    return partitioned(part, 2, *(f"tp/{kind} pieces {ways} of tokens with 1" for kind in kinds))


def cut_of(graph: Graph) -> set[str]:
    """Operators that a graph has pieces of."""
    return {op.piece.whole for op in graph.operators if op.piece is not None}


def check_cut(part: Part, cut: Part) -> None:
    """A layer was cut into something that saves the same and does the same work, each of it once.

    That it computes the same: `tests.cuda.test_special_runs`.
    """
    assert {name: one for name, one in cut.values.items() if name in part.values} == dict(part.values)
    assert cut.saved() == part.saved()
    assert [cut.saved_bytes(width) for width in (2, 4)] == [part.saved_bytes(width) for width in (2, 4)]
    given = {*cut.saved(), *cut.constants, f"d.{cut.output}"}
    for before, after, there in (
        (part.forward, cut.forward, {*cut.inputs}),
        (part.backward, cut.backward, given),
    ):
        written = set(there)
        for op in after.operators:
            assert set(op.reads) <= written, f"{op.name} reads what is not there"
            assert not set(op.writes) & (written - there), f"{op.name} writes again"
            written |= set(op.writes)
        kept = {op.name: op for op in before.operators if op.name not in cut_of(after)}
        assert {op.name: op for op in after.operators if op.piece is None} == kept
        for name in cut_of(after):
            op = before.named(name)
            pieces = [one for one in after.operators if one.piece is not None and one.piece.whole == name]
            for one in pieces:
                assert (one.kind, one.phase, one.module) == (op.kind, op.phase, op.module)
                assert one.piece is not None
                assert one.piece.measured_as == op.measured_as
            assert abs(op.flops - sum(one.flops for one in pieces)) <= len(pieces)
            assert 0 <= op.bytes - sum(one.bytes for one in pieces) <= len(pieces)
            assert sum(one.piece.share for one in pieces if one.piece) <= 1 + 1e-9
            assert [one for one in pieces if one.completes] in ([], pieces[-1:])


# -- any partition -------------------------------------------------------------------------------------------


@given(cuts(MESHES) | cuts(MESHES, kinds_alone=True))
@settings(max_examples=100)
def test_a_cut_layer_does_the_work_of_the_whole_one(case: Cut) -> None:
    part = model_parts(SHAPES[case.family], case.tp, case.recompute)["layer"]
    cut = partitioned(part, case.tp, *case.partitions, "dp/reduce_scatter mesh 2x2 order 0,1", dp=4, zero=1)
    check_cut(part, cut)


LOWERED = ("megatron", "intra_batch", "wavelet", "dhelix", "zbv", "braid:w", "braid:twins")


@given(cuts(MESHES), st.sampled_from(LOWERED), st.integers(1, 2), st.integers(1, 3), st.sampled_from([0, 2]))
@settings(max_examples=25)
def test_schedules_of_cut_layers_are_valid_and_round_trip(
    case: Cut, name: str, stages: int, micro_batches: int, unit_layers: int
) -> None:
    layout = layout_for(name, stages, case.tp)
    own = setting_for(
        name,
        layout,
        micro_batches,
        model=replace(SHAPES[case.family], layers=4),
        recompute=case.recompute,
        partitions=case.found,
        unit_layers=unit_layers if name.startswith("braid") else 0,
    )
    parts = parts_for(own)
    schedule = training_schedule(own, parts, choices_for(own))
    assert schedule.partitions == case.found
    linked(schedule, layout, own.model.kinds, parts)
    assert parse(write(schedule)) == schedule


def test_stages_between_nodes_are_on_another_stream_than_those_inside() -> None:
    sizes = PartSizes(LLAMA, ParallelLayout(tp=4), MICRO_BATCH, {"tp": Stream.INTER})
    cut = partitioned(layer_part(sizes), 4, "tp/all_gather mesh 2x2 order 0,1").forward
    assert cut.named("mlp_gather.s1").stream is Stream.INTER
    assert cut.named("mlp_gather.s2").stream is Stream.INTRA


def test_which_gemms_are_measured_in_pieces() -> None:
    """Those that a gather of the layer is before, whatever the partition."""
    layer = model_parts(LLAMA, 2)["layer"]
    assert cut_gemms(layer) == {"layer/qkv", "layer/mlp_in", "layer/mlp_out.dgrad", "layer/projection.dgrad"}
    assert not cut_gemms(model_parts(LLAMA, 1)["layer"])


def test_what_nothing_else_reads_is_never_whole() -> None:
    """Pieces of a value have memory of their own then, and live no longer than their readers."""
    layer = model_parts(LLAMA, 2)["layer"]
    cut = partitioned(layer, 2, "layer/mlp_scatter pieces 2 of tokens with 2")
    made = {name for op in cut.forward.operators for name in op.writes}
    for value, whole in (("activation.out", True), ("mlp_out.out", False), ("mlp_scatter.out", True)):
        assert cut.values[f"{value}.1of2"].piece_of == (value if whole else None)
        assert (value in made) == whole
        assert f"{value}.2of2" in made


# -- in schedules --------------------------------------------------------------------------------------------


LATE = """
2 layer/attention_gather pieces 4 of tokens with 1: wait attention_gather.4of4 -> wait attention_gather.3of4 \
: attention_gather.4of4 needs attention_gather.3of4
2 layer/attention_gather pieces 2 of tokens with 1: compute qkv.1of2 -> compute attention \
: qkv.2of2 needs qkv.1of2
4 layer/mlp_gather mesh 2x2 order 0,1 pieces 2: wait mlp_gather.s1.2of2 -> compute mlp_residual \
: mlp_gather.s2.2of2 needs mlp_gather.s1.2of2
"""
"""Ranks and partition: a line of the program -> in front of which line it is put : the cause."""


@pytest.mark.parametrize("fault", LATE.replace("\\\n", "").strip().splitlines())
def test_a_piece_that_comes_too_late_is_missed(fault: str) -> None:
    """The last piece completes the whole value: with another one missing, readers of the whole would err."""
    tp, how, line, behind, cause = re.fullmatch(r"(\d) (.*): (.*) -> (.*) : (.*)", fault).groups()  # type: ignore[union-attr]
    layout = layout_for("intra_batch", 1, int(tp))
    case = setting_for("intra_batch", layout, 2, partitions=(parse_partition(how),))
    parts = parts_for(case)
    before, header, text = write(training_schedule(case, parts)).partition("program F:layer\n")
    linked(parse(before + header + text), layout, LLAMA.kinds, parts)
    text = text.replace(f"  {line}\n", "", 1).replace(f"  {behind}\n", f"  {line}\n  {behind}\n", 1)
    with pytest.raises(ScheduleError, match=f"{re.escape(cause)}, which is not done"):
        linked(parse(before + header + text), layout, LLAMA.kinds, parts)


# -- costs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "ways"), [(512, 4), (512, 5), (4, 3)])
def test_costs_of_pieces_follow_from_those_of_the_whole(tokens: int, ways: int) -> None:
    """As a profile that was measured on whole operators has them: by the tokens of each, of all on a rank.

    Equal pieces of a GEMM that was measured so cost what it did.
    """
    model = replace(SMALL, sequence=2 * tokens)
    whole = modelled(cluster(gpus=2))(setting("megatron", tp=2, model=model))
    layer = in_pieces(whole.members["layer"], ways)
    known = replace(whole.profile, copy_ns_per_byte=0.0)
    known = replace(known, solo_ns=known.solo_ns | {f"layer/qkv.1of{ways}": 77})
    profile = with_piece_costs(known, [layer])
    shares = [((n + 1) * tokens // ways - n * tokens // ways) / tokens for n in range(ways)]
    for n, share in enumerate(shares, start=1):
        for name in ("mlp_in", "qkv"):
            own = f"layer/{name}.{n}of{ways}"
            cost = 77 if name == "qkv" and tokens > 4 else known.solo_ns[f"layer/{name}"] * share
            assert profile.solo_ns[own] == pytest.approx(cost, abs=1)
            assert profile.classes[own] == profile.classes[f"layer/{name}"]
    assert {key: ns for key, ns in profile.solo_ns.items() if "of" not in key} == whole.profile.solo_ns
    gather = known.solo_ns["layer/attention_gather"]
    fit = TransferFit(latency_ns=gather / 2, ns_per_byte=1.0)
    slow = replace(known, transfers={**known.transfers, "tp/all_gather": fit})
    piece = with_piece_costs(slow, [layer]).solo_ns[f"layer/attention_gather.{ways}of{ways}"]
    assert piece == pytest.approx(gather / 2 * (1 + shares[-1]), abs=1)
    assert ways == 5 or with_piece_costs(profile, [layer]) == profile


def test_copies_of_pieces_have_a_price() -> None:
    """A piece of a gather goes to its place in the whole, where weight gradients read it; of a stage that
    comes second blocks change places before; pieces of a scatter are taken from the rows of all ranks."""
    whole = modelled(cluster(nodes=2, gpus=2))(setting("megatron", tp=4))
    bytes_of = {name: value.bytes(2) for name, value in whole.members["layer"].values.items()}
    for text, name, begins, ends in (
        ("layer/mlp_gather pieces 4", "mlp_gather.2of4", 0, bytes_of["mlp_gather.out"] // 4),
        ("layer/mlp_gather mesh 2x2 order 0,1", "mlp_gather.s1", 0, 0),
        ("layer/mlp_gather mesh 2x2 order 0,1", "mlp_gather.s2", 0, bytes_of["mlp_gather.out"]),
        ("layer/mlp_scatter mesh 2x2 order 1,0", "mlp_scatter.s1", bytes_of["mlp_out.out"], 0),
        (
            "layer/mlp_scatter pieces 2",
            "mlp_scatter.1of2",
            bytes_of["mlp_out.out"] // 2,
            bytes_of["mlp_scatter.out"] // 2,
        ),
    ):
        layer = partitioned(whole.members["layer"], 4, text)
        costs = [
            with_piece_costs(replace(whole.profile, copy_ns_per_byte=rate), [layer]) for rate in (0.0, 1.0)
        ]
        key = f"layer/{name}"
        assert costs[1].solo_ns[key] - costs[0].solo_ns[key] == begins + ends, text
        assert costs[1].issue_ns.get(key, 0) == begins, text
        assert costs[1].take_ns.get(key, 0) == ends, text


@given(cuts(MESHES))
@settings(max_examples=12)
def test_every_cut_layer_is_priced(case: Cut) -> None:
    """By a model of a cluster of two nodes, and from what was measured of whole operators there."""
    tp = case.tp
    meshes = {one.mesh for one in case.found if one.mesh}
    if tp == 2 or len(meshes - {(2, tp // 2)}) > 0:
        case = replace(case, partitions=tuple(text for text in case.partitions if "mesh" not in text))
    model = replace(SHAPES[case.family], layers=2)
    own = setting_for("megatron", ParallelLayout(tp=tp), 2, model=model, recompute=case.recompute)
    cut = replace(own, partitions=case.found)
    spec = cluster(nodes=2, gpus=tp // 2)
    whole = modelled(spec)(own)
    for bench in (modelled(spec)(cut), modelled(spec, whole.profile)(cut)):
        outcome = lowered(bench, Choices())
        assert outcome.step_ns > 0
        moved = [op for one in bench.members.values() for op in one.forward.operators if op.kind.communicates]
        assert all(bench.profile.solo(op.key) > 0 for op in moved)
        spans = {span.operator for span in outcome.simulation.spans()}
        assert {op.own_name for op in bench.members["layer"].forward.operators} <= spans
