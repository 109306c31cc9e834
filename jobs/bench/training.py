"""Measures Braid's overhead where it cannot win: one rank against a plain PyTorch loop.

Both sides run in turn, in random order, in one process, so that ratios hold on machines that others use as
well; their memory is measured in separate processes. All of these processes are fresh: earlier work leaves a
heap that changes speeds by some percent.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
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
from braid.actors.controller.ranks.processes import LOOPBACK
from braid.actors.stage.data.mixture import open_splits
from braid.actors.stage.measure.peak_memory import PeakMemory
from braid.actors.stage.rank.messages import Rendezvous, RunPlan
from braid.actors.stage.rank.worker import Worker
from braid.jobs.bench.plain_torch import PlainModel, PlainTrainer, load_named
from braid.jobs.bench.rounds import Progress, Spread, by_turns, prepare_text
from braid.jobs.data.tokenizer import tokenizer_of
from braid.scheduling.schedule.text import write

BRAID, PLAIN = "braid", "plain PyTorch"

R = TypeVar("R")
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
class LoopResult:
    """Comparison of one rank of Braid with the plain loop, after the same steps. Ratios are Braid / plain."""

    case: str
    tokens_per_step: int
    step_seconds: Mapping[str, Spread]
    """Wall-clock seconds of a step, by side."""
    training_bytes: Mapping[str, int]
    """Peak resident memory above that of the imports, by side."""
    speed_ratio: Spread
    """Ratio of tokens per second, round by round."""
    memory_ratio: float
    loss_difference: float
    """Relative difference of the losses after the last step: both sides did the same work."""


def run(
    *, cases: Mapping[str, Case] = CASES, rounds: int = 9, progress: Progress = lambda text: None
) -> list[LoopResult]:
    """Compare both sides on all cases, from the same initial values on the same samples."""
    results = []
    with tempfile.TemporaryDirectory(prefix="braid-bench-") as folder:
        data = prepare_text(Path(folder))
        for name, case in cases.items():
            progress(f"{name}: {rounds} rounds of {BRAID} and {PLAIN} by turns")
            plan = _plan_of(case, data)
            memory = {side: _in_fresh_process(_training_bytes, side, plan) for side in (BRAID, PLAIN)}
            seconds, losses = _in_fresh_process(_time_loops, plan, rounds)
            results.append(
                LoopResult(
                    case=name,
                    tokens_per_step=_tokens(plan),
                    step_seconds={side: Spread.of(values) for side, values in seconds.items()},
                    training_bytes=memory,
                    speed_ratio=Spread.of_ratios(seconds[PLAIN], seconds[BRAID]),
                    memory_ratio=memory[BRAID] / memory[PLAIN],
                    loss_difference=abs(losses[BRAID] / losses[PLAIN] - 1),
                )
            )
    return results


def _plan_of(case: Case, data: Path) -> RunPlan:
    """Build the plan that the rank of a case gets, on the CPU."""
    config = parse_config(
        {
            "model": case["model"],
            "train": {**case["train"], "steps": 10_000, "warmup_steps": 100},
            "cluster": {"device": "cpu", "threads_per_rank": 1, "cpus_per_rank": 0.5},
        }
    )
    shape = config.check(tokenizer_of(config).vocabulary)
    schedule = write(build_schedule(config, shape))
    return RunPlan(config=config, shape=shape, schedule=schedule, data=str(data))


def _tokens(plan: RunPlan) -> int:
    return plan.config.train.global_batch * plan.shape.sequence


def _in_fresh_process(function: Callable[..., R], *arguments: Any) -> R:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _time_loops(plan: RunPlan, rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the seconds of a step of each side, by round, and each side's last loss."""
    worker = _worker_alone(plan)
    plain = _plain_step(plan, {name: value.detach() for name, value in worker.parameters()})
    loops = {BRAID: lambda step: worker.train_step(step).loss_sum / _tokens(plan), PLAIN: plain}
    losses: dict[str, float] = {}

    def timed(side: str, numbers: range) -> float:
        begin = time.perf_counter()
        for step in numbers:
            losses[side] = loops[side](step)
        return (time.perf_counter() - begin) / len(numbers)

    seconds = by_turns({side: partial(timed, side) for side in loops}, rounds)
    worker.close()
    return seconds, losses


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
    model = PlainModel(plan.shape)
    if initial is not None:
        load_named(model, initial)
    trainer = PlainTrainer(model, train)
    shards, _ = open_splits(plan.data, plan.shape.sequence)

    def step_once(step: int) -> float:
        ids = shards.order(train.seed, step * train.global_batch, train.global_batch)
        windows = torch.from_numpy(shards.tokens_at(ids)).split(train.micro_batch)
        return trainer.step(step, windows)[0]

    return step_once


def _training_bytes(side: str, plan: RunPlan) -> int:
    """Train three steps in this process; return its peak resident memory above that of the imports."""
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    imported = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS:"))
    if side == BRAID:
        worker = _worker_alone(plan)
        return max(worker.train_step(step).lifetime_peak_bytes for step in range(3)) - imported
    step_once = _plain_step(plan, None)
    for step in range(3):
        step_once(step)
    return PeakMemory(torch.device("cpu")).of_lifetime() - imported


def show(console: Console, results: Sequence[LoopResult]) -> None:
    """Print all results as one table."""
    numbers = ("s/step", "tokens/s", "speed ratio", "training MiB", "memory ratio")
    right = (Column(number, justify="right") for number in numbers)
    title = "one rank: medians of the rounds ± half the distance of their quartiles"
    table = Table("model", "", *right, title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for result in results:
        for side, step in result.step_seconds.items():
            first = side == BRAID  # ratios stand in the first row of two
            table.add_row(
                result.case if first else "",
                side,
                _shown(step),
                f"{result.tokens_per_step / step.median:,.0f}",
                _shown(result.speed_ratio) if first else "",
                f"{result.training_bytes[side] / 2**20:.0f}",
                f"{result.memory_ratio:.3f}" if first else "",
            )
    console.print(table)


def _shown(spread: Spread) -> str:
    """Format the median, and half the interquartile range in percent of it."""
    return f"{spread.median:.4f} ±{(spread.high - spread.low) / 2 / spread.median:4.1%}"
