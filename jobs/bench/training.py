"""Measures Braid's overhead where it cannot win: one rank against plain PyTorch, Ray actors against
processes.

Both sides of every comparison run in turn, in random order, within one run, so that ratios hold on machines
that others use as well. CPU seconds are reported beside wall seconds: other people's load affects them far
less. One rank and the plain loop are timed in turn in one process; their memory is measured in separate
processes. All of these processes are fresh: earlier work leaves a heap that changes speeds by some percent.
"""

import multiprocessing
import os
import platform
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich import box
from rich.console import Console
from rich.table import Column, Table

from braid.actors.config import parse_config
from braid.actors.controller.planning import build_schedule
from braid.actors.controller.ranks.group import WorkerGroup, rendezvous
from braid.actors.controller.ranks.processes import LOOPBACK, ProcessLauncher
from braid.actors.stage.data.mixture import open_splits
from braid.actors.stage.measure.memory import PeakMemory
from braid.actors.stage.rank.assembly import DTYPES
from braid.actors.stage.rank.interface import Rank
from braid.actors.stage.rank.messages import Rendezvous, RunPlan
from braid.actors.stage.rank.worker import Worker
from braid.jobs.bench.plain_torch import PlainModel, PlainTrainer, load_named
from braid.jobs.bench.rounds import Progress, Spread, by_turns, prepare_text
from braid.jobs.cluster.session import environment, ray_session
from braid.jobs.data.tokenizer import tokenizer_of
from braid.scheduling.schedule.text import write

BRAID, PLAIN = "braid", "plain"
RAY, PROCESSES = "Ray actors", "processes"

R = TypeVar("R")
Seconds = dict[str, list[float]]
"""Seconds per step of every counted round, by the kind of time ("wall", "cpu", ...)."""


Case = Mapping[str, Mapping[str, Any]]
"""A model and batch to be measured: sections of a configuration."""
CASES: Mapping[str, Case] = {
    "llama 256 x 4": {
        "model": {"hidden": 256, "layers": 4, "heads": 8, "kv_heads": 4, "sequence": 256},
        "train": {"global_batch": 8, "micro_batch": 4},
    },
    "llama 512 x 4": {
        "model": {"hidden": 512, "layers": 4, "heads": 8, "kv_heads": 4, "sequence": 512, "vocabulary": 8192},
        "train": {"global_batch": 4, "micro_batch": 2},
    },
    "gpt 256 x 4": {
        "model": {"family": "gpt", "hidden": 256, "layers": 4, "heads": 8, "sequence": 256},
        "train": {"global_batch": 8, "micro_batch": 4},
    },
}


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One side's steps: spreads of wall-clock and CPU seconds over the rounds."""

    step_seconds: Spread
    cpu_seconds: Spread
    tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class Memory:
    """One side's resident memory in a process of its own: after the imports, and its peak."""

    imported_bytes: int
    peak_bytes: int

    @property
    def training_bytes(self) -> int:
        """Memory above that of the imports."""
        return self.peak_bytes - self.imported_bytes


@dataclass(frozen=True, kw_only=True)
class LoopResult:
    """Comparison of one rank of Braid with the plain loop. Ratios are Braid / plain."""

    case: str
    parameters: int
    tokens_per_step: int
    timing: Mapping[str, Timing]
    memory: Mapping[str, Memory]
    speed_ratio: Spread  # ratio of tokens per wall-clock second, round by round
    cpu_speed_ratio: Spread  # ratio of tokens per CPU second, round by round
    memory_ratio: float  # ratio of peaks above the memory of imports
    peak_ratio: float  # ratio of whole peaks
    loss_difference: float  # relative difference of the losses after the last step: both did the same work


@dataclass(frozen=True, kw_only=True)
class LauncherResult:
    """Ray / processes for the same two ranks, round by round. ``timing``: by side, seconds of a step of the
    controller (``wall_seconds``), of the slowest rank (``step_seconds``), of all CPUs (``cpu_seconds``).
    """

    case: str
    timing: Mapping[str, Mapping[str, Spread]]
    wall_ratio: Spread
    step_ratio: Spread
    cpu_ratio: Spread


@dataclass(frozen=True, kw_only=True)
class TrainingBenchmark:
    """All results of `run`, and the machine on which they were measured."""

    machine: Mapping[str, Any]
    loops: tuple[LoopResult, ...]
    launchers: LauncherResult | None


