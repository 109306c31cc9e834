"""Profiles of experts with the choices of a run."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from braid.actors.stage.model.routing import RepeatedRouting
from braid.kernels.operators.router import Router
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.layers import built_in_parts
from braid.scheduling.model.operators import Part
from braid.scheduling.model.sizes import PartSizes
from tests.scheduling.cases import LLAMA


def of_experts(ep: int, capacity: float = 0.0) -> tuple[Any, Part]:
    """What there is of a rank's model, and its layer."""
    shape = replace(LLAMA, family="moe", experts=8, top_k=2, capacity_factor=capacity)
    layout = ParallelLayout(dp=ep, ep=ep)
    part = built_in_parts(PartSizes(shape, layout, 1))["layer"]
    model = SimpleNamespace(shape=shape, layout=layout, context=SimpleNamespace(device=torch.device("cpu")))
    return model, part


def routed() -> tuple[torch.Tensor, ...]:
    router = Router(hidden=16, experts=8, top_k=2, normalised=True)
    torch.nn.init.normal_(router.weight)
    with torch.no_grad():
        return router(torch.randn(4000, 16))


def test_choices_of_a_run_come_back_by_turns() -> None:
    model, part = of_experts(2)
    choices = [routed()[1] for _ in range(3)]
    repeated, results = RepeatedRouting(model, choices), routed()
    for turn in range(5):
        gates, choice, counts, scores = repeated.of(part.forward.named("router"), results)
        assert choice is choices[turn % 3]
        assert counts.tolist() == torch.bincount(choice.flatten(), minlength=8).tolist()
        assert (gates, scores) == (results[0], results[3])


def test_rows_of_this_rank_are_told_pass_by_pass() -> None:
    model, part = of_experts(2)
    repeated = RepeatedRouting(model, ())
    for rows in ((3, 0, 4, 1), (2, 2, 2, 3)):
        told = (None, None, None, None, rows)
        assert repeated.of(part.forward.named("router_rows"), told) is told
    assert repeated.rows == [8, 9]


@pytest.mark.parametrize(("ep", "capacity", "choices"), [(1, 0.0, True), (2, 1.0, True), (2, 0.0, False)])
def test_routers_choose_where_ranks_have_as_many_rows_or_nothing_was_recorded(
    ep: int, capacity: float, choices: bool
) -> None:
    model, part = of_experts(ep, capacity)
    results = routed()
    repeated = RepeatedRouting(model, [results[1].clone()] * choices)
    assert repeated.of(part.forward.named("router"), results) is results
