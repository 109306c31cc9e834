"""Layer tier: equation 1 by hand, the choice, and how far the formula is from streams."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.scheduling.operators import Stream
from braid.scheduling.planner.layer import (
    BackwardCosts,
    LayerDecision,
    Priority,
    activation_first_ns,
    backward_tasks,
    decide_priority,
    weight_first_ns,
)
from braid.scheduling.planner.operation import Task
from braid.scheduling.records import from_mapping, to_mapping

times = st.integers(0, 50)
links = st.sampled_from((Stream.INTRA, Stream.INTER))
layers = st.builds(
    BackwardCosts,
    weight_gather_ns=times,
    activation_gather_ns=times,
    activation_gradient_ns=times,
    weight_gradient_ns=times,
    activation_scatter_ns=times,
    weight_scatter_ns=times,
    others_ns=times,
    weight_stream=links,
    activation_stream=links,
)


def costs(*values: int) -> BackwardCosts:
    """W_AG, act_AG, G_act, G_w, act_RS, G_w_RS, others."""
    names = [task.name for task in TASKS]
    return BackwardCosts(**{f"{name}_ns": value for name, value in zip(names, values, strict=True)})


TASKS = (
    Task(name="weight_gather", stream=Stream.INTER, ns=1),
    Task(name="activation_gather", stream=Stream.INTRA, ns=2),
    Task(name="activation_gradient", stream=Stream.COMPUTE, ns=4, after=("weight_gather",)),
    Task(name="weight_gradient", stream=Stream.COMPUTE, ns=8, after=("activation_gather",)),
    Task(name="activation_scatter", stream=Stream.INTRA, ns=16, after=("activation_gradient",)),
    Task(name="weight_scatter", stream=Stream.INTER, ns=32, after=("weight_gradient",)),
    Task(name="others", stream=Stream.COMPUTE, ns=64, after=("activation_scatter",)),
)


def test_equation_1_by_hand() -> None:
    c = costs(1, 2, 4, 8, 16, 32, 64)
    assert backward_tasks(c) == TASKS
    assert activation_first_ns(c) == 1 + max(4, 2) + max(8, 16) + max(32, 64)
    assert weight_first_ns(c) == 2 + max(8, 1) + max(4, 32) + 16 + 64


def test_tensor_parallelism_alone_computes_the_activation_gradient_first() -> None:
    decision = decide_priority(costs(0, 10, 20, 20, 15, 0, 5))
    assert decision.priority is Priority.ACTIVATION
    assert (decision.ns, decision.runner_up_ns) == (20 + 20 + 5, 10 + 20 + 20 + 15 + 5)


def test_sharded_parameters_alone_compute_the_weight_gradient_first() -> None:
    decision = decide_priority(costs(18, 0, 20, 20, 0, 18, 5))
    assert decision.priority is Priority.WEIGHT
    assert (decision.ns, decision.runner_up_ns) == (20 + 20 + 5, 18 + 20 + 20 + 18)
    assert decision.simulated_ns == decision.best_ns == 45
    assert decision.formula_excess == 0


@given(layers)
def test_the_cheaper_formula_is_chosen_and_its_decision_is_data(c: BackwardCosts) -> None:
    decision = decide_priority(c)
    assert decision.ns == min(decision.activation_first_ns, decision.weight_first_ns)
    assert decision.runner_up_ns == max(decision.activation_first_ns, decision.weight_first_ns)
    assert from_mapping(LayerDecision, to_mapping(decision), "layer") == decision


@given(layers)
def test_formula_is_a_timeline_with_barriers(c: BackwardCosts) -> None:
    decision = decide_priority(c)
    assert decision.simulated_activation_first_ns <= decision.activation_first_ns
    assert decision.simulated_weight_first_ns <= decision.weight_first_ns
    assert decision.formula_excess >= 0


@given(layers)
def test_best_order_is_the_longest_path_or_more(c: BackwardCosts) -> None:
    decision = decide_priority(c)
    compute = c.activation_gradient_ns + c.weight_gradient_ns + c.others_ns
    weights = c.weight_gather_ns + c.weight_scatter_ns
    path = c.weight_gather_ns + c.activation_gradient_ns + c.activation_scatter_ns + c.others_ns
    other = c.activation_gather_ns + c.weight_gradient_ns + c.weight_scatter_ns
    assert max(compute, weights, path, other) <= decision.best_ns
    best = min(decision.simulated_activation_first_ns, decision.simulated_weight_first_ns)
    assert decision.best_ns == best
    assert sorted(decision.best_order) == sorted(task.name for task in backward_tasks(c))


def test_formula_serialises_what_streams_overlap() -> None:
    # The two gathers use different links, but equation 1 starts the second when the first has ended.
    decision = decide_priority(costs(30, 30, 10, 10, 0, 0, 0))
    assert decision.ns == 30 + 30 + 10
    assert decision.best_ns == 30 + 10 + 10


def test_wrong_costs_are_named() -> None:
    with pytest.raises(ValueError, match="weight_gather_ns=-1"):
        costs(-1, 0, 0, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="weight_stream=compute must be intra or inter"):
        BackwardCosts(**(vars(costs(*range(7))) | {"weight_stream": Stream.COMPUTE}))