def run(
    *,
    cases: Mapping[str, Case] = CASES,
    ray: bool = True,
    rounds: int = 9,
    steps: int = 2,
    threads: int = 1,
    seed: int | None = None,
    progress: Progress = lambda text: None,
) -> TrainingBenchmark:
    """Measure ``rounds`` of ``steps`` steps per side; ``ray``: also compare launchers, on the first case.

    ``seed`` determines the order of rounds and the initial values; by default it is drawn at random.
    """
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    order = random.Random(seed)
    before = os.getloadavg()
    loops, launchers = [], None
    with tempfile.TemporaryDirectory(prefix="braid-bench-") as folder:
        data = prepare_text(Path(folder))
        for name, case in cases.items():
            progress(f"{name}: {rounds} rounds of {BRAID} and {PLAIN} by turns")
            loops.append(_compare_loops(name, _plan_of(case, data, seed, threads), rounds, steps, order))
        if ray:
            name, case = next(iter(cases.items()))
            progress(f"{name}: {rounds} rounds of {RAY} and {PROCESSES} by turns")
            plan = _plan_of(case, data, seed, threads, tp=2)
            launchers = _compare_launchers(name, plan, rounds, steps, order)
    machine = {
        "cpus": len(os.sched_getaffinity(0)),
        "threads": threads,
        "torch": torch.__version__,
        "platform": platform.platform(),
        "load_before": before,
        "load_after": os.getloadavg(),
        "seed": seed,
    }
    return TrainingBenchmark(machine=machine, loops=tuple(loops), launchers=launchers)


def _plan_of(case: Case, data: Path, seed: int, threads: int, **parallel: int) -> RunPlan:
    """Build the plan that the ranks of a case get, on the CPU."""
    config = parse_config(
        {
            "model": case["model"],
            "train": {**case["train"], "seed": seed, "steps": 10_000, "warmup_steps": 100},
            "parallel": parallel,
            "cluster": {"device": "cpu", "threads_per_rank": threads, "cpus_per_rank": 0.5},
        }
    )
    shape = config.check(tokenizer_of(config).vocabulary)
    schedule = write(build_schedule(config, shape))
    return RunPlan(config=config, shape=shape, schedule=schedule, data=str(data))


def _timed_by_turns(
    sides: Mapping[str, Callable[[range], dict[str, float]]], rounds: int, steps: int, draw: random.Random
) -> dict[str, Seconds]:
    taken = by_turns(sides, rounds, steps, draw)
    return {name: {kind: [row[kind] for row in rows] for kind in rows[0]} for name, rows in taken.items()}


