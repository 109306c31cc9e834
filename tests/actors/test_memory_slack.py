"""``overlap.memory_slack``: schedules that are found for speed keep within a bound of activations."""

import functools

import pytest

from braid.actors.config import Config, ConfigError, ParallelConfig, TrainConfig, parse_config
from braid.actors.controller.planning import build_schedule, decide_run, model_graphs, rank_schedules
from braid.scheduling.analytic import analytic_profile
from braid.scheduling.lowering.lower import scheduled_parts
from braid.scheduling.memory import rank_memory
from braid.scheduling.plan import Setting
from braid.scheduling.profile import Profile
from tests.scheduling.plans import cluster

VOCABULARY = 256


def configured(schedule: str, slack: float | None) -> Config:
    return parse_config(
        {
            "model": {"hidden": 256, "layers": 4, "heads": 4, "sequence": 64},
            "train": {"global_batch": 8, "micro_batch": 1},
            "parallel": {"tp": 2},
            "overlap": {"schedule": schedule, "memory_slack": slack},
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
    shape, layout = config.model.shape(VOCABULARY), config.layout()
    made = build_schedule(config, shape, profile_of(config))
    parts = scheduled_parts(model_graphs(config, shape), layout, shape.layers, fused=made.fused)
    memory = rank_memory(made, layout, shape, parts, "fp32", 0, 0)
    return memory.activation_bytes + memory.working_bytes


def test_a_bound_is_kept() -> None:
    alone, free = activations("megatron", None), activations("braid", None)
    assert free > 1.3 * alone, "without a bound, runs of layers hold more: there is something to bound"
    held = [activations("braid", slack) for slack in (0.1, 0.3)]
    assert held[0] <= 1.1 * alone
    assert held[0] < held[1] <= 1.3 * alone, "what is allowed is used"
    assert activations("braid", 100.0) == free


def test_what_cannot_be_kept_is_approached() -> None:
    least = activations("braid", 0.0)
    assert activations("megatron", None) < least < activations("braid", None)


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"overlap.memory_slack"):
        configured("braid", -0.1)


def chosen(slack: float | None) -> tuple[str, float]:
    """What `auto` takes on two stages with a slow link, and its activations over megatron's."""
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
    best = rank_schedules(config, shape, profile)[0].schedule
    held = {}
    for name in (best, "megatron"):
        alone = config.with_schedule(name)
        made = build_schedule(alone, shape, profile)
        fused = scheduled_parts(parts, alone.layout(), shape.layers, fused=made.fused)
        ranks = [rank_memory(made, alone.layout(), shape, fused, "fp32", stage) for stage in range(2)]
        held[name] = max(rank.activation_bytes + rank.working_bytes for rank in ranks)
    return best, held[best] / held["megatron"] - 1


def test_messages_get_the_slots_that_the_link_needs() -> None:
    """`braid_eager` looks further ahead over a slow link; where messages cost nothing it holds little."""

    def setting(inter: float, slack: float | None = None) -> Setting:
        config = configured("braid_eager", slack).model_copy(
            update={"parallel": ParallelConfig(pp=2), "train": TrainConfig(global_batch=12, micro_batch=1)}
        )
        shape = config.model.shape(VOCABULARY)
        parts = model_graphs(config, shape)
        profile = analytic_profile(cluster(nodes=2, gpus=1, inter=inter), config.layout(), parts, 4)
        return decide_run(config, shape, profile)[0].setting

    slow = 5e8
    assert setting(slow).hop > 2
    assert setting(slow, 0.0).hop == 2, "further ahead is more memory"


def test_the_schedule_that_is_chosen_keeps_the_bound() -> None:
    name, more = chosen(None)
    assert name in ("eager", "braid_eager"), "a message has to travel while something else runs"
    assert more > 0.1
    assert chosen(0.1)[1] <= 0.1
