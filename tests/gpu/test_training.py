"""Training on one GPU: Braid's runtime against a plain PyTorch loop, eager and compiled.

The plain loop keeps weights, gradients and moments in fp32 and computes in bf16 by autocast: what it sums and
updates is as exact as in Braid.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter
from typing import Final

import pytest
import torch
from torch import Tensor

from braid.jobs.bench.plain_torch import PlainModel, PlainTrainer, load_named
from braid.kernels.trials import DeviceClock
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.flops import model_flops
from braid.scheduling.schedule.memory import rank_memory
from tests.gpu.conftest import Finding, Lab
from tests.gpu.runtime import SERIAL, TINY, Job, forget, host_rank, llama, peak_bytes, synchronise
from tests.gpu.test_schedules import NEAR, NOISE

PLAIN, COMPILED = "plain", "plain, torch.compile"
BRAID, GRAPHS, SPANLESS = "braid", "braid, graphs", "braid, no spans"
CHOSEN, CHOSEN_GRAPHS = "braid, kernels chosen", "braid, kernels chosen, graphs"
WAYS: Final = (BRAID, PLAIN, COMPILED, CHOSEN, CHOSEN_GRAPHS, SPANLESS)
"""In this order and then backwards, so that what the card loses as it gets warm reaches all alike."""


@dataclass
class Run:
    """One way to train: losses of the first steps, times of later ones, what kernels were chosen."""

    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    kernels: str = ""


Runs = dict[str, Run]


class AutocastModel(PlainModel):
    """The plain model with weights in fp32 that computes in bf16, as users of PyTorch write it."""

    def loss_sum(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        with torch.autocast(tokens_BS.device.type, torch.bfloat16):
            return super().loss_sum(tokens_BS, targets_BS)


def train(
    way: str, job: Job, lab: Lab, initial: dict[str, Tensor], run: Run, first: int, counted: int
) -> None:
    """Set one way up, take the losses of ``first`` steps, time ``counted`` more.

    ``initial``: the weights that all ways begin with; the first way, which is Braid's, gives them.
    """
    forget(lab.device)
    if way.startswith(BRAID):
        kernels = "auto" if way in (CHOSEN, CHOSEN_GRAPHS) else "torch"
        rank = host_rank(replace(job, kernels=kernels, spans=way != SPANLESS), lab.device)
        run.kernels = rank.kernels
        if not initial:
            initial |= rank.named()
        executor = rank.executor(job.serial, captured=way in (GRAPHS, CHOSEN_GRAPHS))
        step = lambda number: rank.step(executor, number).loss  # noqa: E731
    else:
        kind = AutocastModel if job.dtype is torch.bfloat16 else PlainModel
        model = kind(job.shape).to(lab.device)
        load_named(model, initial)
        if way == COMPILED:
            model.loss_sum = torch.compile(model.loss_sum, dynamic=False)  # type: ignore[method-assign]
        trainer = PlainTrainer(model, job.settings)
        step = lambda number: trainer.step(number, job.windows(number, lab.device))[0]  # noqa: E731
    run.losses = [step(number) for number in range(first)]
    for number in range(first, first + counted):
        synchronise(lab.device)
        begin = perf_counter()
        step(number)
        synchronise(lab.device)
        run.step_s.append(perf_counter() - begin)
    run.peak_bytes = peak_bytes(lab.device)


def all_ways(job: Job, lab: Lab, ways: Sequence[str], first: int, counted: int) -> Runs:
    """Train in all ways, one after the other, so that each has the card's memory for itself."""
    runs: Runs = {}
    initial: dict[str, Tensor] = {}
    for way in ways:
        train(way, job, lab, initial, runs.setdefault(way, Run()), first, counted)
    return runs


@pytest.fixture(scope="module")
def exact(lab: Lab) -> Runs:
    """A small model in fp32; twelve steps, so that a wrong weight decay is seen."""
    small = llama(4, 256, 1024, hidden=256, ffn=704, heads=8, kv_heads=4, head_dim=32)
    job = Job(shape=TINY if lab.tiny else small, micro_batch=2, micro_batches=2, dtype=torch.float32)
    return all_ways(job, lab, (BRAID, PLAIN, *[GRAPHS] * lab.on_gpu), 12, 0)


@pytest.fixture(scope="module")
def job(lab: Lab) -> Job:
    """1.1 billion parameters, which need 80 GB."""
    shape = llama(16, 2048, 32000, hidden=2048, ffn=8192, heads=16, kv_heads=4)
    return Job(shape=TINY if lab.tiny else shape, micro_batch=4, micro_batches=4, lr=3e-5)


