"""How many failures a run puts up with, against a plain account of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.actors.config import FailureConfig
from braid.actors.controller.ranks.failures import Interruptions, RestartBudget, SpikeError
from braid.actors.controller.ranks.group import WorkerError


@pytest.mark.parametrize("most", [0, 1, 3])
def test_failures_at_one_place_end_the_run(most: int) -> None:
    """However many steps are repeated in between."""
    budget = RestartBudget(most, refill_steps=5)
    for step in range(1, 101):
        budget.step_done(step)
    failures = 0
    while budget.spend():
        failures += 1
        assert failures <= most, "repeated steps give nothing back"
        for step in range(50, 101):
            budget.step_done(step)
    assert failures == most


def test_a_month_with_a_failure_now_and_then_goes_on() -> None:
    budget = RestartBudget(3, refill_steps=100)
    for step in range(1, 100_001):
        budget.step_done(step)
        if step % 150 == 0:
            assert budget.spend(), f"{step // 150} failures, never more than two near each other"


def test_without_a_bound_none_is_the_last() -> None:
    budget = RestartBudget(-1, refill_steps=1)
    assert all(budget.spend() for _ in range(1000))
    assert str(budget) == "1000"


@given(st.integers(1, 4), st.integers(1, 5), st.lists(st.booleans(), max_size=60))
def test_never_more_than_there_are(most: int, refill: int, events: list[bool]) -> None:
    """Of any run of events, failures are at most what there was and what good steps gave back."""
    budget = RestartBudget(most, refill)
    step = put_up_with = 0
    for failure in events:
        if failure:
            put_up_with += budget.spend()
        else:
            step += 1
            budget.step_done(step)
        assert 0 <= budget.spent <= most
        assert put_up_with <= most + step // refill


def test_tries_of_a_recovery_and_spikes_have_counts_of_their_own() -> None:
    interruptions = Interruptions(FailureConfig(max_restarts=2))
    lost, spike = WorkerError(0, "its process ended"), SpikeError(0, "the loss is high")
    assert [interruptions.goes_on_after(lost) for _ in range(6)] == [True] * 5 + [False], (
        "tries of one recovery"
    )
    assert interruptions.budget.spent == 1
    assert all(interruptions.goes_on_after(spike) for _ in range(10))
    assert interruptions.budget.spent == 1
    for going_on in (True, False):
        assert interruptions.step_done(0, now=0.0) == []
        assert interruptions.goes_on_after(lost) == going_on
