"""Who is found to be in trouble while a call waits: silence, no progress, and whom it is laid to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.actors.controller.health import Trouble, Vigil

SILENCE, STALL = 5.0, 6.0


def vigil(ranks: int = 3, awake: set[int] | None = None, now: float = 100.0, steady: bool = True) -> Vigil:
    awake = set(range(ranks)) if awake is None else awake
    return Vigil(range(ranks), awake, now, SILENCE, STALL if steady else None)


def test_a_rank_that_falls_silent_is_named() -> None:
    watched = vigil()
    for second in range(1, 5):
        for rank in (0, 2):
            watched.beat(rank, second, 100.0 + second)
    assert watched.verdict(105.0) is None, "just so long may it be silent"
    trouble = watched.verdict(105.25)
    assert trouble == Trouble(
        1, "has not answered for 5.2 s (failure.silence_s=5)", pytest.approx(5.25), silent=True
    )


def test_ranks_that_answer_but_do_not_get_on() -> None:
    watched = vigil()
    for rank, progress in ((0, 12), (1, 7), (2, 9)):
        watched.beat(rank, progress, 101.0)
    for second in range(2, 7):
        for rank, progress in ((0, 12), (1, 7), (2, 9)):
            watched.beat(rank, progress, 100.0 + second)
    assert watched.verdict(107.0) is None
    for rank, progress in ((0, 12), (1, 7), (2, 9)):
        watched.beat(rank, progress, 107.0)
    trouble = watched.verdict(107.5)
    assert trouble is not None
    assert (trouble.rank, trouble.silent, trouble.seconds) == (1, False, 6.5), "the one furthest behind"
    assert "no rank has got on for 6.5 s" in trouble.text


def test_what_is_waited_for_is_told() -> None:
    """By the rank furthest behind first, by a few of thousands, and only while they wait."""
    watched = vigil(ranks=2000)
    for rank in range(2000):
        watched.beat(rank, 5 if rank == 1234 else 7, 101.0, "parameters.0 dp")
    for rank in range(2000):
        watched.beat(rank, 5 if rank == 1234 else 7, 107.0, "gradients.0 dp" if rank != 1 else "")
    trouble = watched.verdict(107.5)
    assert trouble is not None
    assert trouble.text.endswith(
        "; rank 1234 waits for gradients.0 dp; rank 0 waits for gradients.0 dp; "
        "rank 2 waits for gradients.0 dp; rank 3 waits for gradients.0 dp"
    )


@pytest.mark.parametrize("sign", ["progress", "uncounted", "done"])
def test_one_rank_that_gets_on_is_enough(sign: str) -> None:
    watched = vigil()
    for quarter in range(1, 49):
        now = 100.0 + quarter / 4
        for rank in range(3):
            watched.beat(rank, 6 if (sign, rank) == ("progress", 2) and now >= 106.0 else 5, now)
        if now == 106.0 and sign == "uncounted":
            watched.beat(1, None, now)
        if now == 106.0 and sign == "done":
            watched.done(1, now)
        assert watched.verdict(now) is None, "since 106 no time-out has passed"
    for rank in (0, 2):
        watched.beat(rank, 6 if (sign, rank) == ("progress", 2) else 5, 112.5)
    trouble = watched.verdict(112.5)
    assert trouble is not None
    assert (trouble.silent, trouble.seconds) == (False, 6.25 if sign == "uncounted" else 6.5)


def test_calls_without_steady_progress_may_take_their_time() -> None:
    watched = vigil(steady=False)
    for second in range(1, 1000):
        for rank in range(3):
            watched.beat(rank, 0, 100.0 + second)
        assert watched.verdict(100.0 + second) is None
    assert watched.verdict(1200.0) is not None, "silence is noticed in any call"


def test_a_start_may_take_long_but_not_what_follows_it() -> None:
    watched = vigil(awake={0}, steady=False)
    for second in range(1, 60):
        watched.beat(0, None, 100.0 + second)
        assert watched.verdict(100.0 + second) is None, "ranks 1 and 2 are still starting"
    watched.beat(2, None, 160.0)
    watched.beat(0, None, 165.0)
    assert watched.verdict(165.0) is None
    watched.beat(0, None, 166.0)
    trouble = watched.verdict(166.0)
    assert trouble is not None
    assert (trouble.rank, trouble.silent) == (2, True)


def test_ranks_that_have_finished_owe_no_answer() -> None:
    watched = vigil()
    watched.beat(1, 3, 103.0)
    watched.done(0, 103.0)
    watched.done(2, 103.0)
    watched.beat(0, 4, 104.0)  # an answer that was on its way
    assert watched.verdict(108.0) is None
    trouble = watched.verdict(108.5)
    assert trouble is not None
    assert trouble.rank == 1
    watched.done(1, 109.0)
    assert watched.verdict(1000.0) is None


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.floats(0.0, 2.0)), max_size=40),
    st.floats(0.0, 12.0),
)
def test_verdicts_agree_with_the_whole_history(beats: list[tuple[int, int, float]], rest: float) -> None:
    """By the definition: silent since its last beat; stalled since the last beat with something new."""
    watched = vigil(4, now=0.0)
    now = advanced = 0.0
    heard, progress = dict.fromkeys(range(4), 0.0), dict[int, int]()
    for rank, done, pause in beats:
        now += pause
        watched.beat(rank, done, now)
        heard[rank] = now
        if progress.get(rank) != done:
            advanced = now
        progress[rank] = done
    now += rest
    silent = [rank for rank in range(4) if now - heard[rank] > SILENCE]
    trouble = watched.verdict(now)
    if silent:
        assert trouble is not None
        assert (trouble.rank, trouble.silent) == (silent[0], True)
    elif now - advanced > STALL:
        assert trouble is not None
        assert not trouble.silent
        assert progress.get(trouble.rank, 0) == min(progress.values(), default=0)
    else:
        assert trouble is None


def test_what_the_controller_does_itself_is_nobodys_silence() -> None:
    """It reads a large answer for 20 s, and hears nobody meanwhile."""
    watched = vigil()
    for rank in range(3):
        watched.beat(rank, 1, 101.0)
    watched.forgive(20.0)
    assert watched.verdict(125.0) is None
    trouble = watched.verdict(126.5)
    assert trouble is not None
    assert trouble.seconds == pytest.approx(5.5)
