"""Who is slow, and who only was once."""

from braid.scheduling.stragglers import stragglers


def test_stragglers_are_judged_within_their_stage() -> None:
    """Stages may differ by any factor; one slow step is none; the slowest come first."""
    usual = [1.0, 1.1, 1.0, 3.0, 3.1, 3.0]
    stages = [0, 0, 0, 1, 1, 1]
    steps = [usual for _ in range(20)]
    assert stragglers(steps, stages) == []
    steps[-1] = [9.0, *usual[1:]]
    assert stragglers(steps, stages) == []
    slow = [[1.3, 1.0, 1.0, 3.0, 3.0, 4.5] for _ in range(20)]
    assert [(one.rank, one.stage, round(one.times, 3)) for one in stragglers(slow, stages)] == [
        (5, 1, 1.5),
        (0, 0, 1.3),
    ]
    assert stragglers([*slow, *steps[:20]], stages) == [], "only the last steps count"


def test_stragglers_without_numbers() -> None:
    assert stragglers([], [0, 0]) == []
    assert stragglers([[], [1.0]], [0, 0]) == []
