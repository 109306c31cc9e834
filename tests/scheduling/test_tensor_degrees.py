"""The tensor-degree planner against brute force, against equations worked by hand, and on a real profile."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.scheduling.block_profile import BlockCosts, BlockProfile, BlockSize, read_block_profile
from braid.scheduling.lowering.recompute import RECOMPUTE_POLICIES
from braid.scheduling.planner.degree_problem import (
    MEMORY_UNIT_BYTES,
    DegreeCosts,
    DegreeProblem,
    LayerChoice,
    PassCosts,
    fully_recomputed,
    problem_from_profile,
    replica_batch,
)
from braid.scheduling.planner.tensor_degrees import (
    describe_degrees,
    plan_degrees,
    strategy_cost,
    strategy_memory_bytes,
    uniform,
)

PUBLIC = Path(__file__).parents[3] / "shared/data/rtx3090_tmp_profile.csv"
GIB = 2**30


def brute_force(problem: DegreeProblem) -> tuple[int, tuple[LayerChoice, ...]]:
    """Cost and choices of the best strategy, found by looking at all; `ValueError` if none fits."""
    fitting = [
        (strategy_cost(problem, choices), choices)
        for choices in product(problem.choices, repeat=problem.layers)
        if strategy_memory_bytes(problem, choices) <= problem.memory_limit_bytes
    ]
    if not fitting:
        raise ValueError("nothing fits")
    return min(fitting)


RTX3090_BYTES = 24 * GIB * 95 // 100
"""What a planner may use of 24 GiB."""


@cache
def public_profile() -> BlockProfile:
    """The public RTX 3090 profile, where somebody put it beside the checkout."""
    if not PUBLIC.exists():
        pytest.skip(f"the public RTX 3090 profile is not at {PUBLIC} and not the project's to ship")
    return read_block_profile(PUBLIC)


NS = st.integers(0, 2000)
BYTES = st.integers(0, 40 * MEMORY_UNIT_BYTES)


@st.composite
def blocks(draw: st.DrawFn, count: int) -> tuple[PassCosts, ...]:
    """Blocks of a layer in one pass."""
    pair = st.tuples(NS, NS)
    return tuple(PassCosts(compute_ns=draw(pair), collective_ns=draw(pair)) for _ in range(count))


@st.composite
def problems(
    draw: st.DrawFn, most_layers: int = 5, most_degrees: int = 4, most_policies: int = 1
) -> DegreeProblem:
    """Any costs whatever, with a memory limit that some strategy meets, now and then to the byte."""
    layers, count = draw(st.integers(1, most_layers)), draw(st.integers(1, most_degrees))
    policies = RECOMPUTE_POLICIES[: draw(st.integers(1, most_policies))]
    options = tuple(
        DegreeCosts(
            degree=2**place,
            recompute=policy,
            forward=draw(blocks(draw(st.integers(1, 3)))),
            backward=draw(blocks(draw(st.integers(1, 3)))),
            state_bytes=draw(BYTES),
            saved_bytes=draw(BYTES),
            runtime_bytes=draw(BYTES),
            once_ns=draw(NS),
        )
        for place in range(count)
        for policy in policies
    )
    gathers = {(2**i, 2**j): draw(NS) for i, j in product(range(count), repeat=2) if i < j}
    problem = DegreeProblem(
        layers=layers,
        options=options,
        gather_ns=draw(st.sampled_from((gathers, None))),
        memory_limit_bytes=0,
        left_out={},
    )
    strategies = st.tuples(*[st.sampled_from(problem.choices)] * layers)
    limit = strategy_memory_bytes(problem, draw(strategies)) + draw(st.sampled_from((0, 1, 2**20, 2**24)))
    return replace(problem, memory_limit_bytes=limit)


def check_optimal(problem: DegreeProblem) -> None:
    """The plan costs what the best of all strategies costs, and says so truly."""
    best, _ = brute_force(problem)
    plan = plan_degrees(problem)
    assert plan.cost_ns == best == strategy_cost(problem, plan.choices)
    assert plan.memory_bytes == strategy_memory_bytes(problem, plan.choices) <= problem.memory_limit_bytes
    assert len(plan.degrees) == problem.layers


@given(problems())
@settings(deadline=None)
def test_the_plan_is_the_best_strategy(problem: DegreeProblem) -> None:
    check_optimal(problem)


@given(problems(most_layers=4, most_degrees=3, most_policies=3))
@settings(deadline=None, max_examples=30)
def test_the_plan_is_the_best_strategy_of_degrees_and_policies(problem: DegreeProblem) -> None:
    check_optimal(problem)


@given(problems(most_layers=4, most_degrees=3, most_policies=3), st.integers(5, 6), st.randoms())
@settings(deadline=None, max_examples=15)
def test_so_it_is_of_all_half_a_million_of_six_layers(
    problem: DegreeProblem, layers: int, random: random.Random
) -> None:
    """Costs of all strategies from those of one and of two layers, as a layer knows its neighbours alone."""
    several = replace(problem, layers=layers)
    single, pair = replace(problem, layers=1), replace(problem, layers=2)
    options = problem.choices
    one = np.array([strategy_cost(single, (choice,)) for choice in options])
    two = np.array([[strategy_cost(pair, (a, b)) for b in options] for a in options])
    at = np.array(list(product(range(len(options)), repeat=layers)), dtype=np.int8)
    cost = sum(two[at[:, k], at[:, k + 1]] for k in range(layers - 1)) - one[at[:, 1:-1]].sum(axis=1)
    units = np.array([(o.resident_units, o.runtime_units) for o in problem.options])[at]
    memory = (units[:, :, 0].sum(axis=1) + units[:, :, 1].max(axis=1)) * MEMORY_UNIT_BYTES
    limit = int(random.choice(memory))
    found = plan_degrees(replace(several, memory_limit_bytes=limit))
    assert found.cost_ns == cost[memory <= limit].min() == strategy_cost(several, found.choices)
    assert strategy_memory_bytes(several, found.choices) == found.memory_bytes <= limit


@given(problems(most_layers=8, most_degrees=2))
@settings(deadline=None)
def test_the_plan_is_the_best_strategy_of_many_layers(problem: DegreeProblem) -> None:
    check_optimal(problem)


@given(problems(most_layers=4))
@settings(deadline=None)
def test_uniform_is_the_best_of_the_uniform(problem: DegreeProblem) -> None:
    strategies = [(choice,) * problem.layers for choice in problem.choices]
    fitting = [s for s in strategies if strategy_memory_bytes(problem, s) <= problem.memory_limit_bytes]
    if not fitting:
        with pytest.raises(ValueError, match="bytes are missing"):
            uniform(problem)
        return
    found = uniform(problem)
    assert found.cost_ns == min(strategy_cost(problem, strategy) for strategy in fitting)
    assert (LayerChoice(found.degree, found.recompute),) * problem.layers in fitting
    assert plan_degrees(problem).cost_ns <= found.cost_ns


@given(problems(most_layers=4, most_degrees=3), st.integers(1, 2**26))
@settings(deadline=None)
def test_more_memory_never_costs_time(problem: DegreeProblem, more: int) -> None:
    roomy = replace(problem, memory_limit_bytes=problem.memory_limit_bytes + more)
    assert plan_degrees(roomy).cost_ns <= plan_degrees(problem).cost_ns


@given(problems())
@settings(deadline=None)
def test_too_little_memory_says_how_much_would_do(problem: DegreeProblem) -> None:
    strategies = product(problem.choices, repeat=problem.layers)
    least = min(strategy_memory_bytes(problem, strategy) for strategy in strategies)
    limit = least - 1
    with pytest.raises(
        ValueError, match=rf"{limit} is too little .* 1 bytes are missing; raise it to {least}"
    ):
        plan_degrees(replace(problem, memory_limit_bytes=limit))
    check_optimal(replace(problem, memory_limit_bytes=least))


def one_block(degree: int, d: int, c: int, backward_d: int, backward_c: int) -> DegreeCosts:
    """A layer of one block whose second sub-batch takes one more than the first."""
    return DegreeCosts(
        degree=degree,
        forward=(PassCosts(compute_ns=(d, d + 1), collective_ns=(c, c + 1)),),
        backward=(
            PassCosts(compute_ns=(backward_d, backward_d + 1), collective_ns=(backward_c, backward_c + 1)),
        ),
        state_bytes=5,
        saved_bytes=7,
        runtime_bytes=degree * MEMORY_UNIT_BYTES,
    )


def small_problem() -> DegreeProblem:
    """Two layers of one block, compute-bound at degree 1, bound by communication at degree 4."""
    return DegreeProblem(
        layers=2,
        options=(one_block(1, 100, 10, 300, 20), one_block(4, 40, 90, 110, 95)),
        gather_ns={(1, 4): 1000},
        memory_limit_bytes=GIB,
        left_out={},
    )


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        # forward: d0, then max(d1, c0) of both, max(d0, c1) between, c1 at the end; backward the same.
        ((1, 1), (100 + 101 + 100 + 101 + 11) + (300 + 301 + 300 + 301 + 21)),
        ((4, 4), (40 + 90 + 91 + 90 + 91) + (110 + 111 + 110 + 111 + 96)),
        # 1 -> 4 gathers forward: 1000, and c1 of layer 0 (11) and d0 of layer 1 (40) do not overlap.
        ((1, 4), (100 + 101 + 40 + 90 + 91) + (110 + 111 + 300 + 301 + 21) + 1000 + 11),
        # 4 -> 1 gathers backward: 1000, and c1 of layer 1 (21) and d0 of layer 0 (110) do not overlap.
        ((4, 1), (40 + 90 + 100 + 101 + 11) + (300 + 301 + 110 + 111 + 96) + 1000 + 21),
    ],
)
def test_the_equations_by_hand(degrees: tuple[int, int], expected: int) -> None:
    assert strategy_cost(small_problem(), fully_recomputed(degrees)) == expected


def test_memory_counts_all_layers_and_the_largest_buffers() -> None:
    problem = small_problem()
    assert strategy_memory_bytes(problem, fully_recomputed((1, 1))) == (2 + 1) * MEMORY_UNIT_BYTES
    one_four = fully_recomputed((1, 4))
    assert strategy_memory_bytes(problem, one_four[::-1]) == strategy_memory_bytes(problem, one_four)
    assert strategy_memory_bytes(problem, one_four) == (2 + 4) * MEMORY_UNIT_BYTES


def test_a_problem_that_is_none() -> None:
    problem = small_problem()
    with pytest.raises(ValueError, match="layers=0 must be at least 1"):
        replace(problem, layers=0)
    with pytest.raises(ValueError, match=r"no tensor-parallel degree is available \(degree 2: too big\)"):
        replace(problem, options=(), left_out={2: "too big"})
    with pytest.raises(ValueError, match="distinct and rising"):
        replace(problem, options=problem.options[::-1])
    with pytest.raises(ValueError, match="no cost between degrees 1 and 4"):
        replace(problem, gather_ns={})
    with pytest.raises(ValueError, match=r"degree 2 is not available .* choose from \(1, 4\)"):
        strategy_cost(problem, fully_recomputed((1, 2)))


@pytest.mark.parametrize(
    ("degrees", "text"),
    [((4,), "[4]x1"), ((2, 2, 4), "[2]x2+[4]x1"), ((2, 4, 2, 2), "[2]x1+[4]x1+[2]x2")],
)
def test_degrees_are_shown_in_runs(degrees: tuple[int, ...], text: str) -> None:
    assert describe_degrees(degrees) == text


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
    return BlockProfile(
        source="made up",
        sequence=8,
        activation_bytes=4,
        measured={size: costs(size.degree, size.batch) for size in sizes},
    )


def made_up_problem(
    *, devices: int = 4, global_batch: int = 12, degrees: Sequence[int] | None = None
) -> DegreeProblem:
    """Three layers on the made-up profile."""
    return problem_from_profile(
        made_up_profile(),
        hidden=64,
        layers=3,
        devices=devices,
        global_batch=global_batch,
        memory_limit_bytes=GIB,
        degrees=degrees,
    )


def test_a_degree_sets_the_batch_and_its_halves() -> None:
    problem = made_up_problem()
    assert problem.degrees == (1, 2, 4)
    one, two, four = problem.options
    # 4 ranks, 12 samples: a replica of degree 1 has 3 of them, 2 + 1; of degree 2 has 6; of degree 4 has 12.
    assert one.forward[0].compute_ns == (2000, 1000)
    assert one.backward[0].compute_ns == (2000 + 6000, 1000 + 3000)
    assert one.forward[0].collective_ns == (0, 0)
    assert two.forward[1].compute_ns == (3000, 3000)
    assert four.backward[1].compute_ns == (3000 + 6000, 3000 + 6000)
    message = 8 * 64 * 4
    assert four.backward[1].collective_ns == (6 * message, 6 * message)
    assert [o.saved_bytes for o in problem.options] == [2 * 3 * message, 2 * 6 * message, 2 * 12 * message]
    assert [o.state_bytes for o in problem.options] == [12 * 64 * 64 * 16 // t for t in (1, 2, 4)]
    assert [o.runtime_bytes for o in problem.options] == [300, 600, 1200]
    # 1 ns per byte of all-reduce, hence 1/2 per byte gathered; half of a replica's samples are elsewhere.
    assert problem.gather_ns[1, 2] == pytest.approx(3 * message / 2, abs=2)
    assert problem.gather_ns[2, 4] == pytest.approx(6 * message / 2, abs=2)
    assert problem.gather_ns[1, 4] == pytest.approx(9 * message / 2, abs=2)


def test_a_single_sample_overlaps_nothing() -> None:
    problem = made_up_problem(devices=4, global_batch=2)
    assert problem.degrees == (2, 4)
    two = problem.option(LayerChoice(2))
    assert [block.compute_ns for block in two.forward] == [(500, 0), (1000, 0)]
    work = 3 * sum(b.compute_ns[0] + b.collective_ns[0] for b in (*two.forward, *two.backward))
    assert strategy_cost(problem, fully_recomputed((2, 2, 2))) == work


def test_what_cannot_be_chosen_is_left_out_with_a_reason_or_refused_when_named() -> None:
    problem = made_up_problem(devices=8, global_batch=12)
    assert problem.degrees == (2, 4)
    assert "global_batch=12 does not divide over 8 replicas" in problem.left_out[1]
    assert "degree 8, batch 6 is not in the file" in problem.left_out[8]
    with pytest.raises(ValueError, match="degree 1: global_batch=12 does not divide over 8 replicas"):
        made_up_problem(devices=8, degrees=(1, 2))
    with pytest.raises(
        ValueError, match="degree 8: made up: hidden 64, degree 8, batch 6 is not in the file"
    ):
        made_up_problem(devices=8, degrees=(2, 8))
    with pytest.raises(ValueError, match="degree 3: the degree must be a power of two"):
        made_up_problem(devices=6, degrees=(3,))
    with pytest.raises(
        ValueError, match=r"no tensor-parallel degree is available \(degree 1: .* 16 replicas"
    ):
        made_up_problem(devices=16, global_batch=1)
    with pytest.raises(ValueError, match="devices=0 must be at least 1"):
        made_up_problem(devices=0)
    assert replica_batch(4, 32, 128) == 16


def real_problem(
    hidden: int,
    layers: int,
    devices: int,
    global_batch: int,
    limit: int,
    degrees: Sequence[int] | None = None,
) -> DegreeProblem:
    """A problem on the public profile."""
    return problem_from_profile(
        public_profile(),
        hidden=hidden,
        layers=layers,
        devices=devices,
        global_batch=global_batch,
        memory_limit_bytes=limit,
        degrees=degrees,
    )


def random_real_problem(draw: random.Random, layers: int, count: int) -> DegreeProblem:
    """A random size on the public profile, with a memory limit between the leanest and the largest."""
    while True:
        devices, per_device = draw.choice((4, 8, 16, 32)), draw.choice((1, 2, 4, 8))
        hidden = draw.choice((1024, 2048, 3072, 4096))
        try:
            problem = real_problem(hidden, layers, devices, devices * per_device // 2, GIB)
        except ValueError:
            continue
        if len(problem.options) < min(2, count):
            continue
        chosen = sorted(
            draw.sample(problem.options, min(count, len(problem.options))), key=lambda o: o.degree
        )
        problem = replace(problem, options=tuple(chosen))
        sizes = [strategy_memory_bytes(problem, (choice,) * layers) for choice in problem.choices]
        return replace(problem, memory_limit_bytes=draw.randint(min(sizes), max(sizes) + MEMORY_UNIT_BYTES))


@pytest.mark.parametrize("layers", range(1, 7))
def test_the_plan_is_the_best_on_the_real_profile(layers: int) -> None:
    seed = random.SystemRandom().randrange(2**32)
    draw = random.Random(seed)
    for case in range(6 if layers < 6 else 1):
        problem = random_real_problem(draw, layers, 4)
        try:
            check_optimal(problem)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, layers {layers}, case {case}: {problem}") from error


def test_the_plan_is_the_best_of_eight_layers_on_the_real_profile() -> None:
    problem = real_problem(4096, 8, 32, 32, 9 * GIB, (2, 4, 8))
    check_optimal(problem)
    assert len(set(plan_degrees(problem).degrees)) > 1, "the memory limit should force a mixture"


def test_the_published_strategies_are_not_beaten_by_more_than_they_claim() -> None:
    """Table II: on its own degrees, the plan is at least as good, and like it for LLaMA-7B."""
    published = {
        (2048, 24, 128): (2,) * 8 + (4,) * 16,
        (4096, 16, 32): (2,) * 10 + (4,) * 6,
    }
    for (hidden, layers, batch), strategy in published.items():
        problem = real_problem(hidden, layers, 32, batch, RTX3090_BYTES, (2, 4))
        plan, theirs = plan_degrees(problem), fully_recomputed(strategy)
        assert strategy_memory_bytes(problem, theirs) <= problem.memory_limit_bytes
        assert (
            plan.cost_ns
            <= strategy_cost(problem, theirs)
            < strategy_cost(problem, fully_recomputed((4,) * layers))
        )
    llama = plan_degrees(real_problem(4096, 16, 32, 32, RTX3090_BYTES))
    assert set(llama.degrees) == {2, 4}, "memory forbids degree 2 everywhere, communication degree 4"
    assert list(llama.degrees) == sorted(llama.degrees), (
        "one change of degree, from the smaller to the larger"
    )
    assert llama.uniform.degree == 4
