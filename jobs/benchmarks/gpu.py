"""The benchmark on one GPU, with PyTorch alone: `python -m braid.jobs.bench gpu`.

Communication is copies between the GPU and its host's pinned memory, since one GPU has no peer. What it shows
is the executor's CUDA path and how operators share a card, not the speed of any network.
"""

import datetime
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from braid.jobs.benchmarks.gpu_operators import OperatorTable, measure_operators
from braid.jobs.benchmarks.gpu_ranks import SharedTime, measure_ranks
from braid.jobs.benchmarks.gpu_rig import Rig, llama_8b, tiny_layer
from braid.jobs.benchmarks.gpu_schedules import ScheduleTable, measure_schedules
from braid.jobs.benchmarks.gpu_utilisation import (
    FenceTime,
    PassTime,
    measure_fences,
    measure_passes,
    peak_flops_per_s,
)
from braid.scheduling import figures
from braid.scheduling.schedule import Direction
from braid.scheduling.spec import ModelShape


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured and how often."""

    shape: ModelShape
    sequences: tuple[int, ...]
    """For the passes by themselves; schedules take the first."""
    layers: int
    """Of a block."""
    pairs: int
    """Paired blocks of a chain."""
    rounds: int


FULL = Sizes(shape=llama_8b(4096), sequences=(4096, 8192), layers=2, pairs=4, rounds=11)
QUICK = Sizes(shape=tiny_layer(16), sequences=(16, 32), layers=2, pairs=2, rounds=2)


@dataclass(frozen=True, kw_only=True)
class GpuBenchmark:
    """Everything that `run` measured, and where; parts that could not be measured say why in ``notes``."""

    machine: dict[str, Any]
    sizes: Sizes
    operators: OperatorTable
    schedules: ScheduleTable
    passes: tuple[PassTime, ...]
    fences: tuple[FenceTime, ...]
    shared: tuple[SharedTime, ...]
    notes: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain containers, for ``--json``."""
        content = asdict(self)
        for row, one in zip(content["schedules"]["schedules"], self.schedules.schedules, strict=True):
            row["speedup"] = self.schedules.serial().eager_ns / one.eager_ns
            row["recovered"] = self.schedules.recovered(one.eager_ns)
        content["schedules"]["limit_ns"] = self.schedules.limit_ns
        for row, passed in zip(content["passes"], self.passes, strict=True):
            row["mfu"] = passed.mfu()
            row["mfu_forward"] = passed.mfu(Direction.FORWARD)
            row["mfu_backward"] = passed.mfu(Direction.BACKWARD)
        content["operators"]["copy_bytes_per_s"] = self.operators.copy_bytes_per_s
        return content


def check_device(name: str) -> torch.device:
    """The device of a name; `ValueError` for a GPU that torch does not see and for other kinds of device."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"--device {name}: use cuda, a card such as cuda:1, or cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"--device {name}: torch {torch.__version__} sees no such CUDA device; without a GPU, "
            f"--device cpu --quick shows that the benchmark runs, with times that mean nothing"
        )
    return device


def run(
    *,
    device: torch.device,
    sizes: Sizes,
    seed: int = 0,
    ranks: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> GpuBenchmark:
    """Measure all parts, one after the other; two processes on the device only if ``ranks`` are wanted."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rig = Rig(shape=sizes.shape, device=device, dtype=dtype, layers=sizes.layers, seed=seed)
    notes: dict[str, str] = {}
    with rig.running():
        progress("operators and pairs")
        operators = measure_operators(rig, sizes.rounds, seed)
        progress("schedules")
        schedules = measure_schedules(rig, operators, pairs=sizes.pairs, rounds=sizes.rounds, seed=seed)
        progress("fenced multiprocessors")
        fences, why = measure_fences(rig, sizes.rounds, seed)
        notes |= {"fences": why} if why else {}
    progress("passes by themselves")
    passes = measure_passes(rig, sizes.sequences, sizes.rounds)
    shared: list[SharedTime] = []
    why = "left out"
    if ranks:
        progress("two ranks through gloo")
        tokens = rig.model.context.sizes.local_tokens
        shared, why = measure_ranks(device, dtype, tokens, sizes.shape.hidden, sizes.rounds)
    notes |= {"shared": why} if why else {}
    return GpuBenchmark(
        machine={
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": rig.hardware,
            "peak_flops_per_s": peak_flops_per_s(rig.hardware),
            "link": rig.link.name,
            "dtype": str(dtype).removeprefix("torch."),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "seed": seed,
        },
        sizes=sizes,
        operators=operators,
        schedules=schedules,
        passes=tuple(passes),
        fences=tuple(fences),
        shared=tuple(shared),
        notes=notes,
    )


# -- for people --------------------------------------------------------------------------------------------


