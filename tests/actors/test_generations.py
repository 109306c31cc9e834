"""A rank from one generation to the next: what is broken off, what goes before groups do, what is freed."""

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.multiprocessing.reductions import StorageWeakRef

from braid.actors.config import ClusterConfig
from braid.actors.controller.ranks.group import WorkerError, rendezvous
from braid.actors.controller.ranks.processes import ProcessLauncher
from braid.actors.stage.rank.interface import Rank
from braid.actors.stage.rank.membership import Membership
from braid.actors.stage.rank.messages import Rendezvous
from braid.actors.stage.rank.worker import Worker
from tests.end_to_end.runs import run_plan, small_config


class Counted(Worker):
    """Tells what is left of all generations but the one that runs."""

    def setup(self, *arguments: Any) -> None:
        super().setup(*arguments)
        model, held, optimizer = self._parts.model, self._parts.buckets, self._parts.optimizer
        tensors = [one.tensor for one in (*model.parameters, *held.shards)]
        tensors += [bucket.gradients.shard for bucket in held.buckets]
        tensors += [entry.tensor for entry in optimizer.entries()]
        self.storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        self.objects = [weakref.ref(one) for one in (model, self._parts.executor, optimizer)]

    def alive(self) -> tuple[int, int]:
        """Storages and objects of the last generation that was set up."""
        storages = sum(not storage.expired() for storage in self.storages)
        return storages, sum(one() is not None for one in self.objects)


@pytest.mark.parametrize(
    ("parallel", "schedule"),
    [({"tp": 2}, "wavelet"), ({"dp": 2, "zero": 2}, "ddp"), ({"dp": 2, "zero": 3}, "ddp")],
    ids=["tp", "zero 2", "zero 3"],
)
def test_nothing_is_left_behind(tmp_path: Path, data: Path, parallel: dict[str, int], schedule: str) -> None:
    """Of weights, gradients and moments, whole or in shares."""
    config = small_config(tmp_path / "runs", parallel=parallel, overlap={"schedule": schedule})
    group = ProcessLauncher(config, serve=Counted).start(2)
    try:
        for generation in (1, 2):
            group.call_all(Rank.setup, run_plan(config, data), rendezvous(group, 60.0, generation))
            group.call_all(Rank.train_step, 0)
            assert all(storages > 20 for storages, _ in group.call_all(Counted.alive))
            group.call_all(Rank.leave)
            assert group.call_all(Counted.alive) == [(0, 0), (0, 0)]
    finally:
        group.shutdown()


def test_ranks_meet_though_one_of_them_has_tried_alone(tmp_path: Path, data: Path) -> None:
    """As where a link is cut while they meet, and one of them is new then."""
    plan = run_plan(small_config(tmp_path / "runs", parallel={"tp": 2}), data)
    cluster = plan.config.cluster.model_copy(update={"group_timeout_s": 1.0})
    hasty = replace(plan, config=plan.config.model_copy(update={"cluster": cluster}))
    group = ProcessLauncher(plan.config).start(2)
    try:
        for generation in (1, 2):
            with pytest.raises(WorkerError, match="timeout"):
                group.call(0, Rank.setup, hasty, rendezvous(group, 60.0, generation))
            group.call_all(Rank.leave)
        group.call_all(Rank.setup, plan, rendezvous(group, 60.0, 3))
        assert sum(result.loss_sum for result in group.call_all(Rank.train_step, 0)) > 0
    finally:
        group.shutdown()


# -- which generation is broken off, and what goes before groups do ------------------------------------------


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
    assert member.broken, "without a name the generation that runs is meant"
    member.start(1)
    assert not member.broken, "it begins again"
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
