"""How many failures a run puts up with, against a plain account of them."""

from hypothesis import given
from hypothesis import strategies as st

from braid.actors.config import FailureConfig
from braid.actors.controller.ranks.failures import Interruptions, RestartBudget, SpikeError
from braid.actors.controller.ranks.group import WorkerError


@given(st.integers(-1, 4), st.integers(1, 5), st.lists(st.integers(-1, 12), max_size=60))
def test_failures_are_tolerated_as_new_steps_give_them_back(
    most: int, refill: int, events: list[int]
) -> None:
    """Failures (-1) and steps: repeated steps give nothing back, and good steps count from the last failure
    that was tolerated."""
    budget = RestartBudget(most, refill)
    left, good, furthest = most, 0, 0
    for event in events:
        if event < 0:
            assert budget.spend() == (left != 0)
            if left != 0:
                left, good = left - 1, 0
        else:
            budget.step_done(event)
            if event > furthest:
                furthest, good = event, good + 1
                if good >= refill and left != most:
                    left, good = left + 1, 0
        assert budget.spent == most - left
    assert str(budget) == (f"{most - left} of {most}" if most >= 0 else f"{most - left}")


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
