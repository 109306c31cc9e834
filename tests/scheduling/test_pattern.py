"""Models whose layers are of several kinds: patterns, parameters and FLOPs, programs where kinds meet."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.scheduling.cost.analytic import analytic_profile
from braid.scheduling.generate.named import ScheduleName
from braid.scheduling.generate.setting import Setting
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.flops import model_flops
from braid.scheduling.model.layers import built_in_parts
from braid.scheduling.model.shape import ModelShape, Workload
from braid.scheduling.model.sizes import PartSizes
from braid.scheduling.model.units import chunk_parameters, chunk_parts
from braid.scheduling.plan.decide import Outcome, decide, modelled, within
from braid.scheduling.plan.space import PART_BY_PART
from braid.scheduling.schedule.operations import PassKind
from braid.scheduling.schedule.rounds import rounds
from braid.scheduling.schedule.schedule import Block
from braid.scheduling.schedule.text import parse, write
from braid.scheduling.text.pattern import is_layer, kinds_of, pattern_of
from tests.scheduling.cases import LLAMA, exists, layout_for
from tests.scheduling.plans import cluster

MOE = replace(LLAMA, family="moe", experts=4, top_k=2, pattern="dense 3*layer")
"""Experts in three of four layers."""
PATTERNS = st.lists(st.sampled_from(["layer", "wide", "x_2"]), min_size=1, max_size=8).map(tuple)


# -- patterns ------------------------------------------------------------------------------------------------


@given(PATTERNS, st.integers(1, 4))
def test_a_pattern_is_repeated_and_as_short_as_it_can_be(kinds: tuple[str, ...], times: int) -> None:
    text = pattern_of(kinds * times)
    assert (
        kinds_of(text, len(kinds) * times) == kinds_of(" ".join(kinds), len(kinds) * times) == kinds * times
    )
    assert pattern_of(kinds) == text == replace(LLAMA, layers=len(kinds), pattern=text).pattern
    assert len(kinds_of(text, len(kinds))) == len(kinds)


@pytest.mark.parametrize(
    ("pattern", "short"),
    [("4*layer", "layer"), ("layer  layer", "layer"), ("2*wide wide layer", "3*wide layer")],
)
def test_equal_models_have_equal_patterns(pattern: str, short: str) -> None:
    assert replace(LLAMA, pattern=pattern).pattern == short


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("", r"model\.pattern='' has no layers; name their kinds"),
        ("2*layer wide", r"'2\*layer wide' of 3 layers .* model\.layers=8; set model\.layers to 6 or 9"),
        ("9*layer", r"of 9 layers does not repeat evenly to model\.layers=8; set model\.layers to 9"),
        ("layer head", r"'layer head': 'head' is another part"),
        ("embedding", r"'embedding' is another part"),
        ("0*layer", r"'0\*layer' must be NAME or NUMBER\*NAME"),
        ("2 * layer", r"'2' must be NAME or NUMBER\*NAME"),
        ("layer+wide", r"'layer\+wide' must be NAME"),
        ("lay/er", r"'lay/er' must be NAME"),
        ("schön", r"'schön' must be NAME"),
    ],
)
def test_what_is_no_pattern_is_refused(pattern: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(LLAMA, pattern=pattern)


def test_layers_that_are_not_built_in_are_refused() -> None:
    for shape, known in ((replace(LLAMA, pattern="layer dense"), "layer"), (MOE, "layer, dense")):
        other = replace(shape, pattern="layer wide") if shape.experts else shape
        with pytest.raises(ValueError, match=rf"is no built-in layer of the family .*those are {known}$"):
            built_in_parts(PartSizes(other, ParallelLayout(), 1))


# -- sizes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["layer", "dense", "dense 3*layer", "layer dense"])
@pytest.mark.parametrize("shape", [MOE, replace(MOE, expert_ffn=40, shared_experts=2, experts=8, top_k=3)])
def test_parameters_and_flops_are_those_of_the_graphs(shape: ModelShape, pattern: str) -> None:
    shape, layout = replace(shape, pattern=pattern), ParallelLayout()
    parts = built_in_parts(PartSizes(shape, layout, 1))
    assert chunk_parameters(parts, layout, shape.kinds, 0).total == shape.parameters()
    names = [name for name, _ in chunk_parts(layout, shape.kinds, 0)]
    forward = sum(parts[name].evaluation.flops for name in names)
    assert model_flops(shape, shape.sequence) == 3 * forward
    assert [name for name in names if is_layer(name)] == list(shape.kinds)


# -- schedules -----------------------------------------------------------------------------------------------


def outcome_of(
    name: str, pp: int, unit_layers: int = 0, shape: ModelShape = MOE, micro_batches: int = 8
) -> Outcome:
    """A schedule of the model on slow links, two ranks a tensor-parallel group."""
    layout = layout_for(name, pp, tp=2)
    workload = Workload(global_batch=2 * micro_batches, micro_batch=2)
    named = ScheduleName.parse(name)._asdict()
    setting = Setting(model=shape, layout=layout, workload=workload, unit_layers=unit_layers, **named)
    spec = cluster(gpus=layout.ranks, intra=1e8)
    return decide([setting], modelled(spec), within(spec.usable_bytes), PART_BY_PART)[0]


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("name", ["dhelix", "braid:w", "braid:v"])
def test_layers_that_meet_run_together_whatever_their_kinds(name: str, pp: int) -> None:
    """In a paired block a layer goes by itself only where the other pass has none left."""
    assert exists(name, pp, 8)
    code = outcome_of(name, pp).code
    schedule, kinds = code.schedule, MOE.kinds
    assert parse(write(schedule)) == schedule
    of, met = rounds(schedule, code.layout, kinds), set()
    for block in (i for stage in schedule.stages for i in stage if isinstance(i, Block)):
        movers = [one for one in block.passes if one.kind is not PassKind.END]
        if len(movers) == 2 and {one.kind for one in movers} == {PassKind.FORWARD, PassKind.BACKWARD}:
            together = [sides for sides in of(block) if len(sides) == 2]
            held = [len(code.layout.layers_of(one.chunk, len(kinds))) for one in movers]
            assert len(together) == min(held)
            met |= set(together)
    assert met
    assert {side.unit for sides in met for side in sides} == set(kinds)
    programs = {tuple(side for side in sides if side.kind is not PassKind.END) for sides in schedule.programs}
    paired = {sides for sides in programs if [side.kind.value for side in sides] == ["F", "B"]}
    assert paired == met, "and no program is there for nothing"


def test_operators_are_told_with_their_kind_where_there_are_several() -> None:
    spec, layout = cluster(gpus=2), ParallelLayout(tp=2)

    def names(shape: ModelShape) -> set[str]:
        parts = built_in_parts(PartSizes(shape, layout, 1))
        return set(analytic_profile(spec, layout, parts).layer_operators.values())

    assert "qkv" in names(LLAMA)
    assert {"dense/qkv", "layer/qkv", "layer/router"} <= names(MOE)
    assert not any(name.startswith(("embedding", "head")) for name in names(LLAMA))
