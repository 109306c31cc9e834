"""Collectives in stages and pieces: the same data flow, the same work, the same saved values."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.scheduling.layers import layer_part
from braid.scheduling.lowering.beside import operators_beside
from braid.scheduling.lowering.lower import Choices, scheduled_parts, training_schedule
from braid.scheduling.lowering.partitions import (
    WAYS,
    cut_gemms,
    mega_scale,
    with_partitions,
)
from braid.scheduling.lowering.recompute import RECOMPUTE_POLICIES
from braid.scheduling.operators import Graph, Part, Piece, Stream
from braid.scheduling.partition import Partition, Span, parse_partition
from braid.scheduling.planner.decide import Outcome, evaluate, modelled
from braid.scheduling.planner.strands import joint_problem
from braid.scheduling.profile import Profile, TransferFit, with_piece_costs
from braid.scheduling.schedule import Barrier, PassKind, Schedule, Side, Start
from braid.scheduling.schedule_text import parse, write
from braid.scheduling.sizes import PartSizes
from braid.scheduling.spec import ModelShape, ParallelLayout
from braid.scheduling.units import joined
from braid.scheduling.validate import ScheduleError, linked
from tests.scheduling.cases import (
    GPT,
    LLAMA,
    MICRO_BATCH,
    TOKENS,
    choices_for,
    layout_for,
    model_parts,
    parts_for,
    setting_for,
)
from tests.scheduling.partition_cases import collectives_of, partition_of
from tests.scheduling.plans import SMALL, cluster, lowered, setting
from tests.scheduling.who_has_what import check_cut

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
SHAPES = {"llama": replace(LLAMA, kv_heads=8), "gpt": GPT}
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


def cut_of(graph: Graph) -> set[str]:
    """Operators that a graph has pieces of."""
    return {op.piece.whole for op in graph.operators if op.piece is not None}


def names_of(graph: Graph) -> list[str]:
    """The operators' names in their order."""
    return [op.name for op in graph.operators]


# -- any partition -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A layer and how it is cut; texts, so that what fails can be read."""

    shape: str
    tp: int
    recompute: str
    partitions: tuple[str, ...]

    @property
    def found(self) -> tuple[Partition, ...]:
        """The partitions."""
        return tuple(map(parse_partition, self.partitions))


