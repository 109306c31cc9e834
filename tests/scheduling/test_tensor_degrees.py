"""The tensor-degree planner against brute force, and against equations worked by hand."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.scheduling.lowering.recompute import RECOMPUTE_POLICIES
from braid.scheduling.planner.degree_problem import (
    MEMORY_UNIT_BYTES,
    DegreeCosts,
    DegreeProblem,
    LayerChoice,
    PassCosts,
)
from braid.scheduling.planner.tensor_degrees import (
    describe_degrees,
    plan_degrees,
    strategy_cost,
    strategy_memory_bytes,
    uniform,
)

GIB = 2**30


def fully_recomputed(degrees: Sequence[int]) -> tuple[LayerChoice, ...]:
    """Layers of these degrees, all of which recompute everything, as in Oases."""
    return tuple(map(LayerChoice, degrees))


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


@given(problems() | problems(4, 3, 3) | problems(8, 2))
@settings(deadline=None, max_examples=200)
def test_the_plan_is_the_best_strategy(problem: DegreeProblem) -> None:
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
