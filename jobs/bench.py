"""Benchmarks that need PyTorch and nothing else: `python -m braid.jobs.bench gpu`; the others: `braid bench`.

Errors that the user can mend are one message on standard error and exit code 2.
"""

import argparse
import json
import sys
from collections.abc import Sequence

_ERROR_EXIT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark; returns the exit code."""
    chosen = _parser().parse_args(arguments)
    try:
        from braid.jobs.benchmarks.gpu import FULL, QUICK, check_device, run, show
    except ImportError as error:
        print(f"braid: this benchmark needs PyTorch: {error}", file=sys.stderr)
        return _ERROR_EXIT
    try:
        device = check_device(chosen.device)
        result = run(device=device, sizes=QUICK if chosen.quick else FULL, seed=chosen.seed, progress=_say)
    except ValueError as error:
        print(f"braid: {error}", file=sys.stderr)
        return _ERROR_EXIT
    print(json.dumps(result.as_json()) if chosen.json else show(result))
    return 0


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
    gpu.add_argument("--device", default="cuda", help="cuda, cuda:1, ... or cpu (default: %(default)s)")
    gpu.add_argument("--quick", action="store_true", help="a tiny layer: shows that it runs")
    gpu.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    gpu.add_argument("--seed", type=int, default=0, help="of weights, inputs and the order of rounds")
    return parser


if __name__ == "__main__":
    sys.exit(main())
