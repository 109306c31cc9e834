"""``overlap.memory_slack``: schedules that are found for speed keep within a bound of activations."""

import pytest

from braid.actors.config import parse_config
from braid.actors.controller.planning import model_graphs, plan_run
from braid.scheduling.cost.analytic import analytic_profile
from tests.end_to_end.command import overlap_of
from tests.scheduling.plans import cluster

pytestmark = pytest.mark.slow


def activations(schedule: str, slack: float | None) -> int:
    """Of the schedule that is found, on the stage that holds most, beside a link about as slow as compute."""
    config = parse_config(
        {
            "model": {"hidden": 256, "layers": 4, "heads": 4, "sequence": 64},
            "train": {"global_batch": 8, "micro_batch": 1},
            "parallel": {"tp": 2},
            "overlap": overlap_of(schedule, memory_slack=slack),
        }
    )
    shape, spec = config.model.shape(256), cluster(gpus=2, intra=2e9)
    profile = analytic_profile(spec, config.layout(), model_graphs(config, shape), 4)
    memory = plan_run(config, shape, profile).taken.simulation.memory
    return max(rank.activation_bytes for rank in memory)


def test_a_bound_is_kept() -> None:
    alone, free = activations("megatron", None), activations("braid:w", None)
    assert free > 1.3 * alone, "without a bound, units of layers hold more: there is something to bound"
    bounded = [activations("braid:w", slack) for slack in (0.15, 0.4)]
    assert bounded[0] <= 1.15 * alone
    assert bounded[0] < bounded[1] <= 1.4 * alone, "what is allowed is used where that is quicker"
