"""The least that has a bit of everything, for ``compute-sanitizer``, which slows it down a hundred times."""

import importlib.util
from dataclasses import replace
from typing import Final

import torch

from braid.jobs.benchmarks.report.findings import Sheet, Task
from braid.jobs.benchmarks.report.streams import one_step

_WIDTH: Final = 256
"""Of rows that sums run over: it fills a warp, whose lanes then hold different columns. Lanes that share one
hold sums that differ in their last bits, and all write theirs (triton-lang/triton#7264)."""


def measure(task: Task, sheet: Sheet) -> None:
    """Steps of the executor on the smallest layer, and every Triton kernel once on the smallest operands."""
    device = torch.device(task.device)
    sheet.data("largest_difference", one_step(device))
    if importlib.util.find_spec("triton") is None:
        sheet.data("kernels", "Triton is not installed")
        return
    from braid.jobs.benchmarks.kernel_cases import OURS, cases
    from braid.jobs.benchmarks.kernels import QUICK

    names = []
    for case in cases(replace(QUICK, hidden=_WIDTH), device):
        case.ways[OURS]()
        names.append(case.name)
    sheet.data("kernels", names)
