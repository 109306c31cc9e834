"""The least that has a bit of everything, for ``compute-sanitizer``, which slows it down a hundred times."""

import importlib.util

import torch

from braid.jobs.benchmarks.report.findings import Sheet, Task
from braid.jobs.benchmarks.report.streams import one_step


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
    for case in cases(QUICK, device):
        case.ways[OURS]()
        names.append(case.name)
    sheet.data("kernels", names)
