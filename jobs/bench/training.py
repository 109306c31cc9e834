"""Measures Braid's overhead where it cannot win: one rank against a plain PyTorch loop.

Both sides run in turn, in random order, in one process, so that ratios hold on machines that others use as
well. The process is fresh for each case: earlier work leaves a heap that changes speeds by some percent.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Column, Table

from braid.actors.config import parse_config
from braid.actors.controller.planning import build_schedule
from braid.actors.controller.ranks.processes import LOOPBACK
from braid.actors.stage.data.mixture import open_splits
from braid.actors.stage.rank.messages import Rendezvous, RunPlan
from braid.actors.stage.rank.worker import Worker
from braid.jobs.bench.plain_torch import PlainModel, PlainTrainer, load_named
from braid.jobs.bench.rounds import Progress, Spread, by_turns, prepare_text
from braid.jobs.data.tokenizer import tokenizer_of
from braid.scheduling.schedule.text import write

BRAID, PLAIN = "braid", "plain PyTorch"

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
    speed_ratio: Spread
    """Ratio of tokens per second, round by round."""
    loss_difference: float
    """Relative difference of the losses after the last step: both sides did the same work."""


def run(
    *, cases: Mapping[str, Case] = CASES, rounds: int = 9, progress: Progress = lambda text: None
) -> list[LoopResult]:
    """Compare both sides on all cases."""
    results = []
    with tempfile.TemporaryDirectory(prefix="braid-bench-") as folder:
        data = prepare_text(Path(folder))
        for name, case in cases.items():
            progress(f"{name}: {rounds} rounds of {BRAID} and {PLAIN} by turns")
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                results.append(pool.submit(_compared, name, case, str(data), rounds).result())
    return results


def _compared(name: str, case: Case, data: str, rounds: int) -> LoopResult:
    """Train both sides on a CPU by turns, from the same initial values on the same samples."""
    config = parse_config(
        {
            "model": case["model"],
            "train": {**case["train"], "steps": 10_000, "warmup_steps": 100},
            "cluster": {"device": "cpu", "threads_per_rank": 1, "cpus_per_rank": 0.5},
        }
    )
    shape, train = config.check(tokenizer_of(config).vocabulary), config.train
    schedule = write(build_schedule(config, shape))
    tokens = train.global_batch * shape.sequence
    worker = Worker(0, LOOPBACK)  # alone in its process group
    port = worker.open_store(config.cluster.group_timeout_s)
    plan = RunPlan(config=config, shape=shape, schedule=schedule, data=data)
    worker.setup(plan, Rendezvous(address=LOOPBACK, port=port, generation=1))
    model = PlainModel(shape)
    load_named(model, {name: value.detach() for name, value in worker.parameters()})
    trainer, (samples, _) = PlainTrainer(model, train), open_splits(data, shape.sequence)

    def plain_step(step: int) -> float:
        ids = samples.order(train.seed, step * train.global_batch, train.global_batch)
        windows = torch.from_numpy(samples.tokens_at(ids)).split(train.micro_batch)
        return trainer.step(step, windows)[0]

    loops = {BRAID: lambda step: worker.train_step(step).loss_sum / tokens, PLAIN: plain_step}
    losses: dict[str, float] = {}

    def timed(side: str, steps: range) -> float:
        begin = time.perf_counter()
        for step in steps:
            losses[side] = loops[side](step)
        return (time.perf_counter() - begin) / len(steps)

    seconds = by_turns({side: partial(timed, side) for side in loops}, rounds)
    worker.close()
    return LoopResult(
        case=name,
        tokens_per_step=tokens,
        step_seconds={side: Spread.of(values) for side, values in seconds.items()},
        speed_ratio=Spread.of_ratios(seconds[PLAIN], seconds[BRAID]),
        loss_difference=abs(losses[BRAID] / losses[PLAIN] - 1),
    )


def show(console: Console, results: Sequence[LoopResult]) -> None:
    """Print all results as one table."""
    right = (Column(number, justify="right") for number in ("s/step", "tokens/s", "speed ratio"))
    title = "one rank: medians of the rounds ± half the distance of their quartiles"
    table = Table("model", "", *right, title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for result in results:
        name, ratio = result.case, _shown(result.speed_ratio)
        for side, step in result.step_seconds.items():
            speed = f"{result.tokens_per_step / step.median:,.0f}"
            table.add_row(name, side, _shown(step), speed, ratio)
            name = ratio = ""  # they stand in the first row of two
    console.print(table)


def _shown(spread: Spread) -> str:
    """Format the median, and half the interquartile range in percent of it."""
    return f"{spread.median:.4f} ±{(spread.high - spread.low) / 2 / spread.median:4.1%}"
