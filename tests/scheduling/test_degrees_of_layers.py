"""A tensor-parallel degree for every layer: factors of the mesh, kinds of layers, sums of gradients."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.mesh.mesh import beyond, tensor_axis
from braid.scheduling.model.layers import built_in_parts
from braid.scheduling.model.operators import Kind
from braid.scheduling.model.sizes import PartSizes
from braid.scheduling.schedule.buckets import buckets_of
from braid.scheduling.text.pattern import base_kind, own_degree
from tests.scheduling.cases import LLAMA

MICRO_BATCH = 8
MODEL = replace(LLAMA, layers=4)
CHAINS = ((1, 2), (1, 3), (2, 4), (1, 2, 4), (2, 6), (1, 3, 6), (1, 2, 4, 8), (2,))


@st.composite
def layouts(draw: st.DrawFn) -> ParallelLayout:
    tp = draw(st.sampled_from([2, 4, 8, 6]))
    chain = draw(st.sampled_from([own for own in CHAINS if tp % own[-1] == 0]))
    degrees = draw(st.lists(st.sampled_from(chain), min_size=4, max_size=4))
    dp, pp = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]))
    return ParallelLayout(tp=tp, dp=dp, pp=pp, tensor_degrees=tuple(degrees))


@given(layouts())
def test_layers_are_cut_over_neighbours(layout: ParallelLayout) -> None:
    """Groups of a degree are runs of ranks; those beyond it have one rank of each."""
    mesh = layout.mesh
    assert mesh.ranks == layout.ranks
    assert mesh.size(mesh.factors_of("tp")) == layout.tp
    for degree in layout.own_degrees:
        inner, outer = mesh.factors_of(tensor_axis(degree)), mesh.factors_of(beyond(degree))
        assert mesh.size(inner) == degree
        assert mesh.size(outer) == layout.tp // degree
        assert {*inner, *outer} == {*mesh.factors_of("tp")}
        for group in mesh.groups(inner):
            assert group == list(range(group[0], group[0] + degree))
            assert group[0] % degree == 0


@given(layouts())
def test_every_gradient_is_summed_over_the_ranks_that_hold_the_same(layout: ParallelLayout) -> None:
    kinds = layout.kinds(MODEL.kinds)
    buckets = buckets_of(built_in_parts(PartSizes(MODEL, layout, MICRO_BATCH)), layout, kinds)
    for chunk in range(layout.chunks):
        axes = buckets.axes(chunk)
        for layer in layout.layers_of(chunk, 4):
            degree = own_degree(kinds[layer]) or layout.tp
            assert degree == layout.tensor_degrees[layer] if layout.tensor_degrees else layout.tp
            if degree < layout.tp:
                assert beyond(degree) in axes


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_a_layer_of_another_degree_takes_the_same_tokens(degree: int) -> None:
    """So nothing has to be moved between layers: its groups have samples of their own, in the same order."""
    layout = ParallelLayout(tp=4, tensor_degrees=(4, degree, degree, 4))
    sizes = PartSizes(MODEL, layout, MICRO_BATCH)
    parts = built_in_parts(sizes)
    kind = layout.kinds(("layer",) * 4)[1]
    part, whole = parts[kind], parts["layer"]
    assert base_kind(kind) == "layer"
    assert part.values["x"].elements == whole.values["x"].elements
    assert part.values[part.output].elements == whole.values[whole.output].elements
    gathers = [op for op in part.forward.operators if op.kind is Kind.ALL_GATHER]
    assert all(op.axis == sizes.of_kind(kind).tensor_axis for op in gathers)
    assert bool(gathers) == (degree > 1)
    assert sum(op.flops for op in part.forward.operators) == sum(op.flops for op in whole.forward.operators)
    sent, all_sent = (sum(op.bytes for op in one.forward.operators) for one in (part, whole))
    assert sent * 3 == all_sent * (degree - 1)
    held = part.parameters.dense - (part.parameters.whole if degree > 1 else 0)
    assert (held > whole.parameters.dense) == (degree < 4)


@pytest.mark.parametrize(
    ("tp", "degrees", "says"),
    [
        (4, (4, 3), "3 does not divide 4"),
        (6, (2, 3), "2 does not divide 3"),
        (2, (4, 2), "4 does not divide 2"),
    ],
)
def test_degrees_that_do_not_nest_are_refused(tp: int, degrees: tuple[int, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ParallelLayout(tp=tp, tensor_degrees=degrees)


def test_equal_degrees_are_the_layouts_own() -> None:
    assert ParallelLayout(tp=4, tensor_degrees=(4, 4)) == ParallelLayout(tp=4)
