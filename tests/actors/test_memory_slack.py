"""``overlap.memory_slack``: schedules that are found for speed keep within a bound of activations."""

import functools
from typing import Any

import pytest

from braid.actors.config import Config, ConfigError, parse_config
from braid.actors.controller.planning import model_graphs, plan_run
from braid.scheduling.cost.analytic import analytic_profile
from braid.scheduling.mesh.cluster import ClusterSpec
from braid.scheduling.plan.decide import Outcome
from tests.end_to_end.command import overlap_of
from tests.scheduling.plans import cluster

pytestmark = pytest.mark.slow

VOCABULARY = 256


def configured(schedule: str, slack: float | None, hidden: int = 256, **sections: Any) -> Config:
    return parse_config(
        {
            "model": {"hidden": hidden, "layers": 4, "heads": 4, "sequence": 64},
            "train": {"global_batch": 8, "micro_batch": 1},
            "parallel": {"tp": 2},
            "overlap": overlap_of(schedule, memory_slack=slack),
            **sections,
        }
    )


def planned(config: Config, spec: ClusterSpec) -> Any:
    """A plan by modelled costs."""
    shape = config.model.shape(VOCABULARY)
    profile = analytic_profile(spec, config.layout(), model_graphs(config, shape), 4)
    return plan_run(config, shape, profile)


def apart(bytes_per_s: float) -> ClusterSpec:
    """Two nodes of one GPU."""
    return cluster(nodes=2, gpus=1, inter=bytes_per_s)


@functools.cache
def activations(schedule: str, slack: float | None) -> int:
    """What the schedule that is found holds at most, on a link that takes about as long as compute."""
    return held(planned(configured(schedule, slack), cluster(gpus=2, intra=2e9)).taken)


def held(outcome: Outcome) -> int:
    """Activations of the stage that holds most."""
    return max(rank.activation_bytes for rank in outcome.simulation.memory)


def test_a_bound_is_kept() -> None:
    alone, free = activations("megatron", None), activations("braid", None)
    assert free > 1.3 * alone, "without a bound, units of layers hold more: there is something to bound"
    bounded = [activations("braid", slack) for slack in (0.15, 0.4)]
    assert bounded[0] <= 1.15 * alone
    assert bounded[0] < bounded[1] <= 1.4 * alone, "what is allowed is used where that is quicker"


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"overlap.memory_slack"):
        configured("braid", -0.1)


def test_messages_get_the_slots_that_the_link_needs() -> None:
    """``braid:eager_w`` looks further ahead over a slow link; where messages cost nothing it holds little."""

    def hop(slack: float | None) -> int:
        train = {"global_batch": 12, "micro_batch": 1}
        config = configured("braid:eager_w", slack, parallel={"pp": 2}, train=train)
        return planned(config, apart(5e8)).taken.setting.hop

    assert hop(None) > 2
    assert hop(0.0) == 2, "further ahead is more memory"
