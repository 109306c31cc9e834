"""The same two ranks as Ray actors and as plain processes: Ray's price per step."""

import os
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from braid.actors.controller.group import WorkerGroup
from braid.actors.controller.meeting import rendezvous
from braid.actors.controller.processes import ProcessLauncher
from braid.actors.stage.messages import RunPlan
from braid.actors.stage.rank import Rank
from braid.jobs.benchmarks.cases import Case, Spread
from braid.jobs.session import ray_session

RAY, PROCESSES = "Ray actors", "processes"


@dataclass(frozen=True, kw_only=True)
class GroupTiming:
    """Seconds per step of one group of ranks, by round."""

    wall_seconds: Spread  # as the controller sees a step
    step_seconds: Spread  # as the slowest rank sees it
    cpu_seconds: Spread  # of all ranks together
    call_seconds: Spread  # of a call that does nothing


@dataclass(frozen=True, kw_only=True)
class LauncherResult:
    """The same two ranks as Ray actors and as processes. Ratios are Ray / processes, round by round."""

    case: str
    timing: Mapping[str, GroupTiming]
    wall_ratio: Spread
    step_ratio: Spread
    cpu_ratio: Spread


@dataclass
class _Rounds:
    """What was measured of one group, round by round, per step."""

    wall: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    call: list[float] = field(default_factory=list)

    def timing(self) -> GroupTiming:
        return GroupTiming(
            wall_seconds=Spread.of(self.wall),
            step_seconds=Spread.of(self.step),
            cpu_seconds=Spread.of(self.cpu),
            call_seconds=Spread.of(self.call),
        )


def compare_launchers(
    case: Case, plan: RunPlan, rounds: int, steps: int, order: random.Random
) -> LauncherResult:
    """Start both groups once and step them by turns; a first round is not counted."""
    taken = {RAY: _Rounds(), PROCESSES: _Rounds()}
    with _both_groups(plan) as groups:
        for turn in range(rounds + 1):
            for name in order.sample(sorted(groups), len(groups)):
                target = taken[name] if turn else _Rounds()
                _take_round(groups[name], range(turn * steps, (turn + 1) * steps), target)
    ray, processes = taken[RAY], taken[PROCESSES]
    return LauncherResult(
        case=case.name,
        timing={name: entry.timing() for name, entry in taken.items()},
        wall_ratio=Spread.of_ratios(ray.wall, processes.wall),
        step_ratio=Spread.of_ratios(ray.step, processes.step),
        cpu_ratio=Spread.of_ratios(ray.cpu, processes.cpu),
    )


def _take_round(group: WorkerGroup, steps: range, target: _Rounds) -> None:
    begin = time.perf_counter()
    pids = group.call_all(Rank.process_id)
    target.call.append(time.perf_counter() - begin)
    cpu_before = sum(map(_cpu_seconds, pids))
    inside = 0.0
    begin = time.perf_counter()
    for step in steps:
        inside += max(result.seconds for result in group.call_all(Rank.train_step, step))
    target.wall.append((time.perf_counter() - begin) / len(steps))
    target.step.append(inside / len(steps))
    target.cpu.append((sum(map(_cpu_seconds, pids)) - cpu_before) / len(steps))


def _cpu_seconds(pid: int) -> float:
    """CPU time that the living threads of a process on this machine have had (Linux)."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


@contextmanager
def _both_groups(plan: RunPlan) -> Iterator[dict[str, WorkerGroup]]:
    """The ranks of ``plan`` twice, ready to train: as actors of a private local cluster, and as processes."""
    config = plan.config
    with ExitStack() as stack:
        if cluster := os.environ.pop("RAY_ADDRESS", None):
            stack.callback(os.environ.__setitem__, "RAY_ADDRESS", cluster)
        stack.enter_context(ray_session(config))
        from braid.actors.controller.placement import RayLauncher

        groups: dict[str, WorkerGroup] = {}
        for name, launcher in ((RAY, RayLauncher(config)), (PROCESSES, ProcessLauncher(config))):
            group = groups[name] = launcher.start(config.layout().ranks)
            stack.callback(group.shutdown)
            group.call_all(Rank.setup, plan, rendezvous(group, config.cluster.group_timeout_s))
        yield groups
