"""One rank of Braid against the plain PyTorch loop: speed side by side in one process, memory in one each.

All of these processes are fresh: what ran before leaves a heap behind that changes speeds by some percent.
"""

import multiprocessing
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

import torch

from braid.actors.controller.processes import LOOPBACK
from braid.actors.stage.assembly import DTYPES
from braid.actors.stage.data import TokenShards, sample_ids
from braid.actors.stage.messages import Rendezvous, RunPlan
from braid.actors.stage.worker import Worker
from braid.jobs.benchmarks.cases import Case, Spread, tokens_per_step
from braid.jobs.benchmarks.plain_torch import (
    PlainModel,
    PlainSettings,
    PlainSizes,
    PlainTrainer,
    load_named,
)

BRAID, PLAIN = "braid", "plain"

P = ParamSpec("P")
R = TypeVar("R")


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


class Side(Protocol):
    """One side of the comparison."""

    def step(self, step: int) -> float:
        """Do step ``step`` of training; returns the mean loss."""


class BraidSide:
    """A `Worker` of ours in this process, alone in its process group."""

    def __init__(self, plan: RunPlan) -> None:
        self.worker = Worker(0, LOOPBACK)
        timeout_s = plan.config.cluster.group_timeout_s
        port = self.worker.open_store(timeout_s)
        self.worker.setup(plan, Rendezvous(address=LOOPBACK, port=port, generation=1))
        self._tokens = tokens_per_step(plan)

    def step(self, step: int) -> float:
        """One call of the controller."""
        return self.worker.train_step(step).loss_sum / self._tokens


class PlainSide:
    """The plain loop, on the same samples from the same reader."""

    def __init__(self, plan: RunPlan, initial: Mapping[str, torch.Tensor] | None) -> None:
        train = plan.config.train
        torch.set_num_threads(plan.config.cluster.threads_per_rank)
        model = PlainModel(PlainSizes.of(plan.shape), DTYPES[train.dtype])
        if initial is not None:
            load_named(model, initial)
        names = PlainSettings.__dataclass_fields__
        self._trainer = PlainTrainer(model, PlainSettings(**{name: getattr(train, name) for name in names}))
        self._train = train
        self._shards = TokenShards.open(plan.data, "train", plan.shape.sequence)

    def step(self, step: int) -> float:
        """One step."""
        batch = self._train.global_batch
        ids = sample_ids(self._train.seed, self._shards.samples, step * batch, batch)
        windows = torch.from_numpy(self._shards.tokens_at(ids)).split(self._train.micro_batch)
        return self._trainer.step(step, windows)[0]


def compare_loops(case: Case, plan: RunPlan, rounds: int, steps: int, order: random.Random) -> LoopResult:
    """Train both from the same initial values on the same samples, by turns."""
    memory = {name: _in_fresh_process(_memory_of, name, plan) for name in (BRAID, PLAIN)}
    tokens = tokens_per_step(plan)
    wall, cpu, losses = _in_fresh_process(_time_by_turns, plan, rounds, steps, order.randrange(2**31))
    return LoopResult(
        case=case.name,
        parameters=plan.shape.parameters(),
        tokens_per_step=tokens,
        timing={name: _timing(wall[name], cpu[name], tokens) for name in (BRAID, PLAIN)},
        memory=memory,
        speed_ratio=Spread.of_ratios(wall[PLAIN], wall[BRAID]),
        cpu_speed_ratio=Spread.of_ratios(cpu[PLAIN], cpu[BRAID]),
        memory_ratio=memory[BRAID].training_bytes / memory[PLAIN].training_bytes,
        peak_ratio=memory[BRAID].peak_bytes / memory[PLAIN].peak_bytes,
        loss_difference=abs(losses[BRAID] / losses[PLAIN] - 1),
    )


Seconds = dict[str, list[float]]
"""Seconds per step of every counted round, by side."""


def _in_fresh_process(function: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> R:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments, **named).result()


def _time_by_turns(
    plan: RunPlan, rounds: int, steps: int, seed: int
) -> tuple[Seconds, Seconds, dict[str, float]]:
    """Seconds of wall clock and of CPU, and the last losses; a first round is not counted."""
    order = random.Random(seed)
    braid = BraidSide(plan)
    plain = PlainSide(plan, {name: value.detach() for name, value in braid.worker.parameters()})
    sides: dict[str, Side] = {BRAID: braid, PLAIN: plain}
    wall: Seconds = {name: [] for name in sides}
    cpu: Seconds = {name: [] for name in sides}
    losses: dict[str, float] = {}
    for turn in range(rounds + 1):
        for name in order.sample(sorted(sides), len(sides)):
            wall_begin, cpu_begin = time.perf_counter(), time.process_time()
            for step in range(turn * steps, (turn + 1) * steps):
                losses[name] = sides[name].step(step)
            if turn:
                wall[name].append((time.perf_counter() - wall_begin) / steps)
                cpu[name].append((time.process_time() - cpu_begin) / steps)
    braid.worker.close()
    return wall, cpu, losses


def _timing(wall: list[float], cpu: list[float], tokens: int) -> Timing:
    seconds = Spread.of(wall)
    return Timing(step_seconds=seconds, cpu_seconds=Spread.of(cpu), tokens_per_s=tokens / seconds.median)


def _memory_of(name: str, plan: RunPlan, steps: int = 3) -> Memory:
    imported = _memory_bytes("VmRSS")
    side = BraidSide(plan) if name == BRAID else PlainSide(plan, None)
    for step in range(steps):
        side.step(step)
    peak = _memory_bytes("VmHWM")
    if isinstance(side, BraidSide):
        side.worker.close()
    return Memory(imported_bytes=imported, peak_bytes=peak)


def _memory_bytes(field: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (highest so far) of this process.

    Not getrusage's ru_maxrss: a child inherits that from its parent, exec or not.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == field:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; memory is measured on Linux only")
