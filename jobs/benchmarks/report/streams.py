"""Whether the executor's streams are ordered as they must be: bits of many schedules, again and again.

Run as it is, it compares; run with ``TORCH_CUDA_SANITIZER=1``, PyTorch's sanitizer looks at the same steps
for accesses to memory that no event orders, and says so on standard error.
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import torch

from braid.jobs.benchmarks.gpu import QUICK
from braid.jobs.benchmarks.gpu_operators import OperatorTable, measure_operators
from braid.jobs.benchmarks.gpu_rig import Rig, llama_8b
from braid.jobs.benchmarks.gpu_schedules import (
    Chain,
    decisions,
    largest_difference,
    repeatable_kernels,
    results_of,
)
from braid.jobs.benchmarks.report.claims import STREAM_BITS
from braid.jobs.benchmarks.report.findings import Finding, Sheet, Task, found, not_measured
from braid.scheduling.spec import ModelShape

_PAIRS: Final = 3
_SANITIZER: Final = "TORCH_CUDA_SANITIZER"
_LONGER: Final = (256, 2048)
"""Sequences of larger layers: kernels that last long overtake others than kernels that are over at once."""

Differences = dict[str, list[float]]
"""By schedule: the largest difference from the serial schedule's first results, of every run."""


def measure(task: Task, sheet: Sheet) -> None:
    """Run all schedules on layers of several sizes; the sanitizer, which is slow, sees the smallest."""
    sanitized = bool(os.environ.get(_SANITIZER))
    differences: Differences = defaultdict(list)
    for rig in rigs(task, smallest=sanitized):
        left_out = run_all(rig, times=2 if sanitized or task.quick else 10, into=differences)
    sheet.find(*verdicts(differences, left_out))


def rigs(task: Task, *, smallest: bool) -> Iterator[Rig]:
    """Two layers of some sizes, each as one of two tensor-parallel ranks holds it."""
    device = torch.device(task.device)
    dtype = torch.bfloat16 if task.on_gpu else torch.float32
    shapes: list[ModelShape] = [QUICK.shape]
    if not (smallest or task.quick):
        shapes += [
            replace(llama_8b(sequence), hidden=1024, ffn=3584, heads=8, kv_heads=2) for sequence in _LONGER
        ]
    yield from (Rig(shape=shape, device=device, dtype=dtype, layers=2, seed=task.seed) for shape in shapes)


def run_all(rig: Rig, times: int, into: Differences) -> dict[str, str]:
    """Compare every schedule's results with the serial one's, ``times`` times; what was left out, and why."""
    with rig.running(), repeatable_kernels():
        made, left_out = decisions(rig, beside_all(measure_operators(rig, 1, rig.seed)))
        chains = [Chain(rig, one, _PAIRS, rig.streams) for one in made]
        reference = results_of(rig, chains[0])
        for _ in range(times):
            for decision, chain in zip(made, chains, strict=True):
                into[decision.schedule].append(largest_difference(results_of(rig, chain), reference))
    return left_out


def beside_all(measured: OperatorTable) -> OperatorTable:
    """The same costs as if copies cost operators nothing: orders then bring together all that they can."""
    operators = (op if op.copy_oef is None else replace(op, copy_oef=1.0) for op in measured.operators)
    return replace(measured, operators=tuple(operators))


def verdicts(differences: Differences, left_out: dict[str, str]) -> Sequence[Finding]:
    """A verdict for each schedule."""
    compared = [
        found(
            STREAM_BITS,
            not any(values),
            name,
            numbers={"runs": len(values), "largest_difference": max(values)},
        )
        for name, values in differences.items()
    ]
    return [*compared, *(not_measured(STREAM_BITS, why, name) for name, why in left_out.items())]


def one_step(device: torch.device) -> float:
    """The largest difference between the serial schedule and one in turns, of the smallest layer, once."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rig = Rig(shape=QUICK.shape, device=device, dtype=dtype)
    with rig.running(), repeatable_kernels():
        serial, in_turns, *_ = decisions(rig, measure_operators(rig, 1, rig.seed))[0]
        chains = [Chain(rig, one, 1, rig.streams) for one in (serial, in_turns)]
        return largest_difference(*(results_of(rig, chain) for chain in chains))
