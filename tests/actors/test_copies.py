"""Copies of ranks' states in memory, with real ranks: whatever is lost comes back bit for bit."""

import random
from pathlib import Path
from typing import Any

import pytest

from braid.actors.controller.group import WorkerError
from braid.actors.controller.recovery import newest_common
from braid.actors.stage.rank import Rank
from tests.actors.ranks import Probed, started

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("parallel", "shift", "wait"),
    [({"pp": 3}, 2, False), ({"dp": 3}, 0, True)],
    ids=["pp 3, not waited for", "replicas of dp 3"],
)
def test_a_lost_rank_gets_its_state_back(
    tmp_path: Path, data: Path, parallel: dict[str, int], shift: int, wait: bool
) -> None:
    sections: dict[str, Any] = {
        "parallel": parallel,
        "model": {"layers": 3},  # stages of different sizes
        "train": {"global_batch": 12, "steps": 5},
        "checkpoint": {"copies_every": 1},
    }
    with started(tmp_path, data, wait=wait, **sections) as ranks:
        ranks.begin(shift)
        states = ranks.train(range(5))
        for every in zip(*states, strict=True):
            assert len(set(every)) == 5, "every step changes every rank's state"
        ranks.begin(shift)
        assert {one.own for one in ranks.all(Rank.copies_held)} == {(0,)}, "no later ones"
        assert ranks.train(range(3)) == states[:3]
        lost = random.Random().randrange(ranks.layout.ranks)
        held = ranks.lose([lost], shift)
        assert held[lost].own == held[lost].partners == ()
        common = newest_common(held, ranks.layout.mesh, 5)
        assert common is not None
        step, sources = common
        assert step == 3 if wait else step in (2, 3)
        assert sources[lost] != lost
        ranks.all(Rank.restore_copies, step, sources)
        assert ranks.all(Probed.digest) == states[step - 1]
        assert ranks.train(range(step, 5)) == states[step:]
        # Copies are kept on: the same again, another rank.
        lost = (lost + 1) % ranks.layout.ranks
        held = ranks.lose([lost], shift)
        again = newest_common(held, ranks.layout.mesh, 5)
        assert again is not None
        ranks.all(Rank.restore_copies, *again)
        assert again[0] == 5 if wait else again[0] in (4, 5)
        assert ranks.all(Probed.digest) == states[again[0] - 1]


def test_one_of_four_ranks_holds_all_there_is(tmp_path: Path, data: Path) -> None:
    """Rank 3 has its own state, which is rank 1's too, and its partner's, rank 2, which is rank 0's too."""
    sections: dict[str, Any] = {"parallel": {"dp": 2, "tp": 2}}
    with started(tmp_path, data, wait=True, checkpoint={"copies_every": 1}, **sections) as ranks:
        ranks.begin(1)
        states = ranks.train(range(3))
        held = ranks.lose([0, 1, 2], 1)
        common = newest_common(held, ranks.layout.mesh, 5)
        assert common == (3, [3, 3, 3, 3])
        ranks.all(Rank.restore_copies, *common)
        assert ranks.all(Probed.digest) == states[2]
        assert ranks.train([3])[0] not in states


def test_an_older_step_is_gone_back_to(tmp_path: Path, data: Path) -> None:
    """Copies of every second step; what came later is forgotten, so that it cannot be mistaken for new."""
    sections: dict[str, Any] = {"parallel": {"tp": 2}}
    with started(tmp_path, data, wait=True, checkpoint={"copies_every": 2}, **sections) as ranks:
        ranks.begin(1)
        states = ranks.train(range(5))
        assert {one.own for one in ranks.all(Rank.copies_held)} == {(2, 4)}
        ranks.all(Probed.spoil)
        assert not set(ranks.all(Probed.digest)) & set(states[3])
        ranks.all(Rank.restore_copies, 2, [0, 1])
        assert ranks.all(Probed.digest) == states[1]
        for one in ranks.all(Rank.copies_held):
            assert (one.own, one.partners) == ((2,), (2,))
        assert ranks.train(range(2, 5)) == states[2:]


def test_a_budget_that_is_too_small_is_refused(tmp_path: Path, data: Path) -> None:
    sections: dict[str, Any] = {"parallel": {"tp": 2}}
    with (
        started(tmp_path, data, checkpoint={"copies_every": 1, "copies_mb": 1}, **sections) as ranks,
        pytest.raises(WorkerError, match=r"checkpoint.copies_mb=1: copies in memory take \d+ MiB") as refused,
    ):
        ranks.begin(1)
    assert refused.value.user_error
