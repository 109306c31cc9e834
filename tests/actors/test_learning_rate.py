"""The learning rate of a decay at the end. All schedules: `tests.end_to_end.test_optimizers`."""

from braid.actors.stage.state.learning_rate import LearningRate


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
