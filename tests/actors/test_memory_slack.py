"""``overlap.memory_slack``: schedules that are found for speed keep within a bound of activations."""

import functools

import pytest

from braid.actors.config import Config, ConfigError, ParallelConfig, TrainConfig, parse_config
from braid.actors.controller.planning import model_graphs, plan_run
from braid.scheduling.analytic import analytic_profile
from braid.scheduling.planner.decide import Outcome
from braid.scheduling.profile import Profile
from braid.scheduling.setting import Setting
from tests.end_to_end.command import overlap_of
from tests.scheduling.plans import cluster

pytestmark = pytest.mark.slow

VOCABULARY = 256


def configured(schedule: str, slack: float | None) -> Config:
    return parse_config(
        {
            "model": {"hidden": 256, "layers": 4, "heads": 4, "sequence": 64},
            "train": {"global_batch": 8, "micro_batch": 1},
            "parallel": {"tp": 2},
            "overlap": overlap_of(schedule, memory_slack=slack),
        }
    )


def profile_of(config: Config) -> Profile:
    """A link that takes about as long as compute."""
    parts = model_graphs(config, config.model.shape(VOCABULARY))
    return analytic_profile(cluster(gpus=2, intra=2e9), config.layout(), parts, 4)


@functools.cache
def activations(schedule: str, slack: float | None) -> int:
    """What the schedule that is found holds at most."""
    config = configured(schedule, slack)
    return held(plan_run(config, config.model.shape(VOCABULARY), profile_of(config)).taken)


def held(outcome: Outcome) -> int:
    """Activations of the stage that holds most."""
    return max(rank.activation_bytes for rank in outcome.simulation.memory)


def test_a_bound_is_kept() -> None:
    alone, free = activations("megatron", None), activations("braid", None)
    assert free > 1.3 * alone, "without a bound, units of layers hold more: there is something to bound"
    bounded = [activations("braid", slack) for slack in (0.15, 0.4)]
    assert bounded[0] <= 1.15 * alone
    assert bounded[0] < bounded[1] <= 1.4 * alone, "what is allowed is used where that is quicker"


@pytest.mark.thorough
def test_what_cannot_be_kept_is_approached() -> None:
    least = activations("braid", 0.0)
    assert activations("megatron", None) < least < activations("braid", None)


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"overlap.memory_slack"):
        configured("braid", -0.1)


def chosen(slack: float | None) -> tuple[str, str, float]:
    """Schedule and pipeline that `auto` takes on two stages with a slow link; activations over megatron's."""
    config = parse_config(
        {
            "model": {"hidden": 128, "layers": 4, "heads": 4, "sequence": 64},
            "train": {"global_batch": 8, "micro_batch": 1},
            "parallel": {"pp": 2},
            "overlap": {"schedule": "auto", "memory_slack": slack},
        }
    )
    shape = config.model.shape(VOCABULARY)
    parts = model_graphs(config, shape)
    profile = analytic_profile(cluster(nodes=2, gpus=1, inter=2e8), config.layout(), parts, 4)
    planned = plan_run(config, shape, profile)
    setting = planned.taken.setting
    return setting.schedule, setting.pipeline, held(planned.taken) / held(planned.serial) - 1


def test_messages_get_the_slots_that_the_link_needs() -> None:
    """``braid:eager_w`` looks further ahead over a slow link; where messages cost nothing it holds little."""

    def setting(inter: float, slack: float | None = None) -> Setting:
        config = configured("braid:eager_w", slack).model_copy(
            update={"parallel": ParallelConfig(pp=2), "train": TrainConfig(global_batch=12, micro_batch=1)}
        )
        shape = config.model.shape(VOCABULARY)
        parts = model_graphs(config, shape)
        profile = analytic_profile(cluster(nodes=2, gpus=1, inter=inter), config.layout(), parts, 4)
        return plan_run(config, shape, profile).taken.setting

    slow = 5e8
    assert setting(slow).hop > 2
    assert setting(slow, 0.0).hop == 2, "further ahead is more memory"


@pytest.mark.thorough
def test_the_schedule_that_is_chosen_keeps_the_bound() -> None:
    name, pipeline, more = chosen(None)
    assert pipeline in ("eager_1f1b", "eager_w"), "a message has to travel while something else runs"
    assert name in ("megatron", "braid")
    assert more > 0.1
    assert chosen(0.1)[2] <= 0.1
