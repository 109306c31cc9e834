"""One rank of Braid against the plain PyTorch loop, and two ranks as Ray actors against plain processes.

The former are timed side by side in one process, their memory is measured in one process each. All of these
are fresh: what ran before leaves a heap behind that changes speeds by some percent.
"""

import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from braid.actors.controller.ranks.group import WorkerGroup, rendezvous
from braid.actors.controller.ranks.processes import LOOPBACK, ProcessLauncher
from braid.actors.stage.data.token_files import TokenShards, sample_ids
from braid.actors.stage.measure.peak_memory import PeakMemory
from braid.actors.stage.rank.assembly import DTYPES
from braid.actors.stage.rank.interface import Rank
from braid.actors.stage.rank.messages import Rendezvous, RunPlan
from braid.actors.stage.rank.worker import Worker
from braid.jobs.bench.cases import Case, Spread, by_turns
from braid.jobs.bench.plain_torch import PlainModel, PlainTrainer, load_named
from braid.jobs.cluster.session import ray_session

BRAID, PLAIN = "braid", "plain"
RAY, PROCESSES = "Ray actors", "processes"

P = ParamSpec("P")
R = TypeVar("R")
Seconds = dict[str, list[float]]
"""Seconds per step of every counted round, by what was timed."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One side's steps: seconds of wall clock and of this process's CPUs, by round."""

    step_seconds: Spread
    cpu_seconds: Spread
    tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class Memory:
    """One side's resident memory in a process of its own: after the imports, and at its highest."""

    imported_bytes: int
    peak_bytes: int

    @property
    def training_bytes(self) -> int:
        """What training takes on top of the imports."""
        return self.peak_bytes - self.imported_bytes


@dataclass(frozen=True, kw_only=True)
class LoopResult:
    """One rank of Braid against the plain loop. Ratios are Braid / plain."""

    case: str
    parameters: int
    tokens_per_step: int
    timing: Mapping[str, Timing]
    memory: Mapping[str, Memory]
    speed_ratio: Spread  # of tokens per second of wall clock, round by round
    cpu_speed_ratio: Spread  # of tokens per second of CPU, round by round
    memory_ratio: float  # of peaks above imports
    peak_ratio: float  # of whole peaks
    loss_difference: float  # relative, after the last step: both did the same work


@dataclass(frozen=True, kw_only=True)
class LauncherResult:
    """The same two ranks as Ray actors and as processes. Ratios are Ray / processes, round by round.

    ``timing``: by side, ``wall_seconds`` of a step as the controller sees it, ``step_seconds`` as the slowest
    rank sees it, ``cpu_seconds`` of all ranks together, and ``call_seconds`` of a call that does nothing.
    """

    case: str
    timing: Mapping[str, Mapping[str, Spread]]
    wall_ratio: Spread
    step_ratio: Spread
    cpu_ratio: Spread


# -- one rank and the plain loop -----------------------------------------------------------------------------


def compare_loops(case: Case, plan: RunPlan, rounds: int, steps: int, order: random.Random) -> LoopResult:
    """Train both from the same initial values on the same samples, by turns."""
    memory = {name: _in_fresh_process(_memory_of, name, plan) for name in (BRAID, PLAIN)}
    taken, losses = _in_fresh_process(_time_loops, plan, rounds, steps, order.randrange(2**31))
    tokens = plan.config.train.global_batch * plan.shape.sequence
    timing = {}
    for name in (BRAID, PLAIN):
        step, cpu = (Spread.of(taken[name][kind]) for kind in ("step", "cpu"))
        timing[name] = Timing(step_seconds=step, cpu_seconds=cpu, tokens_per_s=tokens / step.median)
    return LoopResult(
        case=case.name,
        parameters=plan.shape.parameters(),
        tokens_per_step=tokens,
        timing=timing,
        memory=memory,
        speed_ratio=Spread.of_ratios(taken[PLAIN]["step"], taken[BRAID]["step"]),
        cpu_speed_ratio=Spread.of_ratios(taken[PLAIN]["cpu"], taken[BRAID]["cpu"]),
        memory_ratio=memory[BRAID].training_bytes / memory[PLAIN].training_bytes,
        peak_ratio=memory[BRAID].peak_bytes / memory[PLAIN].peak_bytes,
        loss_difference=abs(losses[BRAID] / losses[PLAIN] - 1),
    )


def _in_fresh_process(function: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> R:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments, **named).result()


