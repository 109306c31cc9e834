"""Beam search: valid orders, and near the best of small pairs."""

import os
import random
from statistics import median

import pytest

from braid.scheduling.planner.beam import beam_order
from braid.scheduling.planner.list_schedule import exact_order, improved, issue_ns
from tests.scheduling.pairing_cases import made_up_problem

SEEDS = [int(os.environ["BRAID_TEST_SEED"]) + number for number in range(40)]


@pytest.mark.parametrize("seed", SEEDS)
def test_orders_are_valid_and_priced_as_the_machine_prices_them(seed: int) -> None:
    problem = made_up_problem(random.Random(seed), (3, 9))
    found = beam_order(problem)
    assert sorted(found.operators) == list(range(len(problem.forward) + len(problem.backward)))
    assert issue_ns(problem, found.operators) == pytest.approx(found.ns)
    assert found.ns >= problem.lower_bound_ns * (1 - 1e-9)
    better = improved(problem, found.operators, found.ns)
    assert better.ns <= found.ns


def test_small_pairs_are_ordered_about_as_well_as_can_be() -> None:
    """Of 800 problems the median was optimal, 99.1 % were within 5 %; 4 of 40 beyond that are no accident."""
    ratios = []
    for seed in SEEDS:
        problem = made_up_problem(random.Random(seed), (3, 5))
        found = beam_order(problem)
        ratios.append(improved(problem, found.operators, found.ns).ns / exact_order(problem).ns)
    assert sum(ratio <= 1.05 for ratio in ratios) > 0.9 * len(ratios), max(ratios)
    assert median(ratios) <= 1.001
