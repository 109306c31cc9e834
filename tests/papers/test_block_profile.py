"""Measured block costs, and the choice of degrees that follows from them, also on the public profile."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from braid.scheduling.plan.tensor_degrees import (
    DegreeProblem,
    plan_degrees,
    strategy_cost,
    strategy_memory_bytes,
)
from tests.papers.block_profile import (
    HEADER,
    NOT_RUN,
    BlockCosts,
    BlockProfile,
    problem_from_profile,
    read_block_profile,
)
from tests.papers.oases import DEVICES, PUBLISHED, USABLE_BYTES
from tests.scheduling.test_tensor_degrees import fully_recomputed

PUBLIC = Path(__file__).parents[3] / "shared/data/rtx3090_tmp_profile.csv"
"""The public profile of an RTX 3090 cluster, beside the checkout where somebody put it."""


@cache
def public_profile() -> BlockProfile:
    if not PUBLIC.exists():
        pytest.skip(f"the public RTX 3090 profile is not at {PUBLIC} and not the project's to ship")
    return read_block_profile(PUBLIC)


@pytest.mark.parametrize(("latency", "rate"), [(0.0, 0.01), (5.0, 0.5)])
def test_a_profile_is_read_and_its_collectives_fitted(tmp_path: Path, latency: float, rate: float) -> None:
    """Collectives on a straight line over their messages; a group of one has none; one size was not run."""
    rows = [",".join(HEADER), f"1024,4,1{f',{NOT_RUN}' * 6}"]
    for hidden, batch in ((h, b) for h in (1024, 2048) for b in (1, 2, 4, 8)):
        time = latency + batch * hidden * 1024 * 4 / 2**20 * rate
        rows += [f"{hidden},2,{batch},1,2,3,4,{time:.9f},5", f"{hidden},1,{batch},1,2,3,4,999,5"]
    (tmp_path / "profile.csv").write_text("\n".join(rows), encoding="utf-8")
    profile = read_block_profile(tmp_path / "profile.csv")
    one, (fitted_latency, fitted_rate) = profile.costs(1024, 1, 8), profile.fit_all_reduce()
    times = {"forward_ns": (10**6, 3 * 10**6), "backward_ns": (2 * 10**6, 4 * 10**6)}
    assert one == BlockCosts(**times, collective_ns=0, runtime_bytes=5 * 2**20)
    assert {size.degree for size in profile.measured} == {1, 2}
    assert fitted_latency == pytest.approx(latency * 1e6, rel=1e-3, abs=50)
    assert fitted_rate == pytest.approx(rate * 1e6 / 2**20, rel=1e-3)


def real_problem(*sizes: int, degrees: Sequence[int] | None = None) -> DegreeProblem:
    names = ("hidden", "layers", "devices", "global_batch", "memory_limit_bytes")
    return problem_from_profile(public_profile(), **dict(zip(names, sizes, strict=True)), degrees=degrees)


def test_the_published_strategies_are_not_beaten_by_more_than_they_claim() -> None:
    """Table II: on its own degrees, the plan is at least as good, and like it for LLaMA-7B."""
    for model in (model for model in PUBLISHED if model.strategy):
        sizes = (model.hidden, model.layers, DEVICES, model.global_batch)
        problem = real_problem(*sizes, USABLE_BYTES, degrees=(2, 4))
        plan, theirs = plan_degrees(problem), fully_recomputed(model.strategy)
        single = strategy_cost(problem, fully_recomputed((4,) * model.layers))
        assert strategy_memory_bytes(problem, theirs) <= problem.memory_limit_bytes
        assert strategy_cost(problem, plan) <= strategy_cost(problem, theirs) < single
    llama = real_problem(4096, 16, DEVICES, 32, USABLE_BYTES)
    degrees = [choice.degree for choice in plan_degrees(llama)]
    assert set(degrees) == {2, 4}, "memory forbids degree 2 everywhere, communication degree 4"
    assert degrees == sorted(degrees), "one change, from the smaller to the larger"
