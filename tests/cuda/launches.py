"""What a layer costs the host in one micro-batch: operators, dispatches, events, collectives, Python calls.

Counted on the model of the machine, as the difference between a model with one layer more and one without.
``python -m tests.cuda.launches`` prints the table, and an estimate of when a GPU waits for its host: device
times are those of the analytic profile of an H100, host times of the counts at prices for each.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import braid
from braid.scheduling.layers import built_in_parts
from braid.scheduling.operators import Kind
from braid.scheduling.presets.library import cluster_preset, model_preset
from braid.scheduling.sizes import part_sizes
from braid.scheduling.spec import ModelShape, ParallelLayout
from tests.cuda.entries import Kernel, Made, Operator, Recorded, Waited
from tests.cuda.steps import Case, recorded

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "launches.json"
SCHEDULES = ("megatron", "wavelet", "dhelix", "braid:w")
PRICES_US = {"dispatches": 5.0, "events": 1.0, "waits": 0.5, "collectives": 12.0, "python": 0.06}
"""Of one each, on a host of 2023: an eager operator of PyTorch on CUDA from Python to the driver, an event, a
wait, a call of NCCL through torch, a call of a Python function. Assumed, not measured: no GPU was there."""
MICRO_BATCHES = 4
OWN = os.path.join(os.path.dirname(braid.__file__), "")
"""Where modules of the project are. Not any path with braid in it: the checkout, too, may be called that."""


def counts(schedule: str, gpt: bool = False) -> dict[str, float]:
    """Of one layer and micro-batch, both passes, tp 2, spans not recorded."""
    _step(schedule, 2, gpt)  # what is made once is made now
    few, many = (_step(schedule, layers, gpt) for layers in (2, 3))
    return {key: (many[key] - few[key]) / MICRO_BATCHES for key in many}


def _step(schedule: str, layers: int, gpt: bool) -> Counter[str]:
    case = Case(schedule=schedule, tp=2, micro_batches=MICRO_BATCHES, gpt=gpt, layers=layers)
    found: Counter[str] = Counter()
    machine, _ = recorded(case, lambda rank: _calls(found) if rank.log.rank == 0 else nullcontext())
    kinds = {Recorded: "events", Waited: "waits", Kernel: "collectives", Made: "allocations"}
    for entry in machine.ranks[0].entries:
        if isinstance(entry, Operator):
            found["views" if not (entry.results or entry.writes) else "dispatches"] += 1
        elif type(entry) in kinds:
            found[kinds[type(entry)]] += 1
    return found


@contextmanager
def _calls(found: Counter[str]) -> Iterator[None]:
    """Count calls of the project's own Python functions."""

    def count(frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OWN):
            found["python"] += 1

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)


def table() -> dict[str, dict[str, float]]:
    """Counts by schedule."""
    return {name: counts(name) for name in SCHEDULES}


def host_us(found: dict[str, float]) -> float:
    """Of a layer and micro-batch, at `PRICES_US`."""
    return sum(PRICES_US[key] * found.get(key, 0) for key in PRICES_US)


def device_us(tokens: int, tp: int = 8) -> float:
    """Compute of a layer of Llama-3.1-8B, both passes, in microseconds on an H100, without communication.

    The least it can take: every operator at the best rate that large ones reach, or at that of memory.
    """
    shape: ModelShape = replace(model_preset("llama-3.1-8b"), sequence=tokens)
    layer = built_in_parts(part_sizes(shape, ParallelLayout(tp=tp), micro_batch=1))["layer"]
    gpu, total = cluster_preset("h100").gpu, 0.0
    for op in (*layer.forward.operators, *layer.backward.operators):
        if op.axis is not None:
            continue
        weights = op.flops // tokens if op.kind is Kind.GEMM else 0  # 2 FLOPs and 2 bytes a parameter
        touched = sum(layer.values[name].bytes(2) for name in {*op.reads, *op.writes} if name in layer.values)
        rate = (gpu.attention if op.kind is Kind.ATTENTION else gpu.gemm).ceiling * gpu.peak_flops_per_s
        memory = gpu.memory_bytes_per_s * gpu.memory_efficiency
        total += max(op.flops / rate, (touched + weights) / memory)
    return total * 1e6


def launch_bound(host: float, tp: int = 8) -> int:
    """Tokens of a micro-batch below which the device waits for its host."""
    return next(tokens for tokens in range(256, 1 << 17, 256) if device_us(tokens, tp) > host)


def main() -> None:
    """Print both."""
    found = table()
    names = list(next(iter(found.values())))
    print("schedule".ljust(12), *(name.rjust(12) for name in names), "host us".rjust(9))
    for schedule, row in found.items():
        print(schedule.ljust(12), *(f"{row[n]:12.1f}" for n in names), f"{host_us(row):9.0f}")
    print("\ntokens of a micro-batch, compute of a layer of Llama-3.1-8B at tp 8 on an H100 (us):")
    for tokens in (512, 1024, 2048, 4096, 8192, 16384, 32768):
        print(f"{tokens:7d} {device_us(tokens):9.0f}")
    eager = host_us(found["braid:w"])
    print(
        f"\nlaunch-bound below {launch_bound(eager)} tokens at tp 8 ({eager:.0f} us a layer and micro-batch);"
    )
    print(
        f"{launch_bound(eager, 1)} at tp 1. As one CUDA graph the passes of a step are one launch, whatever "
        f"its layers (tests/cuda/test_graphs.py counts it): no number of tokens is launch-bound then."
    )


if __name__ == "__main__":
    if "--update-golden" in sys.argv:
        GOLDEN.write_text(json.dumps(table(), indent=1) + "\n", encoding="utf-8")
    main()
