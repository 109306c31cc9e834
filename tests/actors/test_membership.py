"""A rank among all: which generation is broken off, and what goes before groups do."""

import pytest

from braid.actors.config import ClusterConfig
from braid.actors.stage.membership import Membership
from braid.actors.stage.messages import Rendezvous


class Told(Membership):
    """Tells what becomes of its groups, and of a graph that refers to them."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1")
        self.told: list[str] = []

    def start(self, generation: int) -> None:
        meeting = Rendezvous(address="127.0.0.1", port=0, generation=generation)
        self.begin(ClusterConfig(device="cpu"), 0, meeting)
        self.graph = self

    def drop(self) -> None:
        self.told.append("graph dropped")

    def _abort(self) -> None:
        self.told.append("groups aborted")

    def _destroy(self) -> None:
        self.told.append("groups destroyed")


def test_a_graph_goes_before_the_groups_that_it_refers_to() -> None:
    """NCCL would wait for it otherwise, in the thread that is to give it up."""
    member = Told()
    member.start(1)
    member.break_off()
    assert member.told == ["graph dropped", "groups aborted"]
    member.start(2)
    member.told.clear()
    member.leave()
    assert member.told == ["graph dropped", "groups destroyed"]
    member.leave()
    assert member.told[2:] == ["groups destroyed"], "it is gone"


def test_a_late_interrupt_leaves_the_next_generation_alone() -> None:
    member = Told()
    member.start(1)
    member.start(2)
    member.break_off(1)
    member.intact()
    assert not member.broken
    assert member.told == []
    member.break_off(2)
    assert member.broken
    assert member.told == ["graph dropped", "groups aborted"]
    member.break_off(1)
    with pytest.raises(RuntimeError, match="broken off"):
        member.intact()
    member.start(3)
    assert not member.broken


def test_an_early_interrupt_is_not_forgotten() -> None:
    """The generation that it means does not begin; the one before it goes on."""
    member = Told()
    member.start(1)
    member.break_off(2)
    member.intact()
    assert member.told == []
    with pytest.raises(RuntimeError, match="broken off"):
        member.start(2)
    member.start(3)
    member.intact()


def test_without_a_name_the_generation_that_runs_is_meant() -> None:
    member = Told()
    member.start(4)
    member.break_off()
    assert member.broken
    member.start(4)
    assert not member.broken, "it begins again"
