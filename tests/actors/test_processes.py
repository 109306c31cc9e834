"""Calls to ranks that are processes: an answer belongs to its call, also after one that was given up."""

import time
from pathlib import Path

import pytest

from braid.actors.controller.group import WorkerError
from braid.actors.controller.processes import ProcessLauncher
from tests.end_to_end.runs import small_config


class Rank:
    """Rank 0 fails at once, rank 1 answers when it may."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def one_fails(self, gate: str) -> str:
        """Rank 1's answer comes when nobody waits for it any more."""
        if self._rank == 0:
            raise RuntimeError("out of luck")
        while not Path(gate).exists():
            time.sleep(0.01)
        return "late"

    def echo(self, word: str) -> str:
        """The word, with the rank."""
        return f"{word} {self._rank}"


def serve(rank: int, address: str) -> Rank:
    """What the processes serve."""
    return Rank(rank)


def test_an_answer_that_nobody_waits_for_is_no_others(tmp_path: Path) -> None:
    group = ProcessLauncher(small_config(tmp_path), serve=serve).start(2)
    gate = tmp_path / "gate"
    try:
        assert group.call_all("echo", "first") == ["first 0", "first 1"]
        with pytest.raises(WorkerError, match="rank 0: RuntimeError: out of luck"):
            group.call_all("one_fails", str(gate))
        gate.touch()
        assert group.call_all("echo", "second") == ["second 0", "second 1"]
        gate.unlink()
        for _ in range(2):
            with pytest.raises(WorkerError):
                group.call_all("one_fails", str(gate))
        gate.touch()
        assert group.call(1, "echo", "third") == "third 1"
        assert group.interrupt() == [], "nobody is busy"
    finally:
        group.shutdown()
