"""Who is slow, and who only was for a while."""

import random
from statistics import median

from braid.scheduling.trace.stragglers import LAST, STRETCH, stragglers


def test_stragglers_are_judged_within_their_stage() -> None:
    """Stages may differ by any factor; one slow step is none; the slowest come first."""
    usual = [1.0, 1.1, 1.0, 3.0, 3.1, 3.0]
    stages = [0, 0, 0, 1, 1, 1]
    steps = [usual for _ in range(LAST)]
    assert stragglers(steps, stages) == []
    steps[-1] = [9.0, *usual[1:]]
    assert stragglers(steps, stages) == []
    slow = [[1.3, 1.0, 1.0, 3.0, 3.0, 4.5] for _ in range(LAST)]
    assert [(one.rank, one.stage, round(one.times, 3)) for one in stragglers(slow, stages)] == [
        (5, 1, 1.5),
        (0, 0, 1.3),
    ]
    assert stragglers(slow[1:], stages) == [], "not before there are enough steps"
    assert stragglers([*slow, *steps], stages) == [], "only the last steps count"


def test_a_noisy_stretch_names_nobody() -> None:
    """Wherever it begins: up to one and a half stretches of steps, however slow."""
    for length in (STRETCH, STRETCH + STRETCH // 2):
        steps = [[1.0, 1.0] for _ in range(LAST)] + [[3.0, 1.0]] * length + [[1.0, 1.0]] * LAST
        assert not any(stragglers(steps[:end], [0, 0]) for end in range(len(steps) + 1))


def test_a_rank_of_two_is_compared_with_the_other() -> None:
    (found,) = stragglers([[1.0, 1.25]] * LAST, [0, 0])
    assert (found.rank, found.times) == (1, 1.25)
    assert stragglers([[1.0, 1.15]] * LAST, [0, 0]) == []


def test_the_others_median() -> None:
    """Against the plain definition."""
    rng = random.Random(0)
    for count in range(2, 9):
        times = [rng.choice([1.0, 1.1, 1.5, 2.0, 4.0]) for _ in range(count)]
        others = [median(times[:rank] + times[rank + 1 :]) for rank in range(count)]
        wanted = {n: times[n] / others[n] for n in range(count) if times[n] > 1.2 * others[n]}
        assert {one.rank: one.times for one in stragglers([times] * LAST, [0] * count)} == wanted


def test_stragglers_without_numbers() -> None:
    assert stragglers([], [0, 0]) == []
    assert stragglers([[], [1.0]] * LAST, [0, 0]) == []
    assert stragglers([[1.0]] * LAST, [0]) == []
