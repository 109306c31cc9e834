"""The learning rate of every step, against torch's schedulers."""

from itertools import product

import pytest
import torch

from braid.actors.config import TrainConfig
from braid.actors.stage.state.learning_rate import LearningRate
from tests.end_to_end.test_optimizers import scheduler


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "stable_decay"])
def test_schedules_are_those_of_torch(schedule: str) -> None:
    """In every step, for short and long runs, down to any fraction."""
    for steps, warmup, low in product((12, 40), (2, 7), (0.0, 0.1, 1.0)):
        given = {"steps": steps, "warmup_steps": warmup, "min_lr_fraction": low, "lr": 0.03}
        if schedule == "stable_decay":
            given["decay_steps"] = 4
        train = TrainConfig(schedule=schedule, **given)
        curve = LearningRate(schedule=schedule, **given)
        adamw = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=train.lr)
        theirs = scheduler(train, adamw)
        for step in range(steps):
            assert curve.learning_rate(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12), step
            adamw.step()
            theirs.step()


def test_the_decay_is_a_fifth_unless_it_is_given() -> None:
    settings = {"lr": 1.0, "min_lr_fraction": 0.0, "warmup_steps": 10, "schedule": "stable_decay"}
    for steps in (11, 50, 100):
        implied = LearningRate(steps=steps, **settings)
        given = LearningRate(steps=steps, decay_steps=steps // 5, **settings)
        rates = [[curve.learning_rate(step) for step in range(steps)] for curve in (implied, given)]
        assert rates[0] == rates[1]
        assert rates[0][steps - 1] > 0
        assert implied.learning_rate(steps) == 0
    short = LearningRate(steps=12, decay_steps=8, **settings)
    assert [short.learning_rate(step) for step in (9, 10, 11)] == [1.0, 1.0, 0.5], "after the warm-up"
