"""A tensor-parallel degree for every layer: FLOPs and bytes, and degrees that do not nest."""

from dataclasses import replace

import pytest

from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.layers import built_in_parts
from braid.scheduling.model.operators import Kind
from braid.scheduling.model.sizes import PartSizes
from braid.scheduling.text.pattern import base_kind
from tests.scheduling.cases import LLAMA

MICRO_BATCH = 8
MODEL = replace(LLAMA, layers=4)


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
