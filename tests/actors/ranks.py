"""Real ranks of a run without its controller: they meet, train and are lost as a test would have it."""

import hashlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from braid.actors.config import Config
from braid.actors.controller.ranks.group import WorkerError, WorkerGroup, rendezvous
from braid.actors.controller.ranks.processes import ProcessLauncher
from braid.actors.stage.rank.interface import Rank
from braid.actors.stage.rank.messages import CopiesHeld
from braid.actors.stage.rank.worker import Worker
from braid.actors.stage.state.copies import take
from tests.end_to_end.runs import run_plan, small_config

_R = TypeVar("_R")


class Probed(Worker):
    """A rank that tells what state it is in."""

    waits = False
    """Whether a step ends when its copy has arrived, not during the next one."""

    def keep_copy(self, step: int) -> None:
        """As a rank's; perhaps waits until it has arrived."""
        super().keep_copy(step)
        if self.waits:
            self._copies.settle()

    def digest(self) -> str:
        """Of master weights and moments, and of the parameters that follow from them, whole and in shares."""
        state = take(self._parts.optimizer, 0).flat
        parts = [state, *(p.tensor.detach() for p in self._parts.model.parameters)]
        parts += [shard.tensor.detach() for shard in self._parts.optimizer.shards]
        return hashlib.sha256(b"".join(part.contiguous().numpy().tobytes() for part in parts)).hexdigest()

    def spoil(self) -> None:
        """Change the state, so that only a restored one is right."""
        for master in self._parts.optimizer.masters:
            master.data.add_(1.0)
        self._parts.optimizer.restored(0)


class Waiting(Probed):
    """Its copies have arrived when a step ends."""

    waits = True


class Ranks:
    """Ranks that meet, train and are lost as the controller would have it."""

    def __init__(self, config: Config, data: Path, group: WorkerGroup) -> None:
        self.plan = run_plan(config, data)
        self.group, self._generation = group, 0
        self.layout = config.layout()

    def meet(self, shift: int) -> None:
        """A new generation, with initial weights."""
        if self._generation:
            self.all(Rank.leave)
        self._generation += 1
        self.all(Rank.setup, self.plan, rendezvous(self.group, 60.0, self._generation, shift))

    def begin(self, shift: int) -> None:
        """Meet, and train from the beginning."""
        self.meet(shift)
        self.all(Rank.keep_copy, 0)

    def all(self, method: Callable[..., _R], *arguments: Any) -> list[_R]:
        """Call all ranks."""
        return self.group.call_all(method, *arguments)

    def train(self, steps: Sequence[int]) -> list[list[str]]:
        """Run steps; every rank's state after each."""
        found = []
        for step in steps:
            self.all(Rank.train_step, step)
            found.append(self.all(Probed.digest))
        return found

    def kill(self, ranks: Sequence[int]) -> None:
        """Kill ranks; the others drop what they are at."""
        processes = self.all(Rank.process_id)
        for rank in ranks:
            os.kill(processes[rank], signal.SIGKILL)
        for rank in ranks:
            with pytest.raises(WorkerError, match="its process"):
                self.group.call(rank, Rank.copies_held)
        assert self.group.interrupt(self._generation) == sorted(ranks)

    def lose(self, ranks: Sequence[int], shift: int) -> list[CopiesHeld]:
        """Kill ranks and replace them; what all hold then."""
        self.kill(ranks)
        self.group.replace(ranks)
        self.meet(shift)
        return self.all(Rank.copies_held)


@contextmanager
def started(path: Path, data: Path, *, wait: bool = False, **sections: Any) -> Iterator[Ranks]:
    """As many ranks as the layout has. ``wait``: for copies of a step, before it ends."""
    config = small_config(path, **sections)
    group = ProcessLauncher(config, serve=Waiting if wait else Probed).start(config.layout().ranks)
    try:
        yield Ranks(config, data, group)
    finally:
        group.shutdown()
