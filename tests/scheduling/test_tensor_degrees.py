"""The tensor-degree planner against brute force, and against equations worked by hand."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.scheduling.model.recompute import RECOMPUTE_POLICIES
from braid.scheduling.plan.tensor_degrees import (
    MEMORY_UNIT_BYTES,
    DegreeCosts,
    DegreeProblem,
    LayerChoice,
    PassCosts,
    plan_degrees,
    strategy_cost,
    strategy_memory_bytes,
)

GIB = 2**30


def fully_recomputed(degrees: Sequence[int]) -> tuple[LayerChoice, ...]:
    """Layers of these degrees, all of which recompute everything, as in Oases."""
    return tuple(map(LayerChoice, degrees))


def strategies(problem: DegreeProblem) -> Iterator[tuple[LayerChoice, ...]]:
    return product([option.choice for option in problem.options], repeat=problem.layers)


NS = st.integers(0, 2000)
BYTES = st.integers(0, 80 * MEMORY_UNIT_BYTES)


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
            resident_bytes=draw(BYTES),
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
    )
    some = st.tuples(*[st.sampled_from([option.choice for option in options])] * layers)
    limit = strategy_memory_bytes(problem, draw(some)) + draw(st.sampled_from((0, 1, 2**20, 2**24)))
    return replace(problem, memory_limit_bytes=limit)


def check_optimal(problem: DegreeProblem) -> None:
    """The plan fits and costs what the best of all strategies that fit costs."""
    plan = plan_degrees(problem)
    assert len(plan) == problem.layers
    assert strategy_memory_bytes(problem, plan) <= problem.memory_limit_bytes
    assert strategy_cost(problem, plan) == min(
        strategy_cost(problem, choices)
        for choices in strategies(problem)
        if strategy_memory_bytes(problem, choices) <= problem.memory_limit_bytes
    )


@given(problems() | problems(4, 3, 3) | problems(8, 2))
@settings(deadline=None, max_examples=200)
def test_the_plan_is_the_best_strategy(problem: DegreeProblem) -> None:
    check_optimal(problem)


@given(problems())
@settings(deadline=None)
def test_too_little_memory_says_how_much_would_do(problem: DegreeProblem) -> None:
    least = min(strategy_memory_bytes(problem, strategy) for strategy in strategies(problem))
    limit = least - 1
    with pytest.raises(ValueError, match=rf"{limit} is too little .*; raise it to {least}"):
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
        resident_bytes=12,
        runtime_bytes=degree * MEMORY_UNIT_BYTES,
    )


def small_problem() -> DegreeProblem:
    """Two layers of one block, compute-bound at degree 1, bound by communication at degree 4."""
    return DegreeProblem(
        layers=2,
        options=(one_block(1, 100, 10, 300, 20), one_block(4, 40, 90, 110, 95)),
        gather_ns={(1, 4): 1000},
        memory_limit_bytes=GIB,
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