def _compare_loops(name: str, plan: RunPlan, rounds: int, steps: int, order: random.Random) -> LoopResult:
    """Train both sides from the same initial values on the same samples, by turns."""
    memory = {side: _in_fresh_process(_memory_of, side, plan) for side in (BRAID, PLAIN)}
    taken, losses = _in_fresh_process(_time_loops, plan, rounds, steps, order.randrange(2**31))
    tokens = plan.config.train.global_batch * plan.shape.sequence
    timing = {}
    for side in (BRAID, PLAIN):
        step, cpu = (Spread.of(taken[side][kind]) for kind in ("step", "cpu"))
        timing[side] = Timing(step_seconds=step, cpu_seconds=cpu, tokens_per_s=tokens / step.median)
    return LoopResult(
        case=name,
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


def _in_fresh_process(function: Callable[..., R], *arguments: Any) -> R:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _time_loops(
    plan: RunPlan, rounds: int, steps: int, seed: int
) -> tuple[dict[str, Seconds], dict[str, float]]:
    """Return each side's wall-clock ("step") and CPU ("cpu") seconds, and its last loss."""
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
    """Set up a rank of Braid in this process, alone in its process group."""
    worker = Worker(0, LOOPBACK)
    port = worker.open_store(plan.config.cluster.group_timeout_s)
    worker.setup(plan, Rendezvous(address=LOOPBACK, port=port, generation=1))
    return worker


def _plain_step(plan: RunPlan, initial: Mapping[str, torch.Tensor] | None) -> Callable[[int], float]:
    """Return a function that runs a plain step on the samples of Braid and returns the mean loss."""
    train = plan.config.train
    torch.set_num_threads(plan.config.cluster.threads_per_rank)
    model = PlainModel(plan.shape, DTYPES[train.dtype])
    if initial is not None:
        load_named(model, initial)
    trainer = PlainTrainer(model, train)
    shards, _ = open_splits(plan.data, plan.shape.sequence)

    def step_once(step: int) -> float:
        ids = shards.order(train.seed, step * train.global_batch, train.global_batch)
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


def _compare_launchers(
    name: str, plan: RunPlan, rounds: int, steps: int, order: random.Random
) -> LauncherResult:
    """Start both groups once and step them by turns."""
    with _both_groups(plan) as groups:
        sides = {side: partial(_time_group, group) for side, group in groups.items()}
        taken = _timed_by_turns(sides, rounds, steps, order)
    ratios = {kind: Spread.of_ratios(taken[RAY][kind], taken[PROCESSES][kind]) for kind in taken[RAY]}
    return LauncherResult(
        case=name,
        timing={
            side: {f"{kind}_seconds": Spread.of(values) for kind, values in seconds.items()}
            for side, seconds in taken.items()
        },
        wall_ratio=ratios["wall"],
        step_ratio=ratios["step"],
        cpu_ratio=ratios["cpu"],
    )


def _time_group(group: WorkerGroup, steps: range) -> dict[str, float]:
    begin = time.perf_counter()
    pids = group.call_all(Rank.process_id)
    call = time.perf_counter() - begin
    cpu_before = sum(map(_cpu_seconds, pids))
    begin = time.perf_counter()
    inside = [max(result.seconds for result in group.call_all(Rank.train_step, step)) for step in steps]
    wall = time.perf_counter() - begin
    cpu = sum(map(_cpu_seconds, pids)) - cpu_before
    return {
        "wall": wall / len(steps),
        "step": sum(inside) / len(steps),
        "cpu": cpu / len(steps),
        "call": call,
    }


def _cpu_seconds(pid: int) -> float:
    """Return the CPU seconds used by the living threads of a process on this machine (Linux)."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


@contextmanager
def _both_groups(plan: RunPlan) -> Iterator[dict[str, WorkerGroup]]:
    """Start the ranks of ``plan`` as actors of a private cluster, and as processes, ready to train."""
    config = plan.config
    with ExitStack() as stack:
        stack.enter_context(environment({}))
        os.environ.pop("RAY_ADDRESS", None)
        stack.enter_context(ray_session(config))
        from braid.actors.controller.ranks.placement import RayLauncher

        groups: dict[str, WorkerGroup] = {}
        for name, launcher in ((RAY, RayLauncher(config)), (PROCESSES, ProcessLauncher(config))):
            group = groups[name] = launcher.start(config.layout().ranks)
            stack.callback(group.shutdown)
            group.call_all(Rank.setup, plan, rendezvous(group, config.cluster.group_timeout_s))
        yield groups


def show(console: Console, result: TrainingBenchmark) -> None:
    """Print all results as tables."""
    machine = result.machine
    console.print(
        f"{machine['cpus']} CPUs, {machine['threads']} thread(s) per rank, torch {machine['torch']}, "
        f"load {machine['load_before'][0]:.1f} -> {machine['load_after'][0]:.1f}, seed {machine['seed']}; "
        f"medians of the rounds ± half the distance of their quartiles"
    )
    speeds = _table(
        f"one rank: seconds per step; ratios of tokens/s, {BRAID} / {PLAIN} PyTorch",
        ["model", ""],
        ["seconds", "tokens/s", "ratio", "ratio by CPU time"],
    )
    sizes = _table(
        f"one rank: resident memory in MiB; ratios {BRAID} / {PLAIN} PyTorch",
        ["model", ""],
        ["imports", "peak", "training", "training ratio", "peak ratio"],
    )
    for loop in result.loops:
        speed_ratios = [_shown(loop.speed_ratio), _shown(loop.cpu_speed_ratio)]
        size_ratios = [f"{loop.memory_ratio:.3f}", f"{loop.peak_ratio:.3f}"]
        for side in (BRAID, PLAIN):
            name = loop.case if side == BRAID else ""
            timing, memory = loop.timing[side], loop.memory[side]
            seconds = _shown(timing.step_seconds), f"{timing.tokens_per_s:,.0f}"
            speeds.add_row(name, side, *seconds, *speed_ratios)
            bytes_of_side = memory.imported_bytes, memory.peak_bytes, memory.training_bytes
            sizes.add_row(name, side, *(f"{size / 2**20:.0f}" for size in bytes_of_side), *size_ratios)
            speed_ratios, size_ratios = [], []  # stand in the first row of two
    console.print(speeds)
    console.print(sizes)
    if (launchers := result.launchers) is not None:
        table = _table(
            f"{launchers.case}, tp 2: seconds per step; ratios {RAY} / {PROCESSES}",
            [""],
            ["for the controller", "slowest rank", "CPU, all ranks", "empty call"],
        )
        for name in (RAY, PROCESSES):
            table.add_row(name, *map(_shown, launchers.timing[name].values()))
        ratios = launchers.wall_ratio, launchers.step_ratio, launchers.cpu_ratio
        table.add_row("ratio", *map(_shown, ratios))
        console.print(table)


def _table(title: str, labels: Sequence[str], numbers: Sequence[str]) -> Table:
    right = (Column(number, justify="right") for number in numbers)
    return Table(*labels, *right, title=title, title_justify="left", box=box.SIMPLE_HEAD)


def _shown(spread: Spread) -> str:
    """Format the median, and half the interquartile range in percent of it."""
    return f"{spread.median:.4f} ±{(spread.high - spread.low) / 2 / spread.median:4.1%}"
