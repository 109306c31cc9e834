"""What is said of repeated measurements."""

import random

import pytest

from braid.jobs.benchmarks.cases import Spread


@pytest.mark.parametrize("count", [6, 9, 25, 150])
def test_the_median_lies_where_it_is_said_to(count: int) -> None:
    draws = 1500
    inside = 0
    for _ in range(draws):
        spread = Spread.of([random.expovariate(1.0) for _ in range(count)])
        assert spread.median_from <= spread.median <= spread.median_to
        inside += spread.median_from <= 0.6931 <= spread.median_to
    assert inside / draws > 0.925, "95 % and four standard errors"


def test_few_measurements_say_no_more_than_their_extremes() -> None:
    spread = Spread.of([3.0, 1.0, 2.0])
    assert (spread.median_from, spread.median, spread.median_to) == (1.0, 2.0, 3.0)
