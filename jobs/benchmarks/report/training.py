"""Training on one GPU: Braid's runtime against a plain PyTorch loop, eager and compiled, loss by loss.

The plain loop keeps weights, gradients and moments in fp32 and computes in bf16 by autocast: what it sums and
updates is as exact as in Braid. A second plain loop keeps all in bf16: it does less, and is only stated.
"""

import gc
import importlib.util
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor

from braid.actors.stage.accelerator import accelerator_of
from braid.actors.stage.streams import streams_on
from braid.jobs.benchmarks.gpu import table
from braid.jobs.benchmarks.plain_torch import (
    PlainModel,
    PlainSettings,
    PlainSizes,
    PlainTrainer,
    load_named,
)
from braid.jobs.benchmarks.report.claims import (
    COMPILED_SPEED,
    EXACT_LOSSES,
    LOSSES,
    PLAIN_SPEED,
    STEP_GRAPH_BITS,
    STEP_GRAPH_SPEED,
    TRITON_LOSSES,
)
from braid.jobs.benchmarks.report.findings import Finding, Sheet, Task, found, not_measured, timed
from braid.jobs.benchmarks.report.runtime import Job, RuntimeRank, lone_mesh
from braid.scheduling.spec import ModelShape

BRAID: Final = "braid"
GRAPHED: Final = "braid, steps as CUDA graphs"
TRITON: Final = "braid, Triton's kernels"
CHOSEN: Final = "braid, kernels chosen"
KERNELS: Final = {TRITON: "triton", CHOSEN: "auto"}
PLAIN: Final = "plain"
COMPILED: Final = "plain, torch.compile"
NARROW: Final = "plain, all in bf16"
NOISE: Final = 0.02
EXACT: Final = 1e-5
NEAR: Final = 0.01

_COUNTED: Final = 8
_WARM: Final = 4
"""Steps that are not timed; their losses are compared."""
_EXACT_STEPS: Final = 12
"""Enough for a wrong weight decay to be seen."""

SMALL: Final = ModelShape(
    family="llama",
    hidden=256,
    ffn=704,
    layers=4,
    heads=8,
    kv_heads=4,
    head_dim=32,
    vocabulary=1024,
    sequence=256,
)
TINY: Final = replace(SMALL, hidden=32, ffn=64, layers=2, heads=4, kv_heads=2, head_dim=8, sequence=16)
BILLION: Final = ModelShape(
    family="llama",
    hidden=2048,
    ffn=8192,
    layers=16,
    heads=16,
    kv_heads=4,
    head_dim=128,
    vocabulary=32000,
    sequence=2048,
)


@dataclass(kw_only=True)
class Run:
    """One way to train, and what came of it."""

    losses: list[float] = field(default_factory=list)
    """Of the first steps."""
    step_s: list[float] = field(default_factory=list)
    """Seconds of every timed step, by the host's clock."""
    peak_bytes: int | None = None
    """Most memory of the card that was in use at once; None on a CPU."""
    note: str = ""
    """Why it did not run."""
    kernels: str = ""
    """Those that were chosen."""


Runs = dict[str, Run]
StepOf = Callable[[int], float]
"""Does a step of training; returns its mean loss."""


def measure(task: Task, sheet: Sheet) -> None:
    """Losses in fp32 on a small model, then losses, speed and memory on one as large as the card takes."""
    device = torch.device(task.device)
    small = Job(
        shape=TINY if task.quick else SMALL,
        micro_batch=2,
        micro_batches=2,
        dtype=torch.float32,
        seed=task.seed,
    )
    ways: Sequence[str] = (BRAID, PLAIN, GRAPHED) if task.on_gpu else (BRAID, PLAIN)
    exact = train_all(small, device, ways, task, first=_EXACT_STEPS, counted=0)
    sheet.data("exact", _plain(exact))
    sheet.find(like(EXACT_LOSSES, exact, BRAID, EXACT))
    sheet.find(like(STEP_GRAPH_BITS, exact, GRAPHED, 0.0, to=BRAID))
    large = job_of(task, device)
    if task.on_gpu:
        ways = (BRAID, PLAIN, COMPILED, CHOSEN, GRAPHED, TRITON, NARROW, PLAIN, BRAID, COMPILED, CHOSEN)
    runs = train_all(large, device, ways, task, first=_WARM, counted=2 if task.quick else _COUNTED)
    sheet.data("job", {**asdict(large.shape), "parameters": large.shape.parameters(), "tokens": large.tokens})
    sheet.data("runs", _plain(runs))
    sheet.table(_title(large), lines(runs, large.tokens))
    sheet.find(*verdicts(runs, large.tokens, task.no_clock))