def _time_loops(
    plan: RunPlan, rounds: int, steps: int, seed: int
) -> tuple[dict[str, Seconds], dict[str, float]]:
    """Seconds of wall clock ("step") and of CPU ("cpu") of each side, and its last loss."""
    worker = _worker_alone(plan)
    tokens = plan.config.train.global_batch * plan.shape.sequence
    plain = _plain_step(plan, {name: value.detach() for name, value in worker.parameters()})
    losses: dict[str, float] = {}

    def timed(name: str, step_once: Callable[[int], float], numbers: range) -> dict[str, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        for step in numbers:
            losses[name] = step_once(step)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return {"step": wall / len(numbers), "cpu": cpu / len(numbers)}

    loops = {BRAID: lambda step: worker.train_step(step).loss_sum / tokens, PLAIN: plain}
    sides = {name: partial(timed, name, step_once) for name, step_once in loops.items()}
    taken = _timed_by_turns(sides, rounds, steps, random.Random(seed))
    worker.close()
    return taken, losses


def _worker_alone(plan: RunPlan) -> Worker:
    """A rank of Braid in this process, alone in its process group."""
    worker = Worker(0, LOOPBACK)
    port = worker.open_store(plan.config.cluster.group_timeout_s)
    worker.setup(plan, Rendezvous(address=LOOPBACK, port=port, generation=1))
    return worker


def _plain_step(plan: RunPlan, initial: Mapping[str, torch.Tensor] | None) -> Callable[[int], float]:
    """A step of the plain loop, on the same samples from the same reader; it returns the mean loss."""
    train = plan.config.train
    torch.set_num_threads(plan.config.cluster.threads_per_rank)
    model = PlainModel(plan.shape, DTYPES[train.dtype])
    if initial is not None:
        load_named(model, initial)
    trainer = PlainTrainer(model, train)
    shards = TokenShards.open(plan.data, "train", plan.shape.sequence)

    def step_once(step: int) -> float:
        ids = sample_ids(train.seed, shards.samples, step * train.global_batch, train.global_batch)
        windows = torch.from_numpy(shards.tokens_at(ids)).split(train.micro_batch)
        return trainer.step(step, windows)[0]

    return step_once


def _memory_of(name: str, plan: RunPlan, steps: int = 3) -> Memory:
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    imported = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS:"))
    if name == BRAID:
        worker = _worker_alone(plan)
        peak = max(worker.train_step(step).lifetime_peak_bytes for step in range(steps))
        worker.close()
    else:
        step_once = _plain_step(plan, None)
        for step in range(steps):
            step_once(step)
        peak = PeakMemory(torch.device("cpu")).of_lifetime()
    return Memory(imported_bytes=imported, peak_bytes=peak)


# -- Ray actors and processes --------------------------------------------------------------------------------


def compare_launchers(
    case: Case, plan: RunPlan, rounds: int, steps: int, order: random.Random
) -> LauncherResult:
    """Start both groups once and step them by turns."""
    with _both_groups(plan) as groups:
        sides = {name: partial(_time_group, group) for name, group in groups.items()}
        taken = _timed_by_turns(sides, rounds, steps, order)
    ray, processes = taken[RAY], taken[PROCESSES]
    return LauncherResult(
        case=case.name,
        timing={
            name: {f"{kind}_seconds": Spread.of(values) for kind, values in seconds.items()}
            for name, seconds in taken.items()
        },
        wall_ratio=Spread.of_ratios(ray["wall"], processes["wall"]),
        step_ratio=Spread.of_ratios(ray["step"], processes["step"]),
        cpu_ratio=Spread.of_ratios(ray["cpu"], processes["cpu"]),
    )


def _timed_by_turns(
    sides: Mapping[str, Callable[[range], dict[str, float]]], rounds: int, steps: int, draw: random.Random
) -> dict[str, Seconds]:
    taken = by_turns(sides, rounds, steps, draw)
    return {name: {kind: [one[kind] for one in each] for kind in each[0]} for name, each in taken.items()}


def _time_group(group: WorkerGroup, steps: range) -> dict[str, float]:
    begin = time.perf_counter()
    pids = group.call_all(Rank.process_id)
    call = time.perf_counter() - begin
    cpu_before = sum(map(_cpu_seconds, pids))
    inside = 0.0
    begin = time.perf_counter()
    for step in steps:
        inside += max(result.seconds for result in group.call_all(Rank.train_step, step))
    wall = time.perf_counter() - begin
    cpu = sum(map(_cpu_seconds, pids)) - cpu_before
    return {"wall": wall / len(steps), "step": inside / len(steps), "cpu": cpu / len(steps), "call": call}


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
        from braid.actors.controller.ranks.placement import RayLauncher

        groups: dict[str, WorkerGroup] = {}
        for name, launcher in ((RAY, RayLauncher(config)), (PROCESSES, ProcessLauncher(config))):
            group = groups[name] = launcher.start(config.layout().ranks)
            stack.callback(group.shutdown)
            group.call_all(Rank.setup, plan, rendezvous(group, config.cluster.group_timeout_s))
        yield groups
