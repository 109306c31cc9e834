"""Copies of ranks' states in memory, with real ranks: whatever is lost comes back bit for bit."""

import hashlib
import os
import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from braid.actors.config import Config
from braid.actors.controller.group import WorkerError, WorkerGroup
from braid.actors.controller.planning import build_schedule
from braid.actors.controller.processes import ProcessLauncher
from braid.actors.controller.recovery import newest_common
from braid.actors.stage.host_state import take
from braid.actors.stage.messages import Held, Rendezvous, RunPlan
from braid.actors.stage.worker import Worker
from tests.end_to_end.runs import BYTES_VOCABULARY, prepare_text, small_config


class Probed(Worker):
    """A rank that tells what state it is in."""

    def digest(self) -> str:
        """Of master weights and moments, and of the parameters that follow from them."""
        state = take(self._optimizer, 0).flat
        parts = [state, *(p.tensor.detach() for p in self._model.parameters)]
        return hashlib.sha256(b"".join(part.contiguous().numpy().tobytes() for part in parts)).hexdigest()

    def spoil(self) -> None:
        """Change the state, so that only a restored one is right."""
        for master in self._optimizer.masters:
            master.data.add_(1.0)
        self._optimizer.restored(0)


def probed(rank: int, address: str) -> Probed:
    """What the ranks' processes serve."""
    return Probed(rank, address)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_text(tmp_path_factory.mktemp("copies"), 3, files=3)


class Ranks:
    """Ranks that meet, train and are lost as the controller would have it."""

    def __init__(self, config: Config, data: Path, group: WorkerGroup) -> None:
        shape = config.check(BYTES_VOCABULARY)
        schedule = build_schedule(config, shape).to_text()
        self._plan = RunPlan(config=config, shape=shape, schedule=schedule, data=str(data))
        self._group, self._generation = group, 0
        self.layout = config.layout()

    def meet(self, shift: int) -> None:
        """A new generation, with initial weights."""
        if self._generation:
            self.all("leave")
        self._generation += 1
        port = self._group.call(0, "open_store", 60.0)
        meeting = Rendezvous(
            address=self._group.addresses[0], port=port, generation=self._generation, copies_shift=shift
        )
        self.all("setup", self._plan, meeting)

    def begin(self, shift: int) -> None:
        """Meet, and train from the beginning."""
        self.meet(shift)
        self.all("keep_copy", 0)

    def all(self, method: str, *arguments: Any) -> list[Any]:
        """Call all ranks."""
        return self._group.call_all(method, *arguments)

    def train(self, steps: Sequence[int]) -> list[list[str]]:
        """Run steps; every rank's state after each."""
        found = []
        for step in steps:
            self.all("train_step", step)
            found.append(self.all("digest"))
        return found

    def lose(self, ranks: Sequence[int], shift: int) -> list[Held]:
        """Kill ranks and replace them; what all hold then."""
        processes = self.all("process_id")
        for rank in ranks:
            os.kill(processes[rank], signal.SIGKILL)
        for rank in ranks:
            with pytest.raises(WorkerError, match="exit code -9"):
                self._group.call(rank, "copies_held")
        assert self._group.interrupt() == sorted(ranks)
        self._group.replace(ranks)
        self.meet(shift)
        return self.all("copies_held")


@contextmanager
def started(path: Path, data: Path, **sections: Any) -> Iterator[Ranks]:
    """As many ranks as the layout has."""
    config = small_config(path, **sections)
    group = ProcessLauncher(config, serve=probed).start(config.layout().ranks)
    try:
        yield Ranks(config, data, group)
    finally:
        group.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "shift", "wait"),
    [({"tp": 2}, 1, True), ({"pp": 3}, 2, False), ({"dp": 3}, 0, True)],
    ids=["tp 2", "pp 3, not waited for", "replicas of dp 3"],
)
def test_a_lost_rank_gets_its_state_back(
    tmp_path: Path, data: Path, parallel: dict[str, int], shift: int, wait: bool
) -> None:
    sections: dict[str, Any] = {
        "parallel": parallel,
        "model": {"layers": 3},  # stages of different sizes
        "train": {"global_batch": 12, "steps": 5},
        "checkpoint": {"copies_every": 1, "copies_wait": wait},
    }
    with started(tmp_path, data, **sections) as ranks:
        ranks.begin(shift)
        states = ranks.train(range(5))
        for every in zip(*states, strict=True):
            assert len(set(every)) == 5, "every step changes every rank's state"
        ranks.begin(shift)
        assert {one.own for one in ranks.all("copies_held")} == {(0,)}, "no later ones"
        assert ranks.train(range(3)) == states[:3]
        lost = random.Random().randrange(ranks.layout.ranks)
        held = ranks.lose([lost], shift)
        assert held[lost].own == held[lost].partners == ()
        common = newest_common(held, ranks.layout, 5)
        assert common is not None
        step, sources = common
        assert step == 3 if wait else step in (2, 3)
        assert sources[lost] != lost
        ranks.all("restore_copies", step, sources)
        assert ranks.all("digest") == states[step - 1]
        assert ranks.train(range(step, 5)) == states[step:]
        # Copies are kept on: the same again, another rank.
        lost = (lost + 1) % ranks.layout.ranks
        held = ranks.lose([lost], shift)
        again = newest_common(held, ranks.layout, 5)
        assert again is not None
        ranks.all("restore_copies", *again)
        assert again[0] == 5 if wait else again[0] in (4, 5)
        assert ranks.all("digest") == states[again[0] - 1]


def test_one_of_four_ranks_holds_all_there_is(tmp_path: Path, data: Path) -> None:
    """Rank 3 has its own state, which is rank 1's too, and its partner's, rank 2, which is rank 0's too."""
    sections: dict[str, Any] = {"parallel": {"dp": 2, "tp": 2}}
    with started(tmp_path, data, checkpoint={"copies_every": 1, "copies_wait": True}, **sections) as ranks:
        ranks.begin(1)
        states = ranks.train(range(3))
        held = ranks.lose([0, 1, 2], 1)
        common = newest_common(held, ranks.layout, 5)
        assert common == (3, [3, 3, 3, 3])
        ranks.all("restore_copies", *common)
        assert ranks.all("digest") == states[2]
        assert ranks.train([3])[0] not in states


def test_an_older_step_is_gone_back_to(tmp_path: Path, data: Path) -> None:
    """Copies of every second step; what came later is forgotten, so that it cannot be mistaken for new."""
    sections: dict[str, Any] = {"parallel": {"tp": 2}}
    with started(tmp_path, data, checkpoint={"copies_every": 2, "copies_wait": True}, **sections) as ranks:
        ranks.begin(1)
        states = ranks.train(range(5))
        assert {one.own for one in ranks.all("copies_held")} == {(2, 4)}
        ranks.all("spoil")
        assert not set(ranks.all("digest")) & set(states[3])
        ranks.all("restore_copies", 2, [0, 1])
        assert ranks.all("digest") == states[1]
        for one in ranks.all("copies_held"):
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
    with started(tmp_path, data, checkpoint={"copies_every": 1, "copies_mb": 16}, **sections) as ranks:
        ranks.begin(1)
        assert len(ranks.train([0])) == 1
