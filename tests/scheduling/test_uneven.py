"""Costs of the fullest rank: the others wait while its experts take longer, and nothing else changes."""

from dataclasses import replace

import pytest

from braid.scheduling.cost.profile import Profile
from braid.scheduling.cost.uneven import of_fullest_rank
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.layers import built_in_parts
from braid.scheduling.model.operators import Part
from braid.scheduling.model.sizes import PartSizes
from tests.scheduling.cases import MOE

ON_ROWS = {"expert_order", "expert_in", "activation", "expert_out", "expert_return"}
"""Operators of a layer that compute on what came to a rank's experts, by hand."""


def parts_of(layout: ParallelLayout) -> dict[str, Part]:
    return dict(built_in_parts(PartSizes(MOE, layout, 1)))


def a_profile(parts: dict[str, Part], ratio: float) -> Profile:
    graphs = [graph for part in parts.values() for graph in (part.forward, part.backward)]
    keys = dict.fromkeys(op.key for graph in graphs for op in graph.operators)
    solo = {key: 1_000_000 + 1000 * place for place, key in enumerate(keys)}
    return Profile(source="made up", solo_ns=solo, expert_imbalance=ratio)


@pytest.mark.parametrize("layout", [ParallelLayout(dp=2, ep=2), ParallelLayout(dp=4, ep=4, tp=2)])
@pytest.mark.parametrize("ratio", [1.1, 1.25])
def test_experts_take_longer_and_the_serial_step_does_not(layout: ParallelLayout, ratio: float) -> None:
    parts = parts_of(layout)
    before = a_profile(parts, ratio)
    after = of_fullest_rank(before, parts)
    layer = parts["layer"]
    for graph in (layer.forward, layer.backward):
        changed = []
        for op in graph.operators:
            was, now = before.solo_ns[op.key], after.solo_ns[op.key]
            if op.axis is None and op.own_name.split(".")[0] in ON_ROWS:
                assert now == pytest.approx(was * ratio, abs=1)
                changed.append(op)
            elif op.axis is None:
                assert now == was, op.name
            else:
                assert now <= was
        assert changed
        total = [sum(costs.solo_ns[op.key] for op in graph.operators) for costs in (before, after)]
        assert total[1] == pytest.approx(total[0], abs=len(graph.operators))
    combine = layer.forward.named("combine")
    added = sum(before.solo_ns[op.key] for op in layer.forward.operators if op.own_name in ON_ROWS)
    if layout.tp == 1:
        expected = before.solo_ns[combine.key] - added * (ratio - 1)
        assert after.solo_ns[combine.key] == pytest.approx(max(0, expected), abs=1)


def test_even_rows_change_nothing() -> None:
    parts = parts_of(ParallelLayout(dp=2, ep=2))
    for ratio in (0.0, 1.0):
        profile = a_profile(parts, ratio)
        assert of_fullest_rank(profile, parts) is profile


def test_nothing_is_taken_from_transfers_that_were_measured_alone() -> None:
    parts = parts_of(ParallelLayout(dp=2, ep=2))
    before = replace(a_profile(parts, 1.25), transfers_alone=True)
    after = of_fullest_rank(before, parts)
    for op in (*parts["layer"].forward.operators, *parts["layer"].backward.operators):
        if op.axis is not None:
            assert after.solo_ns[op.key] == before.solo_ns[op.key]
    expert_in = parts["layer"].forward.named("expert_in").key
    assert after.solo_ns[expert_in] == pytest.approx(before.solo_ns[expert_in] * 1.25, abs=1)
