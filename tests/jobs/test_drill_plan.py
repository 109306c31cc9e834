"""Which faults a drill has: a function of its seed, each often enough, apart from each other."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.actors.config import ConfigError
from braid.jobs.drill.plan import KINDS, plan_drill, steps_of

SOME = st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=6, unique=True)


@given(SOME, st.integers(1, 4), st.integers(0, 2**32))
def test_a_plan_follows_from_its_seed(kinds: list[str], count: int, seed: int) -> None:
    random.seed(seed + 1)  # other randomness has no say
    planned = plan_drill(kinds, count, seed)
    random.seed(seed + 2)
    assert plan_drill(kinds, count, seed) == planned
    assert sorted(fault.kind for fault in planned) == sorted(kinds * count)
    assert len({fault.name for fault in planned}) == len(planned), "every fault has a mark of its own"
    gaps = [b.step - a.step for a, b in itertools.pairwise(planned)]
    assert all(gap >= 4 for gap in gaps), "the run has recovered, and trained, before the next one"
    for fault, gap in zip(planned, gaps, strict=False):
        if fault.kind == "disk-full":
            assert gap >= 16
    assert planned[0].step >= 4, "there is something to lose"
    assert steps_of(planned) >= planned[-1].step + 12, "the last one is over before the run ends"


def test_seeds_differ() -> None:
    plans = {tuple(plan_drill(list(KINDS), 2, seed)) for seed in range(20)}
    assert len(plans) == 20


@given(st.integers(1, 8), st.integers(0, 1000))
def test_every_rank_and_place_can_be_hit(ranks: int, seed: int) -> None:
    for one in plan_drill(list(KINDS), 1, seed):
        fault = one.in_rank(ranks)
        assert (fault is not None) == (one.kind in ("stop", "nan") or one.kind in KILLS)
        if fault is not None:
            assert 0 <= fault.rank < ranks
            assert 0 <= fault.place < 1
            assert (fault.name, fault.step) == (one.name, one.step)
            if one.kind in KILLS:
                assert (fault.kind, fault.phase) == ("kill", one.kind.removeprefix("kill-"))
            else:
                assert fault.kind == one.kind


KILLS = ("kill-forward", "kill-backward", "kill-optimizer", "kill-save")


def test_over_many_seeds_every_rank_is_hit() -> None:
    plans = [plan_drill(["stop"], 1, seed)[0].in_rank(3) for seed in range(60)]
    assert {fault.rank for fault in plans if fault is not None} == {0, 1, 2}


def test_unknown_faults_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"--faults: 'kil-save' is not known; there are .*kill-save"):
        plan_drill(["stop", "kil-save"], 1, 0)


def test_nothing_is_nothing() -> None:
    assert plan_drill([], 3, 0) == []
    assert steps_of([]) > 0
