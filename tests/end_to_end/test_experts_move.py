"""Experts move between ranks: a run follows its nodes, and goes on from checkpoints, with other dp and ep."""

import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from braid.actors.controller.controller import Controller, RunOptions
from braid.actors.controller.ranks.group import NoRoomError, WorkerGroup
from braid.actors.controller.ranks.processes import ProcessLauncher
from braid.actors.controller.records.json_lines import read_lines
from braid.actors.controller.records.run_records import Event, Started, StepDone
from braid.actors.controller.records.step_record import StepRecord
from tests.end_to_end.runs import Run, run_layout, run_plan, small_config, trained

SECTIONS: dict[str, dict[str, Any]] = {
    "model": {"family": "moe", "experts": 8, "top_k": 2, "balance_loss": 0.02},
    "train": {"dtype": "fp64", "global_batch": 12, "micro_batch": 1},
    "cluster": {"cpus_per_rank": 0.1},
}


def sections(**more: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {key: {**SECTIONS.get(key, {}), **more.get(key, {})} for key in {*SECTIONS, *more}}


def check(records: Sequence[StepRecord], run: Run, fixed: Run, error: float = 1e-9) -> None:
    """The steps of a run with fixed ranks: losses, what every expert was visited, all parameters."""
    assert [one.step for one in records] == [one.step for one in fixed.records]
    assert [one.loss for one in records] == pytest.approx(fixed.losses, rel=error, abs=0)
    for one, other in zip(records, fixed.records, strict=True):
        assert one.experts is not None
        assert other.experts is not None
        assert one.experts.visits == other.experts.visits
    ours, theirs = run.parameters(records[-1].step), fixed.parameters(records[-1].step)
    assert ours.keys() == theirs.keys()
    assert sum("experts" in name for name in ours) == 3 * fixed.shape.layers
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=error, atol=error, msg=name)


class Changing(ProcessLauncher):
    room, leaving = 4, False

    def capacity(self, group: WorkerGroup | None, avoid: Sequence[str] = ()) -> tuple[int, bool]:
        return self.room, self.leaving

    def start(self, ranks: int, avoid: Sequence[str] = (), stopped: Any = None) -> WorkerGroup:
        group = super().start(ranks)

        def replace(lost: Sequence[int]) -> None:
            raise NoRoomError(f"room for {self.room} of {ranks}")

        group.replace = replace  # type: ignore[method-assign]
        return group


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("parallel", "layouts", "exact"),
    [
        ({"dp": 4, "ep": 2}, ["dp 4 x ep 2", "dp 2 x ep 2", "dp 4 x ep 2", "dp 3"], False),
        pytest.param(
            {"dp": 2, "cp": 2, "ep": 2},
            ["dp 2 x cp 2 x ep 2", "cp 2 x ep 2", "dp 2 x cp 2 x ep 2"],
            True,
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["one is killed", "the same bits"],
)
def test_a_run_with_experts_follows_its_nodes(
    tmp_path: Path, data: Path, parallel: Mapping[str, int], layouts: Sequence[str], exact: bool
) -> None:
    """Two of four ranks leave, two come; perhaps one is killed: what it held is in the others' memory.

    As long as ep stays, sums in float64 give the very bits of ranks that stay as they are.
    """
    exactly = {"dtype": "fp32", "deterministic_reduction": True} if exact else {}
    own = sections(train={"steps": 100_000, "warmup_steps": 5, **exactly}, parallel=parallel)
    elastic = {"max_ranks": 4, "settle_s": 0.0}
    checkpoint = {"every": 0, "copies_every": 1, "asynchronous": False}
    config = small_config(tmp_path / "elastic", **own, elastic=elastic, checkpoint=checkpoint)
    launcher = Changing(config)
    plan = run_plan(config, data)
    controller = Controller(plan, launcher, RunOptions(), lambda config, _: run_plan(config, data))

    def there_are(room: int, leaving: bool) -> None:
        launcher.room, launcher.leaving = room, leaving

    def kill() -> None:
        launcher.room = 3
        processes = json.loads((config.run_directory / "cluster.json").read_text())["processes"]
        os.kill(processes[1], signal.SIGKILL)

    changes: list[Callable[[], None]] = [partial(there_are, 2, True), partial(there_are, 4, False)]
    changes += [*([] if exact else [kill]), controller.stop]
    events: list[Event] = []
    steps = 0
    for event in controller.run():
        events.append(event)
        if isinstance(event, Started):
            steps = 0
        elif isinstance(event, StepDone):
            steps += 1
            if steps == 3 and changes:
                changes.pop(0)()
    assert [event.layout for event in events if isinstance(event, Started)] == layouts
    incidents = read_lines(config.run_directory / "incidents.jsonl")
    assert [one["ranks"] for one in incidents] == [[4, 2], [2, 4], [4, 3]][: len(layouts) - 1]
    assert [one["steps_lost"] for one in incidents[:2]] == [0, 0]
    assert all(one["steps_lost"] <= 1 for one in incidents), "its last copy may have been on its way"
    last = {event.record.step: event.record for event in events if isinstance(event, StepDone)}
    run = Run.of(plan, events)
    fixed = run_layout(
        tmp_path / "fixed",
        data,
        len(last),
        **sections(train=own["train"], parallel={**parallel, "dp": parallel["dp"] // 2}),
    )
    check([last[step] for step in sorted(last)], run, fixed, 0.0 if exact else 1e-9)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_checkpoints_of_experts_are_read_by_other_numbers_of_ranks(tmp_path: Path, data: Path) -> None:
    """ep 2, then ep 4 over dp and cp, then one rank that has all, then ep 2 again with states in shares."""
    own = sections(train={"steps": 8}, checkpoint={"every": 2, "asynchronous": False})
    fixed = run_layout(tmp_path / "fixed", data, **own, parallel={"dp": 2, "ep": 2})
    events: list[Event] = []
    folder = tmp_path / "moving"
    for until, parallel in (
        (2, {"dp": 2, "ep": 2}),
        (4, {"dp": 2, "cp": 2, "ep": 4}),
        (6, {}),
        (8, {"dp": 2, "ep": 2, "zero": 3}),
    ):
        config = small_config(tmp_path / "made", **own, parallel=parallel)
        config = config.model_copy(update={"name": "moved", "runs": folder})
        plan = run_plan(config, data)
        events += trained(plan, until, resume=until > 2).events
    run = Run.of(plan, events)
    check(run.records, run, fixed)
