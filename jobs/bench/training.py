"""What Braid costs where it cannot win: one rank against plain PyTorch, Ray actors against plain processes.

Both sides of every comparison run in turn, in random order, within one run, so that ratios hold on machines
that others use as well. CPU seconds stand beside wall seconds: other people's load reaches them far less.
"""

import os
import platform
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Column, Table

from braid.actors.config import parse_config
from braid.actors.controller.planning import build_schedule
from braid.actors.stage.rank.messages import RunPlan
from braid.jobs.bench.cases import CASES, Case, Spread, prepare_text
from braid.jobs.bench.loops import (
    BRAID,
    PLAIN,
    PROCESSES,
    RAY,
    LauncherResult,
    LoopResult,
    compare_launchers,
    compare_loops,
)
from braid.jobs.data.tokenizer import tokenizer_of
from braid.scheduling.schedule.text import write


@dataclass(frozen=True, kw_only=True)
class TrainingBenchmark:
    """Everything that `run` measured, and where."""

    machine: Mapping[str, Any]
    loops: tuple[LoopResult, ...]
    launchers: LauncherResult | None

    def as_json(self) -> dict[str, Any]:
        """Plain containers, for ``--json``."""
        return asdict(self)


def run(
    *,
    cases: Sequence[Case] = CASES,
    launcher_case: Case | None = CASES[0],
    rounds: int = 9,
    steps: int = 2,
    threads: int = 1,
    seed: int | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> TrainingBenchmark:
    """Measure. ``rounds`` of ``steps`` steps per side; ``launcher_case`` None leaves Ray out.

    ``seed`` orders the rounds and starts the models; by default it is drawn anew.
    """
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    order = random.Random(seed)
    before = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="braid-bench-") as folder:
        data = prepare_text(Path(folder))
        loops = []
        for case in cases:
            progress(f"{case.name}: {rounds} rounds of {BRAID} and {PLAIN} by turns")
            plan = _plan_of(case, data, seed, threads, {})
            loops.append(compare_loops(case, plan, rounds, steps, order))
        launchers = None
        if launcher_case is not None:
            progress(f"{launcher_case.name}: {rounds} rounds of {RAY} and {PROCESSES} by turns")
            plan = _plan_of(launcher_case, data, seed, threads, {"tp": 2})
            launchers = compare_launchers(launcher_case, plan, rounds, steps, order)
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


def _plan_of(case: Case, data: Path, seed: int, threads: int, parallel: Mapping[str, int]) -> RunPlan:
    """What the ranks of a case on the CPU are told."""
    config = parse_config(
        {
            "model": dict(case.model),
            "train": {**case.train, "seed": seed, "steps": 10_000, "warmup_steps": 100},
            "parallel": dict(parallel),
            "cluster": {"device": "cpu", "threads_per_rank": threads, "cpus_per_rank": 0.5},
        }
    )
    shape = config.check(tokenizer_of(config).vocabulary)
    schedule = write(build_schedule(config, shape))
    return RunPlan(config=config, shape=shape, schedule=schedule, data=str(data))


def show(console: Console, result: TrainingBenchmark) -> None:
    """Print everything as tables."""
    machine = result.machine
    console.print(
        f"{machine['cpus']} CPUs, {machine['threads']} thread(s) per rank, torch {machine['torch']}, "
        f"load {machine['load_before'][0]:.1f} -> {machine['load_after'][0]:.1f}, seed {machine['seed']}; "
        f"medians of the rounds ± half the distance of their quartiles"
    )
    console.print(_speed_table(result.loops))
    console.print(_memory_table(result.loops))
    if result.launchers is not None:
        console.print(_launcher_table(result.launchers))


def _table(title: str, labels: Sequence[str], numbers: Sequence[str]) -> Table:
    right = (Column(number, justify="right") for number in numbers)
    return Table(*labels, *right, title=title, title_justify="left", box=box.SIMPLE_HEAD)


def _speed_table(loops: Sequence[LoopResult]) -> Table:
    table = _table(
        f"one rank: seconds per step; ratios of tokens/s, {BRAID} / {PLAIN} PyTorch",
        ["model", ""],
        ["seconds", "tokens/s", "ratio", "ratio by CPU time"],
    )
    for loop in loops:
        ratios = _shown(loop.speed_ratio), _shown(loop.cpu_speed_ratio)
        for name, side, shown in zip((loop.case, ""), (BRAID, PLAIN), (ratios, ()), strict=True):
            timing = loop.timing[side]
            seconds = _shown(timing.step_seconds)
            table.add_row(name, side, seconds, f"{timing.tokens_per_s:,.0f}", *shown)
    return table


def _memory_table(loops: Sequence[LoopResult]) -> Table:
    table = _table(
        f"one rank: resident memory in MiB; ratios {BRAID} / {PLAIN} PyTorch",
        ["model", ""],
        ["imports", "peak", "training", "training ratio", "peak ratio"],
    )
    for loop in loops:
        ratios = f"{loop.memory_ratio:.3f}", f"{loop.peak_ratio:.3f}"
        for name, side, shown in zip((loop.case, ""), (BRAID, PLAIN), (ratios, ()), strict=True):
            memory = loop.memory[side]
            sizes = memory.imported_bytes, memory.peak_bytes, memory.training_bytes
            table.add_row(name, side, *(f"{size / 2**20:.0f}" for size in sizes), *shown)
    return table


def _launcher_table(result: LauncherResult) -> Table:
    table = _table(
        f"{result.case}, tp 2: seconds per step; ratios {RAY} / {PROCESSES}",
        [""],
        ["for the controller", "slowest rank", "CPU, all ranks", "empty call"],
    )
    for name in (RAY, PROCESSES):
        table.add_row(name, *map(_shown, result.timing[name].values()))
    table.add_row("ratio", *map(_shown, (result.wall_ratio, result.step_ratio, result.cpu_ratio)))
    return table


def _shown(spread: Spread) -> str:
    """The median, and half the distance of the quartiles in percent of it."""
    return f"{spread.median:.4f} ±{(spread.high - spread.low) / 2 / spread.median:4.1%}"