def job_of(task: Task, device: torch.device) -> Job:
    """What is timed: about a billion parameters where they fit."""
    if task.quick:
        return Job(shape=TINY, micro_batch=2, micro_batches=2, dtype=torch.bfloat16, seed=task.seed)
    job = Job(shape=BILLION, micro_batch=4, micro_batches=4, dtype=torch.bfloat16, lr=3e-5, seed=task.seed)
    return job.fitted(torch.cuda.get_device_properties(device).total_memory)


# -- the ways to train -------------------------------------------------------------------------------------


class AutocastModel(PlainModel):
    """The plain model with weights in fp32 that computes in bf16, as users of PyTorch write it."""

    def loss_sum(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        with torch.autocast(tokens_BS.device.type, torch.bfloat16):
            return super().loss_sum(tokens_BS, targets_BS)


def braid_side(job: Job, device: torch.device, *, captured: bool) -> tuple[StepOf, RuntimeRank]:
    """Braid's runtime on one rank, under the schedule of one rank, which has nothing to hide."""
    rank = RuntimeRank(job, lone_mesh(job), device, streams_on(accelerator_of(device)))
    executor = rank.executor(job.code(job.serial), captured=captured)
    return lambda step: rank.step(executor, step).loss, rank


def plain_side(way: str, job: Job, device: torch.device, initial: Mapping[str, Tensor]) -> StepOf:
    """A plain loop on the same samples, from the same weights."""
    mixed = job.dtype is torch.bfloat16 and way != NARROW
    kind = AutocastModel if mixed else PlainModel
    model = kind(PlainSizes.of(job.shape), torch.float32 if mixed else job.dtype).to(device)
    load_named(model, initial)
    if way == COMPILED:
        model.loss_sum = torch.compile(model.loss_sum, dynamic=False)  # type: ignore[method-assign]
    trainer = PlainTrainer(model, PlainSettings(**asdict(job.settings)))
    return lambda step: trainer.step(step, job.windows(step, device))[0]


def train_all(
    job: Job, device: torch.device, ways: Sequence[str], task: Task, *, first: int, counted: int
) -> Runs:
    """Train in all ways, one after the other, so that each has the card's memory for itself.

    ``first`` steps give their losses, ``counted`` more are timed.
    A way that comes twice is timed twice: what the card loses as it gets warm then reaches all alike.
    """
    runs: Runs = {}
    initial: dict[str, Tensor] = {}
    for way in ways:
        run = runs.setdefault(way, Run())
        if run.note or (way == TRITON and importlib.util.find_spec("triton") is None):
            run.note = run.note or "Triton is not installed"
            continue
        if task.left_s < 30 and not task.quick:
            run.note = run.note if run.step_s else "no time left"
            continue
        _free(device)
        try:
            _train(way, job, device, initial, run, first, counted)
        except Exception as error:
            if way in (BRAID, PLAIN):
                raise
            run.note = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:200]
    return runs


