"""Verdicts on Triton's kernels, one after the other: tuned, checked, timed beside their rivals."""

import importlib.util
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import torch

from braid.jobs.benchmarks.gpu_rig import first_line
from braid.jobs.benchmarks.report.claims import KERNEL_FAST, KERNEL_RIGHT
from braid.jobs.benchmarks.report.findings import Finding, Sheet, Task, found, not_measured, timed

if TYPE_CHECKING:  # Triton may not be installed
    from braid.jobs.benchmarks.kernels import KernelTime

NOISE: Final = 0.02
"""A kernel that is slower by less is no slower: so far medians of some rounds are apart."""
_ROUNDS: Final = 21
_LEAST_S: Final = 30
"""With less time left no other kernel is begun: it may have to be compiled in six ways."""


def measure(task: Task, sheet: Sheet) -> None:
    """All kernels, as far as time allows."""
    if importlib.util.find_spec("triton") is None:
        sheet.find(*(not_measured(claim, "Triton is not installed") for claim in (KERNEL_RIGHT, KERNEL_FAST)))
        return
    from braid.jobs.benchmarks.kernel_cases import cases
    from braid.jobs.benchmarks.kernels import FULL, QUICK, Card, time_lines

    device, rounds = torch.device(task.device), 1 if task.quick else _ROUNDS
    torch.manual_seed(task.seed)
    order, shapes = random.Random(task.seed), QUICK if task.quick else FULL
    card = Card.measured(device, task.quick, rounds)
    times = []
    for case in cases(shapes, device):
        if task.left_s < _LEAST_S and not task.quick:
            left = (not_measured(c, "no time left", "the other kernels") for c in (KERNEL_RIGHT, KERNEL_FAST))
            sheet.find(*left)
            break
        try:
            if task.on_gpu:
                card.tune(case)
            sheet.find(checked(case.name, task, device))
            times.append(card.measure(case, order, rounds))
            sheet.find(*verdicts(times[-1], task.no_clock))
        except Exception as error:  # the other kernels are to be measured, too
            sheet.find(*broken(case.name, error))
    sheet.data("copy_bytes_per_s", card.copy_bytes_per_s)
    sheet.data("product_flops_per_s", card.product_flops_per_s)
    sheet.data("times_ns", {one.kernel: one.times_ns for one in times})
    sheet.table("Times of kernels and rivals, microseconds", time_lines(times))


def checked(name: str, task: Task, device: torch.device) -> Finding:
    """A kernel against its reference, at the shapes that are timed."""
    from braid.jobs.benchmarks.kernel_checks import CHECKS, TOLERANCES, Operands, error
    from braid.jobs.benchmarks.kernels import FULL, QUICK

    dtype = torch.bfloat16 if task.on_gpu else torch.float32
    worst = error(CHECKS[name](Operands(QUICK if task.quick else FULL, device, dtype)))
    numbers = {"error": worst, "allowed": TOLERANCES[dtype]}
    return found(KERNEL_RIGHT, worst <= TOLERANCES[dtype], name, numbers=numbers)


def broken(name: str, error: Exception) -> Iterator[Finding]:
    """Of a kernel that does not run: that is a failure unless the card is too small."""
    why = f"{type(error).__name__}: {first_line(error)}"[:300]
    if not isinstance(error, torch.cuda.OutOfMemoryError):
        yield found(KERNEL_RIGHT, False, name, why)
    yield not_measured(KERNEL_FAST, why, name)


def verdicts(one: "KernelTime", no_clock: str) -> Iterator[Finding]:
    """Whether a kernel wins."""
    numbers = {
        "speed_up": one.speedup,
        "share_of_limit": one.share_of_limit,
        "bound": one.bound,
        **{f"{way} ns": ns for way, ns in one.times_ns.items()},
    }
    if one.speedup is None:
        yield not_measured(KERNEL_FAST, "it has no rival here", one.kernel, numbers=numbers)
    else:
        yield timed(KERNEL_FAST, one.speedup >= 1 - NOISE, no_clock, one.kernel, numbers=numbers)
