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
    BlockSize,
    problem_from_profile,
    read_block_profile,
)
from tests.papers.oases import DEVICES, PUBLISHED, USABLE_BYTES
from tests.scheduling.test_tensor_degrees import fully_recomputed

PUBLIC = Path(__file__).parents[3] / "shared/data/rtx3090_tmp_profile.csv"
"""The public profile of an RTX 3090 cluster, beside the checkout where somebody put it."""
GIB = 2**30


@cache
def public_profile() -> BlockProfile:
    """The public RTX 3090 profile, where somebody put it beside the checkout."""
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


def made_up_profile() -> BlockProfile:
    """Costs that tell degree and batch: forward is batch x 1000 / degree, and so on."""

    def costs(degree: int, batch: int) -> BlockCosts:
        share = 1000 * batch // degree
        return BlockCosts(
            forward_ns=(share, 2 * share),
            backward_ns=(3 * share, 4 * share),
            collective_ns=64 * 8 * 4 * batch if degree > 1 else 0,
            runtime_bytes=100 * batch,
        )

    sizes = [BlockSize(64, degree, batch) for degree in (1, 2, 4) for batch in (1, 2, 3, 4, 6, 8, 12)]
    return BlockProfile("made up", 8, 4, {size: costs(size.degree, size.batch) for size in sizes})


def made_up_problem(global_batch: int) -> DegreeProblem:
    """Three layers on the made-up profile and four ranks."""
    sizes = {"hidden": 64, "layers": 3, "devices": 4, "global_batch": global_batch}
    return problem_from_profile(made_up_profile(), **sizes, memory_limit_bytes=GIB)


def test_a_degree_sets_the_batch_and_its_halves() -> None:
    problem = made_up_problem(12)
    assert [option.degree for option in problem.options] == [1, 2, 4]
    one, two, four = problem.options
    # 4 ranks, 12 samples: a replica of degree 1 has 3 of them, 2 + 1; of degree 2 has 6; of degree 4 has 12.
    assert one.forward[0].compute_ns == (2000, 1000)
    assert one.backward[0].compute_ns == (2000 + 6000, 1000 + 3000)
    assert one.forward[0].collective_ns == (0, 0)
    assert two.forward[1].compute_ns == (3000, 3000)
    assert four.backward[1].compute_ns == (3000 + 6000, 3000 + 6000)
    message = 8 * 64 * 4
    assert four.backward[1].collective_ns == (6 * message, 6 * message)
    saved, states = [2 * 3 * message, 2 * 6 * message, 2 * 12 * message], 12 * 64 * 64 * 16
    resident = [states // t + kept for t, kept in zip((1, 2, 4), saved, strict=True)]
    assert [o.resident_bytes for o in problem.options] == resident
    assert [o.runtime_bytes for o in problem.options] == [300, 600, 1200]
    # 1 ns per byte of all-reduce, hence 1/2 per byte gathered; half of a replica's samples are elsewhere.
    assert problem.gather_ns[1, 2] == pytest.approx(3 * message / 2, abs=2)
    assert problem.gather_ns[2, 4] == pytest.approx(6 * message / 2, abs=2)
    assert problem.gather_ns[1, 4] == pytest.approx(9 * message / 2, abs=2)


def real_problem(*sizes: int, degrees: Sequence[int] | None = None) -> DegreeProblem:
    """A problem on the public profile."""
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