@st.composite
def cases(draw: st.DrawFn, kinds_alone: bool = False) -> Case:
    """Partitions of some of a layer's collectives, each its own, or (``kinds_alone``) of all of a kind."""
    tp = draw(st.sampled_from([*MESHES]))
    shape, recompute = draw(st.sampled_from([*SHAPES])), draw(st.sampled_from(RECOMPUTE_POLICIES))
    found: list[Partition] = []
    for graph, op in collectives_of(model_parts(SHAPES[shape], tp, recompute)["layer"]):
        what = f"tp/{op.kind.value}" if kinds_alone else f"layer/{op.name}"
        if draw(st.booleans()) or any(one.what == what for one in found):
            continue
        most = 2 if kinds_alone else len(operators_beside(graph, op, 2))
        own = partition_of(what, op.kind, MESHES[tp], most)
        found.append(draw(own.filter(lambda one: one.dim == "width" or one.pieces <= TOKENS // tp)))
    return Case(shape, tp, recompute, tuple(map(str, found)))


@given(cases())
@settings(max_examples=150)
def test_a_cut_layer_computes_what_the_whole_one_does(case: Case) -> None:
    """All that `check_cut` demands, of every collective and of every operator beside one."""
    part = model_parts(SHAPES[case.shape], case.tp, case.recompute)["layer"]
    cut = partitioned(part, case.tp, *case.partitions)
    assert (cut == part) == (not case.partitions)
    check_cut(part, cut)


@given(cases(kinds_alone=True))
@settings(max_examples=50)
def test_all_of_a_kind_are_cut_alike(case: Case) -> None:
    part = model_parts(SHAPES[case.shape], case.tp, case.recompute)["layer"]
    cut = partitioned(part, case.tp, *case.partitions)
    check_cut(part, cut)
    wanted = {one.what.partition("/")[2]: one for one in case.found}
    for before, after in ((part.forward, cut.forward), (part.backward, cut.backward)):
        for op in before.operators:
            how = wanted.get(op.kind.value)
            beside = operators_beside(before, op, 1) if how is not None else []
            assert (op.name in cut_of(after)) >= (op.kind.communicates and bool(beside))
            if how is not None and not how.operators:
                assert op.name in cut_of(after)


LOWERED = ("megatron", "intra_batch", "wavelet", "dhelix", "zbv", "braid:w", "braid:twins")


@given(cases(), st.sampled_from(LOWERED), st.integers(1, 2), st.integers(1, 3), st.sampled_from([0, 2]))
@settings(max_examples=40)
def test_schedules_of_cut_layers_are_valid_and_round_trip(
    case: Case, name: str, stages: int, micro_batches: int, unit_layers: int
) -> None:
    layout = layout_for(name, stages, case.tp)
    own = setting_for(
        name,
        layout,
        micro_batches,
        model=replace(SHAPES[case.shape], layers=4),
        recompute=case.recompute,
        partitions=case.found,
        unit_layers=unit_layers if name.startswith("braid") else 0,
    )
    parts = parts_for(own)
    schedule = training_schedule(own, parts, choices_for(own))
    assert schedule.partitions == case.found
    linked(schedule, layout, own.model.kinds, parts)
    assert parse(write(schedule)) == schedule


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("first", "again"),
    [
        ("mesh 2x2 order 0,1", "mesh 2x2 order 1,0"),
        ("mesh 2x2 order 0,1", "mesh 2x2 order 1,0,1 delivered of tokens with 1"),
        ("pieces 2 of tokens with 1", "pieces 2 of width with 1"),
        ("pieces 2", ""),
        ("", "pieces 2"),
    ],
)
def test_what_is_gathered_again_may_be_cut_in_another_way(shape: str, first: str, again: str) -> None:
    """Although it makes values of the same names."""
    part = model_parts(SHAPES[shape], 4, "full")["layer"]
    texts = []
    for name in ("attention_gather", "mlp_gather"):
        part.forward.named(name)
        part.backward.named(f"{name}.again")
        texts += [f"layer/{name} {first}"] if first else []
        texts += [f"layer/{name}.again {again}"] if again else []
    check_cut(part, partitioned(part, 4, *texts))


# -- what is cut, and into what ------------------------------------------------------------------------------


@LAYERS
@pytest.mark.parametrize("ways", [1, 2, 4, 3])
def test_layers_of_all_kinds_in_pieces(layer: Part, ways: int) -> None:
    """Pieces of tokens: so many of each that is cut, the others as they were."""
    cut = with_partitions({"layer": layer}, mega_scale(ways), ParallelLayout(tp=2, cp=2, ep=2))["layer"]
    check_cut(layer, cut)
    assert (cut == layer) == (ways == 1)
    for graph in (cut.forward, cut.backward):
        for name in cut_of(graph):
            numbers = [op.piece.number for op in graph.operators if op.piece and op.piece.whole == name]
            assert numbers == [*range(1, ways + 1)]


def test_what_is_cut_of_a_layer() -> None:
    """Gathers go ahead of their GEMM's pieces; scatters follow theirs, in turns."""
    layer = model_parts(LLAMA, 2)["layer"]
    cut = in_pieces(layer, 2)
    assert names_of(cut.forward) == [
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
    assert cut_of(cut.backward) == {
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
    check_cut(layer, cut)


def test_stages_of_a_piece_go_beside_those_of_the_next() -> None:
    """And what is between nodes is on another stream than what is inside."""
    layer = model_parts(LLAMA, 4)["layer"]
    cut = partitioned(
        layer,
        4,
        "layer/mlp_gather mesh 2x2 order 0,1 pieces 3 of tokens with 2",
        "layer/mlp_scatter mesh 2x2 order 1,0 pieces 2 of tokens with 1",
    )
    names = names_of(cut.forward)
    assert names[names.index("mlp_gather.s1.1of3") : names.index("mlp_residual")] == [
        "mlp_gather.s1.1of3",
        "mlp_gather.s1.2of3",
        "mlp_gather.s2.1of3",
        "mlp_gather.s1.3of3",
        "mlp_gather.s2.2of3",
        "mlp_gather.s2.3of3",
        "mlp_in.1of3",
        "activation.1of3",
        "mlp_in.2of3",
        "activation.2of3",
        "mlp_in.3of3",
        "activation.3of3",
        "mlp_out.1of2",
        "mlp_scatter.s1.1of2",
        "mlp_out.2of2",
        "mlp_scatter.s1.2of2",
        "mlp_scatter.s2.1of2",
        "mlp_scatter.s2.2of2",
    ]
    streams = {op.axis: op.stream for op in cut.forward.operators if op.kind.communicates and op.piece}
    assert streams == {"tp.2x2.0": layer.forward.named("mlp_gather").stream, "tp.2x2.1": Stream.INTRA}
    between = partitioned(replace_streams(layer, Stream.INTER), 4, "tp/all_gather mesh 2x2 order 0,1").forward
    assert between.named("mlp_gather.s1").stream is Stream.INTER
    assert between.named("mlp_gather.s2").stream is Stream.INTRA
    check_cut(layer, cut)


def replace_streams(layer: Part, stream: Stream) -> Part:
    """The layer with its collectives on one stream."""

    def moved(graph: Graph) -> Graph:
        return Graph(
            operators=tuple(
                replace(op, stream=stream) if op.kind.communicates else op for op in graph.operators
            )
        )

    return replace(layer, forward=moved(layer.forward), backward=moved(layer.backward))


@pytest.mark.parametrize(
    ("order", "fresh", "last"),
    [
        ("0,1", [("all", "own"), ("all", "others")], "mlp_gather.out"),
        ("1,0", [("own", "all"), ("others", "all")], "mlp_gather.out"),
        ("1,0,1", [("own", "all"), ("others", "own"), ("others", "others")], "mlp_gather.out.s3"),
    ],
)
def test_products_of_what_is_delivered(order: str, fresh: list[tuple[str, ...]], last: str) -> None:
    """One of what every stage has brought and none before it has."""
    layer = model_parts(LLAMA, 4)["layer"]
    cut = partitioned(layer, 4, f"layer/mlp_gather mesh 2x2 order {order} delivered of tokens with 1")
    count = len(fresh)
    made = [cut.values[f"mlp_in.out.{n}of{count}"].region for n in range(1, count + 1)]
    assert [one and one.spans for one in made] == [tuple(map(Span, spans)) for spans in fresh]
    reads = [cut.forward.named(f"mlp_in.{n}of{count}").reads for n in range(1, count + 1)]
    assert reads == [*((f"mlp_gather.out.s{n}",) for n in range(1, count)), (last,)]
    check_cut(layer, cut)


def test_products_of_columns_are_added_up() -> None:
    layer = model_parts(LLAMA, 2)["layer"]
    cut = partitioned(
        layer,
        2,
        "layer/mlp_gather pieces 3 of width with 1",
        "layer/mlp_scatter pieces 2 of width with 1",
    )
    gemms = [cut.forward.named(f"mlp_in.{n}of3") for n in (1, 2, 3)]
    assert [op.reads for op in gemms] == [
        ("mlp_gather.out.1of3",),
        ("mlp_gather.out.2of3", "mlp_in.out.1of3"),
        ("mlp_gather.out.3of3", "mlp_in.out.2of3"),
    ]
    assert [op.writes for op in gemms] == [("mlp_in.out.1of3",), ("mlp_in.out.2of3",), ("mlp_in.out",)]
    assert all(cut.values[f"mlp_in.out.{n}of3"].alias_of == "mlp_in.out" for n in (1, 2)), "in one memory"
    columns = [cut.values[f"mlp_out.out.{n}of2"].region for n in (1, 2)]
    assert [one and one.columns for one in columns] == [(1, 2), (2, 2)]
    check_cut(layer, cut)


def test_pieces_overlap_with_each_other() -> None:
    """Only the second piece of a GEMM behind a gather depends on the second piece of the gather."""
    cut = in_pieces(model_parts(LLAMA, 2)["layer"], 2)
    for first, second in (("attention_gather", "qkv"), ("projection", "attention_scatter")):
        for n in (1, 2):
            producer = cut.forward.named(f"{first}.{n}of2")
            assert set(cut.forward.named(f"{second}.{n}of2").reads) <= set(producer.writes)
    early = set(cut.forward.named("attention_scatter.1of2").reads)
    assert not early & set(cut.forward.named("projection.2of2").writes)


def test_what_nothing_else_reads_is_never_whole() -> None:
    """Pieces of a value have memory of their own then, and live no longer than their readers."""
    layer = model_parts(LLAMA, 2)["layer"]
    cut = partitioned(layer, 2, "layer/mlp_scatter pieces 2 of tokens with 2")
    made = {name for op in cut.forward.operators for name in op.writes}
    for value, whole in (("activation.out", True), ("mlp_out.out", False), ("mlp_scatter.out", True)):
        assert cut.values[f"{value}.1of2"].piece_of == (value if whole else None)
        assert (value in made) == whole
        assert f"{value}.2of2" in made


@pytest.mark.parametrize(
    ("text", "forward", "backward"),
    [
        ("layer/mlp_scatter pieces 4 of tokens with 1", {"mlp_out", "mlp_scatter"}, set()),
        ("layer/mlp_scatter pieces 4 of tokens with 2", {"activation", "mlp_out", "mlp_scatter"}, set()),
        ("layer/mlp_scatter pieces 4", {"mlp_scatter"}, set()),
        ("layer/mlp_scatter.grad pieces 4 of tokens with 1", set(), {"mlp_scatter.grad", "mlp_out.dgrad"}),
        (
            "tp/reduce_scatter pieces 4",
            {"attention_scatter", "mlp_scatter"},
            {"attention_gather.grad", "mlp_gather.grad"},
        ),
        ("dp/reduce_scatter mesh 2x2 order 0,1", set(), set()),
    ],
)
def test_only_the_chosen_collectives_are_cut(text: str, forward: set[str], backward: set[str]) -> None:
    layer = model_parts(LLAMA, 4)["layer"]
    cut = partitioned(layer, 4, text, dp=4, zero=1)
    assert (cut_of(cut.forward), cut_of(cut.backward)) == (forward, backward)
    if not backward:
        assert cut.backward == layer.backward
    if not forward:
        assert cut.forward == layer.forward


def test_a_collectives_own_partition_goes_before_that_of_its_kind() -> None:
    layer = model_parts(LLAMA, 4)["layer"]
    cut = partitioned(layer, 4, "tp/all_gather pieces 2", "layer/mlp_gather pieces 4")
    names = names_of(cut.forward)
    assert "mlp_gather.4of4" in names
    assert "mlp_gather.2of2" not in names
    assert "attention_gather.2of2" in names


def test_two_collectives_do_not_cut_one_operator() -> None:
    """The activation between two GEMMs belongs to the gather before it, where both could have it."""
    layer = model_parts(LLAMA, 2)["layer"]
    kinds = ("all_gather", "reduce_scatter")
    cut = partitioned(
        layer, 2, *(f"tp/{kind} pieces {n + 2} of tokens with 2" for n, kind in enumerate(kinds))
    )
    names = names_of(cut.forward)
    assert "activation.2of2" in names
    assert "activation.3of3" not in names
    assert "mlp_out.3of3" in names
    check_cut(layer, cut)


def test_other_parts_stay_whole() -> None:
    parts = dict(model_parts(LLAMA, 2))
    cut = with_partitions(parts, mega_scale(2), ParallelLayout(tp=2))
    assert cut["embedding"] == parts["embedding"]
    assert cut["head"] == parts["head"]
    assert cut["layer"] != parts["layer"]
    assert with_partitions(parts, (), ParallelLayout(tp=2)) == parts


def test_what_has_no_gemm_beside_it_stays_whole() -> None:
    """Where only operators are cut; else the transfer is."""
    single = model_parts(LLAMA, 1)["layer"]
    assert partitioned(single, 1, *map(str, mega_scale(4))) == single
    moe = layers()["moe"]
    layout = {"cp": 2, "ep": 2}
    cut = partitioned(moe, 2, "tp/all_gather pieces 2 of tokens with 1", **layout)
    assert not {"dispatch", "combine", "kv_gather", "expert_gather", "expert_in"} & cut_of(cut.forward)
    assert {"attention_gather", "qkv"} <= cut_of(cut.forward)
    alone = partitioned(moe, 2, "tp/all_gather pieces 2", **layout)
    assert "attention_gather" in cut_of(alone.forward)
    assert not {"expert_gather", "router_rows_tp"} & cut_of(alone.forward), "ranks have other numbers of rows"
    for one in (cut, alone):
        check_cut(moe, one)


def test_which_gemms_are_measured_in_pieces() -> None:
    """Those that a gather of the layer is before, whatever the partition."""
    layer = model_parts(LLAMA, 2)["layer"]
    assert cut_gemms(layer) == {"layer/qkv", "layer/mlp_in", "layer/mlp_out.dgrad", "layer/projection.dgrad"}
    assert not cut_gemms(model_parts(LLAMA, 1)["layer"])


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_operators_know_what_they_are_a_piece_of(recompute: str) -> None:
    """Also in a unit of several layers, and where they are computed again; the others are whole."""
    layer = model_parts(LLAMA, 2, recompute)["layer"]
    cut = in_pieces(layer, 4)
    for part in (cut, joined([cut, cut])):
        for op in (*part.forward.operators, *part.backward.operators):
            own, _, number = op.own_name.rpartition(".")
            if "of" not in number or not number.replace("of", "").isdigit():
                assert op.piece is None
                continue
            count = int(number.partition("of")[0])
            measured_as = own.removesuffix(".again")
            assert op.piece == Piece(own, count, 4, measured_as, pytest.approx(0.25))
            assert op.key == f"layer/{measured_as}.{number}"


# -- in schedules --------------------------------------------------------------------------------------------


def program_lines(schedule: Schedule, sides: str) -> list[str]:
    """A program as it reads in the schedule's text."""
    block = write(schedule).partition(f"program {sides}\n")[2].partition("\n\n")[0]
    return [line.strip() for line in block.splitlines()]


@pytest.mark.parametrize("ways", [2, 4, 5])
@pytest.mark.parametrize("recompute", RECOMPUTE_POLICIES)
def test_a_piece_is_on_its_way_beside_the_product_of_the_one_before(ways: int, recompute: str) -> None:
    layout = layout_for("intra_batch", 2, 2)
    case = setting_for("intra_batch", layout, 3, recompute=recompute, partitions=mega_scale(ways))
    parts = parts_for(case)
    schedule = training_schedule(case, parts)
    linked(schedule, layout, case.model.kinds, parts)
    texts = program_lines(schedule, "F:layer")
    begin = texts.index(f"start attention_gather.2of{ways} on intra")
    assert begin < texts.index(f"compute qkv.1of{ways}") < texts.index(f"wait attention_gather.2of{ways}")


def run_alone(schedule: str, partitions: Sequence[Partition], profile: Profile | None = None) -> Outcome:
    """A small setting, lowered and simulated with nothing decided."""
    bench = modelled(cluster(gpus=2), profile)(setting(schedule, tp=2, partitions=tuple(partitions)))
    return lowered(bench, Choices())


@pytest.mark.parametrize("ways", WAYS)
def test_a_schedule_says_how_collectives_are_cut(ways: int) -> None:
    schedule = run_alone("intra_batch", mega_scale(ways)).code.schedule
    assert f"\npartition tp/all_gather pieces {ways} of tokens with 1\n" in write(schedule)
    assert parse(write(schedule)) == schedule
    assert "partition" not in write(run_alone("megatron", ()).code.schedule)


CUT = {
    "attention_gather": "layer/attention_gather pieces {} of tokens with 1",
    "qkv": "layer/attention_gather pieces {} of tokens with 1",
    "mlp_scatter": "layer/mlp_scatter pieces {} of tokens with 1",
    "activation": "layer/mlp_gather pieces {} of tokens with 2",
}


@pytest.mark.parametrize("ways", [2, 4])
@pytest.mark.parametrize("operator", CUT)
def test_the_last_piece_comes_last(operator: str, ways: int) -> None:
    """It completes the whole value: with another piece still missing, readers of the whole would err."""
    layout = layout_for("intra_batch", 1, 2)
    how = (parse_partition(CUT[operator].format(ways)),)
    case = setting_for("intra_batch", layout, 2, partitions=how)
    parts = parts_for(case)
    assert parts == scheduled_parts(model_parts(LLAMA, 2), layout, LLAMA.kinds, partitions=how)
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
    if parts["layer"].forward.named(f"{operator}.1of{ways}").kind.communicates:
        program.insert(own[-2], program.pop(own[-1]))
    else:  # behind what it reads itself
        program.insert(own[-1], program.pop(own[-2]))
    changed = replace(schedule, programs={**schedule.programs, forward: tuple(program)})
    cause = f"{operator}.{ways}of{ways} needs {operator}.{ways - 1}of{ways}, which is not done yet"
    with pytest.raises(ScheduleError, match=cause):
        linked(changed, layout, LLAMA.kinds, parts)


@pytest.mark.parametrize("stage", ["s1.2of2", "s2.1of2"])
def test_all_stages_of_a_gather_are_over_before_what_reads_the_whole(stage: str) -> None:
    layout = layout_for("intra_batch", 1, 4)
    how = (parse_partition("layer/mlp_gather mesh 2x2 order 0,1 pieces 2"),)
    case = setting_for("intra_batch", layout, 2, partitions=how)
    parts = parts_for(case)
    schedule = training_schedule(case, parts)
    linked(schedule, layout, LLAMA.kinds, parts)
    forward = (Side(PassKind.FORWARD, "layer"),)
    lines = program_lines(schedule, "F:layer")
    program = [*schedule.programs[forward]]
    wait = program.pop(lines.index(f"wait mlp_gather.{stage}"))
    changed = replace(schedule, programs={**schedule.programs, forward: (*program, wait)})
    with pytest.raises(
        ScheduleError, match=rf"mlp_gather\.s2\.\dof2 needs mlp_gather\.{stage}, which is not done"
    ):
        linked(changed, layout, LLAMA.kinds, parts)


def test_pieces_need_not_be_equal() -> None:
    """Of 12 tokens on a rank 8 pieces can be made; of 4 the planner does not try so many."""
    model = replace(SMALL, sequence=24)
    for ways in WAYS:
        found = run_alone("intra_batch", mega_scale(ways)).bench.members["layer"]
        assert f"qkv.{ways}of{ways}" in names_of(found.forward)
    spec = cluster(gpus=2, intra=2e8)
    found = evaluate(setting("intra_batch", tp=2, model=model), spec)
    assert found.setting.partitions in [mega_scale(ways) for ways in WAYS]
    few = replace(SMALL, sequence=8)
    assert evaluate(setting("intra_batch", tp=2, model=few), spec).setting.partitions in (
        mega_scale(2),
        mega_scale(4),
    )


@pytest.mark.parametrize("forward", [False, True])
def test_passes_of_cut_layers_side_by_side_do_not_wait_for_each_others_pieces(forward: bool) -> None:
    """Two micro-batches, or a pass beside the end of the one before: a piece completes its own pass's value.

    Only what computes stands behind the same operator of the first pass: gradients are added up in order.
    """
    whole = modelled(cluster(gpus=2))(setting("megatron", tp=2))
    layer = in_pieces(whole.members["layer"], 4)
    graph = layer.forward if forward else layer.backward
    profile = with_piece_costs(whole.profile, [layer])
    alone = joint_problem([graph], profile).backward
    both = joint_problem([graph, graph], profile).backward
    count = len(alone)
    assert both.names[:count] == tuple(f"0:{name}" for name in names_of(graph))
    for n, op in enumerate(graph.operators):
        assert both.before[n] == alone.before[n]
        same = 0 if op.kind.communicates else 1 << n
        assert both.before[count + n] == alone.before[n] << count | same
    assert all(mask >> n == 0 for n, mask in enumerate(both.before))


# -- costs ---------------------------------------------------------------------------------------------------


def test_costs_of_pieces_follow_from_those_of_the_whole() -> None:
    """As a profile that was measured on whole operators has them."""
    whole = modelled(cluster(gpus=2))(setting("megatron", tp=2))
    layer = in_pieces(whole.members["layer"], 4)
    known = replace(whole.profile, copy_ns_per_byte=0.0)
    profile = with_piece_costs(known, [layer])
    assert profile.solo_ns["layer/qkv.3of4"] == pytest.approx(whole.profile.solo_ns["layer/qkv"] / 4, abs=1)
    assert profile.classes["layer/qkv.3of4"] == profile.classes["layer/qkv"]
    assert {k: v for k, v in profile.solo_ns.items() if "of4" not in k} == whole.profile.solo_ns
    gather = whole.profile.solo_ns["layer/attention_gather"]
    fit = TransferFit(latency_ns=gather / 2, ns_per_byte=1.0)
    slow = replace(known, transfers={**known.transfers, "tp/all_gather": fit})
    piece = with_piece_costs(slow, [layer]).solo_ns["layer/attention_gather.1of4"]
    assert piece == pytest.approx(gather / 2 + gather / 8, abs=1)
    assert with_piece_costs(profile, [layer]) == profile


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


def test_unequal_pieces_cost_what_they_have() -> None:
    """512 tokens of a rank in five pieces; the share of each is that of its tokens."""
    whole = modelled(cluster(gpus=2))(setting("megatron", tp=2))
    layer = in_pieces(whole.members["layer"], 5)
    profile = with_piece_costs(whole.profile, [layer])
    took = whole.profile.solo_ns["layer/mlp_in"]
    for n in range(5):
        tokens = (n + 1) * 512 // 5 - n * 512 // 5
        assert profile.solo_ns[f"layer/mlp_in.{n + 1}of5"] == pytest.approx(took * tokens / 512, abs=1)


def test_a_gemm_that_was_measured_in_pieces_costs_what_it_did() -> None:
    """With the copies of its rows; pieces that are not equal follow from the whole."""
    whole = modelled(cluster(gpus=2))(setting("megatron", tp=2))
    took = whole.profile.solo_ns["layer/qkv"]
    measured = {f"layer/qkv.1of{ways}": took for ways in (3, 4)}
    known = replace(whole.profile, solo_ns=whole.profile.solo_ns | measured)
    equal = with_piece_costs(known, [in_pieces(whole.members["layer"], 4)])
    assert [equal.solo_ns[f"layer/qkv.{n}of4"] for n in (1, 2, 3, 4)] == [took] * 4
    few = in_pieces(
        modelled(cluster(gpus=2))(setting("megatron", tp=2, model=replace(SMALL, sequence=8))).members[
            "layer"
        ],
        3,
    )
    unequal = with_piece_costs(known, [few])
    assert [unequal.solo_ns[f"layer/qkv.{n}of3"] for n in (1, 2, 3)] == [
        pytest.approx(took * share, abs=1) for share in (0.25, 0.25, 0.5)
    ]


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize(
    ("order", "sizes"), [("0,1", (1 / 2, 1)), ("1,0", (1 / 2, 1)), ("1,0,1", (1 / 2, 1 / 2, 1 / 2))]
)
def test_stages_cost_what_transfers_along_their_factor_do(
    width: int, order: str, sizes: tuple[float, ...]
) -> None:
    """Of the tensor that the ranks of a stage have together; classes are those of their streams."""
    whole = modelled(cluster(nodes=2, gpus=2))(setting("megatron", tp=4))
    fits = {
        "tp.2x2.0/all_gather": TransferFit(latency_ns=1000.0, ns_per_byte=2.0),
        "tp.2x2.1/all_gather": TransferFit(latency_ns=2000.0, ns_per_byte=3.0),
    }
    known = replace(whole.profile, transfers=whole.profile.transfers | fits, copy_ns_per_byte=0.0)
    layer = partitioned(whole.members["layer"], 4, f"layer/mlp_gather mesh 2x2 order {order}")
    profile = with_piece_costs(known, [layer], width)
    payload = 1024 * 1024 * width  # tokens x hidden
    for n, (dim, size) in enumerate(zip(map(int, order.split(",")), sizes, strict=True), start=1):
        key = f"layer/mlp_gather.s{n}"
        assert profile.solo_ns[key] == fits[f"tp.2x2.{dim}/all_gather"].ns(payload * size)
        assert profile.classes[key] == ("inter", "intra")[dim]


def test_a_measured_profile_prices_every_number_of_pieces() -> None:
    whole = modelled(cluster(gpus=2))(setting("megatron", tp=2))
    serial = run_alone("megatron", (), whole.profile).step_ns
    for ways in WAYS:
        assert run_alone("intra_batch", mega_scale(ways), whole.profile).step_ns < serial


@given(cases())
@settings(max_examples=25)
def test_every_cut_layer_is_priced(case: Case) -> None:
    """By a model of a cluster of two nodes, and from what was measured of whole operators there."""
    tp = case.tp
    meshes = {one.mesh for one in case.found if one.mesh}
    if tp == 2 or len(meshes - {(2, tp // 2)}) > 0:
        case = replace(case, partitions=tuple(text for text in case.partitions if "mesh" not in text))
    model = replace(SHAPES[case.shape], layers=2)
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
