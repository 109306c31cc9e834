"""The same two ranks as Ray actors and as plain processes: Ray's price per step."""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from braid.actors.controller.group import WorkerGroup
from braid.actors.controller.processes import ProcessLauncher
from braid.actors.stage.worker import Rendezvous, RunPlan
from braid.jobs.benchmarks.cases import Case, Spread
from braid.jobs.session import ray_session

RAY, PROCESSES = "Ray actors", "processes"


@dataclass(frozen=True, kw_only=True)
class LauncherResult:
    """The same two ranks as Ray actors and as processes. Ratios are Ray / processes."""

    case: str
    wall_seconds: Mapping[str, Spread]  # of a step as the controller sees it
    step_seconds: Mapping[str, Spread]  # of a step as the slowest rank sees it
    call_seconds: Mapping[str, Spread]  # of a call that does nothing
    wall_ratio: float
    step_ratio: float


def compare_launchers(
    case: Case, plan: RunPlan, rounds: int, steps: int, order: random.Random
) -> LauncherResult:
    """Start both groups once and step them by turns; a first round is not counted."""
    wall: dict[str, list[float]] = {RAY: [], PROCESSES: []}
    inside: dict[str, list[float]] = {RAY: [], PROCESSES: []}
    calls: dict[str, list[float]] = {RAY: [], PROCESSES: []}
    with _both_groups(plan) as groups:
        for turn in range(rounds + 1):
            for name in order.sample(sorted(groups), len(groups)):
                group = groups[name]
                for step in range(turn * steps, (turn + 1) * steps):
                    begin = time.perf_counter()
                    results = group.call_all("train_step", step)
                    middle = time.perf_counter()
                    group.call_all("process_id")
                    end = time.perf_counter()
                    if turn:
                        wall[name].append(middle - begin)
                        inside[name].append(max(result.seconds for result in results))
                        calls[name].append(end - middle)
    walls, insides = _spreads(wall), _spreads(inside)
    return LauncherResult(
        case=case.name,
        wall_seconds=walls,
        step_seconds=insides,
        call_seconds=_spreads(calls),
        wall_ratio=walls[RAY].median / walls[PROCESSES].median,
        step_ratio=insides[RAY].median / insides[PROCESSES].median,
    )


def _spreads(values: Mapping[str, Sequence[float]]) -> dict[str, Spread]:
    return {name: Spread.of(list(entry)) for name, entry in values.items()}


@contextmanager
def _both_groups(plan: RunPlan) -> Iterator[dict[str, WorkerGroup]]:
    """The ranks of ``plan`` twice, ready to train: as actors of a private local cluster, and as processes."""
    config = plan.config
    ranks = config.layout().ranks
    with ExitStack() as stack:
        stack.enter_context(ray_session(config))
        from braid.actors.controller.placement import RayLauncher

        groups: dict[str, WorkerGroup] = {}
        for name, launcher in ((RAY, RayLauncher(config)), (PROCESSES, ProcessLauncher(config))):
            group = groups[name] = launcher.start(ranks)
            stack.callback(group.shutdown)
            port = group.call(0, "open_store", config.cluster.group_timeout_s)
            meeting = Rendezvous(address=group.addresses[0], port=port, generation=1)
            group.call_all("setup", plan, meeting)
        yield groups
