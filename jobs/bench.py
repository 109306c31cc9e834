"""Benchmarks that need PyTorch and nothing else: `python -m braid.jobs.bench gpu`, `... kernels`, which needs
Triton too, and `... report`, which makes all of it one report; the others: `braid bench`.

Errors that the user can mend are one message on standard error and exit code 2. A report in which a claim
failed has exit code 1.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from braid.scheduling.json_text import json_text

_FAILED_EXIT, _ERROR_EXIT = 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark; returns the exit code."""
    chosen = _parser().parse_args(arguments)
    try:
        result, text, failed = chosen.run(chosen)
    except ImportError as error:
        print(f"braid: this benchmark needs {chosen.needs}: {error}", file=sys.stderr)
        return _ERROR_EXIT
    except ValueError as error:
        print(f"braid: {error}", file=sys.stderr)
        return _ERROR_EXIT
    print(json_text(result.as_json()) if chosen.json else text)
    return _FAILED_EXIT if failed else 0


Result = tuple[Any, str, bool]
"""What was measured (with ``as_json``), the same as text, and whether a claim failed."""


def _gpu(chosen: argparse.Namespace) -> Result:
    from braid.jobs.benchmarks.gpu import FULL, QUICK, check_device, run, show

    device = check_device(chosen.device)
    result = run(device=device, sizes=QUICK if chosen.quick else FULL, seed=chosen.seed, progress=_say)
    return result, show(result), False


def _kernels(chosen: argparse.Namespace) -> Result:
    if chosen.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
    from braid.jobs.benchmarks.gpu import check_device
    from braid.jobs.benchmarks.kernels import run_kernels, show_kernels

    result = run_kernels(
        device=check_device(chosen.device),
        quick=chosen.quick,
        rounds=1 if chosen.quick else 21,
        seed=chosen.seed,
        tune=chosen.tune,
        progress=_say,
    )
    return result, show_kernels(result), False


def _report(chosen: argparse.Namespace) -> Result:
    from braid.jobs.benchmarks.report.claims import named
    from braid.jobs.benchmarks.report.command import make_report

    result = make_report(
        device=chosen.device,
        quick=chosen.quick,
        minutes=chosen.minutes,
        output=chosen.output,
        seed=chosen.seed,
        parts=named(chosen.parts),
        progress=_say,
    )
    return result, f"{result.summary()}\n{chosen.output}/report.md, report.json", result.failed


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m braid.jobs.bench", description=__doc__)
    benchmarks = parser.add_subparsers(required=True, metavar="BENCHMARK")
    gpu = benchmarks.add_parser(
        "gpu",
        help="operators, pairs, schedules, CUDA graphs and MFU on one GPU",
        description="Operators and schedules on one CUDA GPU; communication is copies over PCIe to pinned "
        "host memory.",
    )
    gpu.set_defaults(run=_gpu, needs="PyTorch")
    kernels = benchmarks.add_parser(
        "kernels",
        help="Triton's kernels against eager PyTorch, torch.compile, cuBLAS and Liger",
        description="Triton's kernels and their rivals on one CUDA GPU, as shares of what the card allows.",
    )
    kernels.set_defaults(run=_kernels, needs="PyTorch and Triton")
    kernels.add_argument("--tune", action="store_true", help="find and keep the best tiles of every product")
    report = benchmarks.add_parser(
        "report",
        help="everything that a machine with GPUs can tell, as one report with verdicts",
        description="Checks and measures streams, overlap, training, ranks and kernels on this machine's "
        "GPUs; writes one report as Markdown and as JSON. Exit code 1: a claim failed.",
    )
    report.set_defaults(run=_report, needs="PyTorch and NumPy")
    report.add_argument(
        "--output", type=Path, default=Path("gpu-report"), help="folder of the report (default: %(default)s)"
    )
    report.add_argument(
        "--minutes",
        type=float,
        default=25.0,
        help="at most; parts that do not fit are left out (default: 25)",
    )
    report.add_argument(
        "--parts", default="", help="some of its parts, by name, comma-separated (default: all)"
    )
    for one in (gpu, kernels, report):
        one.add_argument("--device", default="cuda", help="cuda, cuda:1, ... or cpu (default: %(default)s)")
        one.add_argument("--quick", action="store_true", help="a tiny layer: shows that it runs")
        one.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
        one.add_argument("--seed", type=int, default=0, help="of weights, inputs and the order of rounds")
    return parser


if __name__ == "__main__":
    sys.exit(main())
