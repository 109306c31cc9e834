"""Model tier: equation 2 against brute force, its constraints, and the two radical schedules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.scheduling.planner.model import LaunchCosts, LaunchDecision, decide_launch
from braid.scheduling.records import from_mapping, to_mapping

GB = 10**9


def costs(**changes: int) -> LaunchCosts:
    """Figure 7: four stages, 16 micro-batches, weights that take eight of them to hide."""
    values = {
        "gather_ns": 80,
        "scatter_ns": 160,
        "forward_ns": 10,
        "backward_ns": 20,
        "activation_bytes": GB,
        "free_bytes": 20 * GB,
        "micro_batches": 16,
        "stages": 4,
    }
    return LaunchCosts(**(values | changes))


def test_figure_7() -> None:
    decision = decide_launch(costs())
    assert (decision.launch.forward, decision.launch.backward) == (8, 8)
    assert (decision.launch.exposed_ns, decision.launch.peak_bytes) == (0, 8 * GB)
    assert (decision.depth_first.exposed_ns, decision.depth_first.peak_bytes) == (40 + 80, 4 * GB)
    assert (decision.breadth_first.exposed_ns, decision.breadth_first.peak_bytes) == (0, 16 * GB)
    assert not decision.breadth_first.fits
    assert decision.runner_up is not None
    assert decision.runner_up.exposed_ns > 0


def test_memory_limits_what_is_launched_together() -> None:
    decision = decide_launch(costs(free_bytes=6 * GB))
    assert (decision.launch.forward, decision.launch.backward) == (6, 6)
    assert decision.launch.exposed_ns == 20 + 40


times = st.integers(0, 60)


@given(
    st.builds(
        LaunchCosts,
        gather_ns=times,
        scatter_ns=times,
        forward_ns=times,
        backward_ns=times,
        activation_bytes=st.integers(1, 5),
        free_bytes=st.integers(5, 40),
        micro_batches=st.integers(2, 12),
        stages=st.integers(1, 4),
    )
)
def test_equals_brute_force(given_costs: LaunchCosts) -> None:
    c = given_costs
    allowed = {
        (one, two): max(c.gather_ns - one * c.forward_ns, 0) + max(c.scatter_ns - two * c.backward_ns, 0)
        for one in range(1, 13)
        for two in range(1, 13)
        if one * c.activation_bytes <= c.free_bytes
        and two * c.activation_bytes <= c.free_bytes
        and one + two <= c.micro_batches
    }
    decision = decide_launch(c)
    best = decision.launch
    assert best.exposed_ns == allowed[best.forward, best.backward] == min(allowed.values())
    equal = [max(pair) for pair, ns in allowed.items() if ns == best.exposed_ns]
    assert max(best.forward, best.backward) == min(equal)
    second = decision.runner_up
    assert (second is None) == (len(allowed) == 1)
    if second is not None:
        rest = [ns for pair, ns in allowed.items() if pair != (best.forward, best.backward)]
        assert second.exposed_ns == allowed[second.forward, second.backward] == min(rest)
    assert from_mapping(LaunchDecision, to_mapping(decision), "launch") == decision


def test_too_little_memory_names_the_bytes_missing() -> None:
    with pytest.raises(ValueError, match=r"250000000 more than the 750000000.*lower train.micro_batch"):
        decide_launch(costs(free_bytes=3 * GB // 4))


def test_one_micro_batch_cannot_be_divided() -> None:
    with pytest.raises(ValueError, match=r"micro_batches=1 must be at least 2.*train.global_batch"):
        decide_launch(costs(micro_batches=1))