def _train(
    way: str,
    job: Job,
    device: torch.device,
    initial: dict[str, Tensor],
    run: Run,
    first: int,
    counted: int,
) -> None:
    """Set one way up, take the first losses, time the steps that follow."""
    if way in (BRAID, GRAPHED, *KERNELS):
        own = replace(job, kernels=KERNELS.get(way, "torch"))
        step, rank = braid_side(own, device, captured=way == GRAPHED)
        run.kernels = rank.kernels
        if not initial:
            initial |= {name: tensor.detach().cpu().clone() for name, tensor in rank.named()}
    else:
        step = plain_side(way, job, device, initial)
    run.losses = [step(number) for number in range(first)]
    for number in range(first, first + counted):
        _synchronise(device)
        begin = time.perf_counter()
        step(number)
        _synchronise(device)
        run.step_s.append(time.perf_counter() - begin)
    if device.type == "cuda":
        run.peak_bytes = torch.cuda.max_memory_allocated(device)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free(device: torch.device) -> None:
    """Give back what the way before has held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


# -- verdicts ----------------------------------------------------------------------------------------------


def like(claim: str, runs: Runs, way: str, allowed: float, to: str = PLAIN) -> Finding:
    """Whether losses are those of another way, relative to them; the first step that is further off."""
    absent = Run(note="needs a CUDA device")
    ours, theirs = runs.get(way, absent), runs.get(to, absent)
    if note := ours.note or theirs.note:
        return not_measured(claim, note)
    if not ours.losses or len(ours.losses) != len(theirs.losses):
        return not_measured(claim, "there are no losses to compare")
    pairs = zip(ours.losses, theirs.losses, strict=True)
    off = max(abs(a / b - 1) if math.isfinite(a) else math.inf for a, b in pairs)
    numbers = {
        "steps": len(ours.losses),
        "largest_difference": off,
        "allowed": allowed,
        "first_loss": ours.losses[0],
        "last_loss": ours.losses[-1],
    }
    return found(claim, off <= allowed, numbers=numbers)


def verdicts(runs: Runs, tokens: int, no_clock: str) -> Iterator[Finding]:
    """On losses and speed; ``no_clock``: why times mean nothing."""
    yield like(LOSSES, runs, BRAID, NEAR)
    yield like(TRITON_LOSSES, runs, TRITON, NEAR, to=BRAID)
    rates = {way: tokens / median(run.step_s) for way, run in runs.items() if run.step_s}
    if BRAID not in rates or PLAIN not in rates:
        yield not_measured(PLAIN_SPEED, "one of both was not timed")
        return
    numbers: dict[str, Any] = {f"tokens_per_s {way}": round(rate) for way, rate in rates.items()}
    numbers |= {f"speed_up over {way}": rates[BRAID] / rates[way] for way in rates if way != BRAID}
    if GRAPHED in rates:
        yield timed(STEP_GRAPH_SPEED, rates[GRAPHED] >= rates[BRAID] * (1 - NOISE), no_clock, numbers=numbers)
    else:
        yield not_measured(STEP_GRAPH_SPEED, runs.get(GRAPHED, Run(note="needs a CUDA device")).note)
    yield timed(PLAIN_SPEED, rates[BRAID] >= rates[PLAIN] * (1 - NOISE), no_clock, numbers=numbers)
    if CHOSEN not in rates or COMPILED not in rates:
        yield not_measured(COMPILED_SPEED, "one of both was not timed")
        return
    numbers = {"speed_up": rates[CHOSEN] / rates[COMPILED], "kernels": runs[CHOSEN].kernels}
    yield timed(COMPILED_SPEED, rates[CHOSEN] >= rates[COMPILED] * (1 - NOISE), no_clock, numbers=numbers)


# -- for people --------------------------------------------------------------------------------------------


def _plain(runs: Runs) -> dict[str, Any]:
    return {way: asdict(run) for way, run in runs.items()}


def _title(job: Job) -> str:
    shape = job.shape
    return (
        f"A Llama of {shape.parameters() / 1e6:.4g} M parameters ({shape.layers} layers, "
        f"hidden {shape.hidden}, sequence {shape.sequence}), {job.micro_batches} micro-batches of "
        f"{job.micro_batch} samples"
    )


def lines(runs: Runs, tokens: int) -> list[str]:
    """Tokens per second, memory, losses of every way, and why others are missing."""
    rows = []
    for way, run in runs.items():
        rate = f"{tokens / median(run.step_s):,.0f}" if run.step_s else "-"
        peak = f"{run.peak_bytes / 2**30:.2f}" if run.peak_bytes is not None else "-"
        losses = f"{run.losses[0]:.5f} -> {run.losses[-1]:.5f}" if run.losses else "-"
        rows.append((way, rate, peak, losses))
    notes = [f"{way}: not measured; {run.note}" for way, run in runs.items() if run.note]
    notes += [f"{way}: {run.kernels}" for way, run in runs.items() if run.kernels]
    return [*table(("", "tokens/s", "peak GiB", "losses"), rows), *notes]