@pytest.fixture(scope="module")
def large(job: Job, lab: Lab) -> Runs:
    """All ways on a large model in bf16."""
    ways = (*WAYS, *reversed(WAYS)) if lab.on_gpu else (BRAID, PLAIN)
    return all_ways(job, lab, ways, 4, 2 if lab.tiny else 8)


def two(runs: Runs, way: str, other: str) -> tuple[Run, Run]:
    """The runs of two ways; skips where they were left out."""
    if not runs.keys() >= {way, other}:
        pytest.skip("needs a CUDA device")
    return runs[way], runs[other]


def like(ours: Run, theirs: Run, allowed: float, finding: Finding) -> None:
    """Whether losses of two ways are alike, relative to each other."""
    off = max(abs(a / b - 1) for a, b in zip(ours.losses, theirs.losses, strict=True))
    finding.numbers |= {"largest_difference": off, "allowed": allowed, "last_loss": ours.losses[-1]}
    assert off <= allowed


@pytest.mark.parametrize(("way", "other", "allowed"), [(BRAID, PLAIN, 1e-5), (GRAPHS, BRAID, 0.0)])
def test_exact_losses(way: str, other: str, allowed: float, exact: Runs, finding: Finding) -> None:
    """In fp32 losses are a plain PyTorch loop's within 0.001 %, those of CUDA graphs to the bit."""
    like(*two(exact, way, other), allowed, finding)


PAIRS = ((BRAID, PLAIN), (CHOSEN, COMPILED), (CHOSEN_GRAPHS, CHOSEN), (SPANLESS, BRAID))


@pytest.mark.parametrize(("way", "other"), PAIRS)
def test_losses(way: str, other: str, large: Runs, finding: Finding) -> None:
    """At full size losses are alike within 1 %."""
    like(*two(large, way, other), 0.01, finding)


@pytest.mark.parametrize(("way", "other"), PAIRS)
def test_speed(way: str, other: str, large: Runs, finding: Finding) -> None:
    """One GPU trains no slower with Braid than a plain loop, nor in graphs or without spans than else."""
    ours, theirs = (median(run.step_s) for run in two(large, way, other))
    finding.timed(ours <= theirs * (1 + NOISE), speed_up=theirs / ours)


def test_utilisation(job: Job, large: Runs, lab: Lab, finding: Finding) -> None:
    """With kernels chosen a step takes at most twice the time that a large product needs for its FLOPs."""
    clock, size = DeviceClock(lab.device), 64 if lab.tiny else 8192
    a = torch.randn(size, size, device=lab.device).bfloat16()
    product_s = median(clock.ns(lambda: torch.mm(a, a)) for _ in range(9)) / 1e9
    bound_s = product_s * model_flops(job.shape, job.tokens) / (2 * size**3)
    rows = [["way", "tokens/s", "peak GiB", "of a product's rate", "last loss", "kernels"]]
    for way, run in large.items():
        seconds, peak = median(run.step_s), run.peak_bytes / 2**30
        rows.append([way, job.tokens / seconds, peak, bound_s / seconds, run.losses[-1], run.kernels])
    finding.tables.append(rows)
    share = bound_s / median(large.get(CHOSEN, large[BRAID]).step_s)
    finding.timed(share >= 0.5, share=share)


MODELS = {"8B": llama(32, 4096, 128256), "70B": llama(80, 4096, 128256, hidden=8192, ffn=28672, heads=64)}


@pytest.mark.parametrize("model", MODELS)
def test_one_of_many(model: str, lab: Lab, finding: Finding) -> None:
    """The planner predicts the peak memory of one rank of 32 within 10 %.

    Transfers take no time, so that what is left is the rank's own: kernels, launches, memory.
    """
    forget(lab.device)
    layout, stage = ParallelLayout(tp=8, pp=4), 1
    tiny = llama(8, 16, 64, hidden=64, ffn=64, heads=8, kv_heads=8, head_dim=8)
    job = Job(shape=tiny if lab.tiny else MODELS[model], micro_batches=8, dtype=lab.dtype, layout=layout)
    place = layout.rank_at({"pp": stage, "dp": 0, "cp": 0, "tp": 0})
    rank = host_rank(job, lab.device, place, free=True)
    for name in ("step_ms", "as a graph ms"):
        executor = rank.executor(job.serial, captured=lab.on_gpu and name != "step_ms")
        seconds = [rank.step(executor, step).seconds for step in range(2 if lab.tiny else 8)]
        finding.numbers[name] = 1e3 * median(seconds[-5:])
        finding.numbers.setdefault("peak_bytes", peak_bytes(lab.device) or 1)
    rank.streams.close()
    told = rank_memory(rank.parts.code, job.shape, job.setting(SERIAL).dtype, stage).total_bytes
    near = abs(told / finding.numbers["peak_bytes"] - 1) <= NEAR
    finding.timed(near, told_bytes=told)
