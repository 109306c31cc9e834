"""Profiles of experts at the imbalance that was asked for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from braid.actors.config import ConfigError, parse_config
from braid.actors.stage.uneven_routing import UnevenRouting
from braid.kernels.operators.router import Router
from braid.scheduling.layers import built_in_parts
from braid.scheduling.operators import Operator
from braid.scheduling.sizes import part_sizes
from braid.scheduling.spec import ModelShape, ParallelLayout
from tests.scheduling.cases import LLAMA

TOKENS, HIDDEN = 4000, 16


def of_experts(experts: int, top_k: int, ep: int, capacity: float = 0.0) -> tuple[Any, Operator]:
    """What there is of a rank's model, and the operator that routes."""
    fields = {name: getattr(LLAMA, name) for name in LLAMA.__dataclass_fields__}
    more = {"family": "moe", "experts": experts, "top_k": top_k, "capacity_factor": capacity}
    shape, layout = ModelShape(**{**fields, **more}), ParallelLayout(dp=ep, ep=ep)
    part = built_in_parts(part_sizes(shape, layout, 1))["layer"]
    model = SimpleNamespace(shape=shape, layout=layout, context=SimpleNamespace(device=torch.device("cpu")))
    return model, part.forward.named("router")


def routed(experts: int, top_k: int) -> tuple[torch.Tensor, ...]:
    router = Router(hidden=HIDDEN, experts=experts, top_k=top_k, normalised=True)
    torch.nn.init.normal_(router.weight)
    with torch.no_grad():
        return router(torch.randn(TOKENS, HIDDEN))


@pytest.mark.parametrize(("experts", "top_k", "ep"), [(8, 2, 2), (8, 2, 4), (16, 4, 4), (4, 1, 2)])
@pytest.mark.parametrize("imbalance", [1.0, 1.3, 1.7])
def test_the_fullest_rank_has_as_many_rows_as_asked(
    experts: int, top_k: int, ep: int, imbalance: float
) -> None:
    model, op = of_experts(experts, top_k, ep)
    uneven = UnevenRouting(model, imbalance, (), torch.Generator().manual_seed(3))
    gates, _, _, scores = results = routed(experts, top_k)
    found_gates, choice, counts, found_scores = uneven.of(op, results)
    assert found_gates is gates
    assert found_scores is scores
    assert choice.shape == (TOKENS, top_k)
    assert all(len(set(row)) == top_k for row in choice.tolist())
    assert counts.tolist() == torch.bincount(choice.flatten(), minlength=experts).tolist()
    rows = counts.view(ep, -1).sum(1) * ep / counts.sum()
    assert float(rows[0]) == pytest.approx(imbalance, rel=0.05)
    assert rows[1:].tolist() == pytest.approx([(ep - imbalance) / (ep - 1)] * (ep - 1), rel=0.15)


def test_without_a_wish_routers_choose() -> None:
    model, op = of_experts(8, 2, 2)
    uneven = UnevenRouting(model, None, (), torch.Generator())
    results = routed(8, 2)
    assert all(a is b for a, b in zip(uneven.of(op, results), results, strict=True))


def test_choices_of_a_run_come_back_by_turns() -> None:
    model, op = of_experts(8, 2, 2)
    choices = [routed(8, 2)[1] for _ in range(3)]
    uneven = UnevenRouting(model, None, choices, torch.Generator())
    results = routed(8, 2)
    for turn in range(5):
        gates, choice, counts, scores = uneven.of(op, results)
        assert choice is choices[turn % 3]
        assert counts.tolist() == torch.bincount(choice.flatten(), minlength=8).tolist()
        assert (gates, scores) == (results[0], results[3])


def test_rows_of_this_rank_are_told_pass_by_pass() -> None:
    model, _ = of_experts(8, 2, 2)
    part = built_in_parts(part_sizes(model.shape, model.layout, 1))["layer"]
    uneven = UnevenRouting(model, None, (), torch.Generator())
    for rows in ((3, 0, 4, 1), (2, 2, 2, 3)):
        told = (None, None, None, None, rows)
        assert uneven.of(part.forward.named("router_rows"), told) is told
    assert uneven.rows == [8, 9]


@pytest.mark.parametrize(("ep", "capacity"), [(1, 0.0), (2, 1.0)])
def test_where_ranks_have_as_many_rows_nothing_changes(ep: int, capacity: float) -> None:
    model, op = of_experts(8, 2, ep, capacity)
    uneven = UnevenRouting(model, None, (), torch.Generator())
    results = routed(8, 2)
    assert uneven.of(op, results) is results
    assert not uneven.rows


def test_more_than_all_rows_are_refused() -> None:
    model = {"family": "moe", "experts": 8, "top_k": 2, "hidden": 64, "heads": 2, "sequence": 32}
    content = {"model": model, "parallel": {"dp": 2, "ep": 2}, "overlap": {"expert_imbalance": 1.9}}
    parse_config(content).check(257)
    content["overlap"] = {"expert_imbalance": 2.0}
    with pytest.raises(ConfigError, match=r"overlap\.expert_imbalance=2 must be below parallel\.ep=2"):
        parse_config(content).check(257)