def show(result: GpuBenchmark) -> str:
    """All tables as text."""
    machine, shape = result.machine, result.sizes.shape
    peak = machine["peak_flops_per_s"]
    lines = [
        f"{machine['device']}, torch {machine['torch']}, {machine['dtype']}, {machine['date']}",
        f"layer: hidden {shape.hidden}, ffn {shape.ffn}, {shape.heads} heads, "
        f"{shape.kv_heads} key-value heads, sequence {shape.sequence}; one of two tensor-parallel ranks",
        f"communication: {machine['link']}",
        f"peak: {peak / 1e12:g} TFLOP/s" if peak else "peak: not known for this device, so no MFU",
    ]
    lines += ["", *_operator_lines(result.operators), "", *_schedule_lines(result.schedules)]
    lines += ["", *_pass_lines(result.passes), "", *_fence_lines(result), "", *_shared_lines(result)]
    return "\n".join(lines)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell, the first to the left, numbers to the right."""
    widths = [max(len(row[n]) for row in (head, *rows)) for n in range(len(head))]
    return [
        "  ".join(
            cell.rjust(width) if n else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]


def _us(ns: int | None) -> str:
    return "-" if ns is None else f"{ns / 1e3:.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _operator_lines(operators: OperatorTable) -> list[str]:
    rows = [
        (
            op.operator,
            op.kind,
            _us(op.alone_ns),
            _us(op.with_copy_ns),
            _share(op.copy_oef),
            _us(op.with_product_ns),
            _share(op.product_oef),
        )
        for op in operators.operators
    ]
    rate = operators.copy_bytes_per_s / 1e9
    product = " x ".join(map(str, operators.product_shape))
    return [
        f"operators, microseconds; the copy: {operators.copy_bytes / 1e6:.1f} MB each way in "
        f"{_us(operators.copy_ns)} ({rate:.1f} GB/s each way); "
        f"the product: {product} in {_us(operators.product_ns)}",
        *table(("operator", "class", "alone", "with copy", "OEF", "with product", "OEF"), rows),
    ]


def _schedule_lines(schedules: ScheduleTable) -> list[str]:
    serial = schedules.serial().eager_ns
    rows = []
    for one in schedules.schedules:
        check = one.check
        exact = {True: "yes", False: f"no ({check.largest_difference:.1e})"}
        rows.append(
            (
                one.schedule,
                one.method,
                _us(one.eager_ns),
                _share(serial / one.eager_ns),
                _us(one.predicted_ns),
                _share(one.hidden_fraction),
                figures.recovered(schedules.recovered(one.eager_ns)),
                exact[check.like_serial],
                _us(one.graph_ns),
                one.graph_note or exact[bool(check.graph_equal)],
            )
        )
    head = ("schedule", "blocks", "time", "speed-up", "predicted", "hidden", "recovered", "as serial")
    return [
        f"schedules, microseconds per paired block of {schedules.layers} layers; "
        f"limit {_us(schedules.limit_ns)}",
        *table((*head, "CUDA graph", "same bits"), rows),
        *(f"{name}: not measured; {reason}" for name, reason in schedules.left_out.items()),
    ]


def _pass_lines(passes: Sequence[PassTime]) -> list[str]:
    rows = [
        (
            str(one.sequence),
            _us(one.forward_ns),
            _share(one.mfu(Direction.FORWARD)),
            _us(one.backward_ns),
            _share(one.mfu(Direction.BACKWARD)),
            _share(one.mfu()),
        )
        for one in passes
    ]
    return [
        "a whole layer by itself, no tensor parallelism, microseconds",
        *table(("sequence", "forward", "MFU", "backward", "MFU", "both"), rows),
    ]


def _fence_lines(result: GpuBenchmark) -> list[str]:
    if "fences" in result.notes:
        return [f"fenced multiprocessors: not measured; {result.notes['fences']}"]
    rows = [
        (one.operator, f"{one.multiprocessors} of {one.of}", _us(one.alone_ns), _us(one.with_copy_ns))
        for one in result.fences
    ]
    return [
        "fenced multiprocessors, microseconds",
        *table(("operator", "multiprocessors", "alone", "with copy"), rows),
    ]


def _shared_lines(result: GpuBenchmark) -> list[str]:
    if "shared" in result.notes:
        return [f"two ranks through gloo: not measured; {result.notes['shared']}"]
    rows = [
        (
            one.collective,
            f"{one.bytes / 1e6:.1f}",
            _us(one.alone_ns),
            _us(one.product_ns),
            _us(one.together_ns),
        )
        for one in result.shared
        if not one.note
    ]
    return [
        "two ranks on this device through gloo (over host memory, by the host's clock), microseconds",
        *table(("collective", "MB", "alone", "product", "together"), rows),
        *(f"{one.collective}: not measured; {one.note}" for one in result.shared if one.note),
    ]
