"""Triton's kernels against the best there is, with PyTorch alone: `python -m braid.jobs.bench kernels`.

Every kernel is timed beside its rivals by turns, and its time given as a share of what the card allows,
measured in the same run: bytes that must move over the rate of a large copy, or FLOPs over the rate of a
dense product.
"""

import datetime
import platform
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

import torch
import triton

from braid.jobs.benchmarks.gpu import table
from braid.jobs.benchmarks.kernel_cases import OURS, Case, Shapes, cases
from braid.kernels.clock import Clock, DeviceClock
from braid.kernels.fused.launch import INTERPRETING

_COPY_BYTES: Final = 1 << 30
_PRODUCT: Final = 8192
_NO_MEASUREMENT: Final = (
    "CPU, Triton's interpreter: this shows that the benchmark runs; its times are no measurement"
)

FULL: Final = Shapes(tokens=8192, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocabulary=128256, experts=8)
QUICK: Final = Shapes(tokens=12, hidden=16, ffn=24, heads=2, kv_heads=1, vocabulary=40, experts=3)


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """One kernel; times in ns, medians of rounds. ``None``: not measured, not there."""

    kernel: str
    times_ns: dict[str, int]
    """By way: triton, eager, compile, cublas, liger, triton 3/4 (of the multiprocessors)."""
    limit_ns: int
    """What bytes and FLOPs take at the rates measured."""
    bound: str
    """bytes or flops: which of the two takes longer."""
    notes: dict[str, str]

    @property
    def speedup(self) -> float | None:
        """Time of the best rival over ours: 1 or more, and Triton wins."""
        rivals = [ns for way, ns in self.times_ns.items() if not way.startswith(OURS)]
        return min(rivals) / self.times_ns[OURS] if rivals and OURS in self.times_ns else None

    @property
    def share_of_limit(self) -> float | None:
        """Time that the card would need over ours."""
        return self.limit_ns / self.times_ns[OURS] if OURS in self.times_ns else None

    @property
    def growth(self) -> float | None:
        """Our time on 3/4 of the multiprocessors over that on all."""
        part = self.times_ns.get(f"{OURS} 3/4")
        return part / self.times_ns[OURS] if part and OURS in self.times_ns else None


@dataclass(frozen=True, kw_only=True)
class KernelBenchmark:
    """Everything that `run_kernels` measured, and where."""

    machine: dict[str, Any]
    shapes: Shapes
    copy_bytes_per_s: float
    product_flops_per_s: float
    kernels: tuple[KernelTime, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain containers, for ``--json``."""
        content = asdict(self)
        for row, one in zip(content["kernels"], self.kernels, strict=True):
            row |= {"speedup": one.speedup, "share_of_limit": one.share_of_limit, "growth": one.growth}
        return content


def run_kernels(
    *,
    device: torch.device,
    quick: bool,
    rounds: int,
    seed: int = 0,
    tune: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> KernelBenchmark:
    """Time all kernels and their rivals; ``tune`` first finds and keeps the best tiles of each product."""
    if device.type == "cpu" and not (INTERPRETING and quick):
        raise ValueError(
            "kernels on the CPU run in Triton's interpreter only: set TRITON_INTERPRET=1 and use --quick"
        )
    if tune and device.type != "cuda":
        raise ValueError("--tune needs a CUDA device")
    shapes = QUICK if quick else FULL
    torch.manual_seed(seed)
    order = random.Random(seed)
    progress("rates of the card")
    card = Card.measured(device, quick, rounds)
    times = []
    for case in cases(shapes, device):
        progress(case.name)
        if tune:
            card.tune(case)
        times.append(card.measure(case, order, rounds))
    return KernelBenchmark(
        machine={
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _NO_MEASUREMENT,
            "multiprocessors": torch.cuda.get_device_properties(device).multi_processor_count
            if device.type == "cuda"
            else 1,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "rounds": rounds,
            "seed": seed,
        },
        shapes=shapes,
        copy_bytes_per_s=card.copy_bytes_per_s,
        product_flops_per_s=card.product_flops_per_s,
        kernels=tuple(times),
    )


@dataclass(frozen=True)
class Card:
    """What kernels are measured on: its clock, and what it allows."""

    clock: Clock
    copy_bytes_per_s: float
    """Read and written, of a large copy."""
    product_flops_per_s: float
    """Of a dense 16-bit product."""

    @classmethod
    def measured(cls, device: torch.device, quick: bool, rounds: int) -> "Card":
        """Measure both rates."""
        clock = DeviceClock(device)
        source = torch.empty(_COPY_BYTES >> 16 * quick, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        size = _PRODUCT >> 7 * quick
        a = torch.randn(size, size, device=device).bfloat16()
        c = torch.empty_like(a)
        ways = (lambda: target.copy_(source), lambda: torch.mm(a, a, out=c))
        copy_ns, product_ns = (median(clock.ns(way) for _ in range(rounds + 2)) for way in ways)
        return cls(clock, 2 * source.nbytes / copy_ns * 1e9, 2 * size**3 / product_ns * 1e9)

    def tune(self, case: Case) -> None:
        """Find and keep the best tiles of a product; nothing for other kernels."""
        if case.tune is not None:
            case.tune(lambda call: round(median(self.clock.ns(call) for _ in range(5))))

    def measure(self, case: Case, order: random.Random, rounds: int) -> KernelTime:
        """All ways by turns, in an order that changes from round to round; the first is not counted."""
        ways, notes = dict(case.ways), dict(case.notes)
        times: dict[str, list[int]] = {way: [] for way in ways}
        for turn in range(rounds + 1):
            for way in order.sample(sorted(ways), len(ways)):
                try:
                    ns = self.clock.ns(ways[way])
                except (
                    Exception
                ) as error:  # a rival that cannot do it is a note, not the end of the benchmark
                    if way.startswith(OURS):
                        raise
                    del ways[way]
                    notes[way] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:200]
                    continue
                if turn:
                    times[way].append(ns)
        bytes_ns = case.bytes / self.copy_bytes_per_s * 1e9
        flops_ns = case.flops / self.product_flops_per_s * 1e9
        return KernelTime(
            kernel=case.name,
            times_ns={way: round(median(ns)) for way, ns in times.items() if way in ways},
            limit_ns=round(max(bytes_ns, flops_ns)),
            bound="bytes" if bytes_ns >= flops_ns else "flops",
            notes=notes,
        )


# -- for people --------------------------------------------------------------------------------------------


def show_kernels(result: KernelBenchmark) -> str:
    """The table as text, and which operators win."""
    machine, shapes = result.machine, result.shapes
    wins = [one.kernel for one in result.kernels if (one.speedup or 0) >= 1]
    if result.machine["device"] == _NO_MEASUREMENT:
        verdict = "no verdict: nothing was measured"
    else:
        verdict = f"at least as fast as every rival: {', '.join(wins) or 'none'}"
    return "\n".join(
        [
            f"{machine['device']}; torch {machine['torch']}, triton {machine['triton']}, {machine['date']}",
            f"{shapes.tokens} tokens, hidden {shapes.hidden}, ffn {shapes.ffn}, {shapes.heads} heads, "
            f"{shapes.kv_heads} key-value heads, vocabulary {shapes.vocabulary}, {shapes.experts} experts",
            f"copy {result.copy_bytes_per_s / 1e9:.0f} GB/s, dense product "
            f"{result.product_flops_per_s / 1e12:.3g} TFLOP/s, {machine['multiprocessors']} multiprocessors",
            "",
            f"microseconds, medians of {machine['rounds']} rounds",
            *time_lines(result.kernels),
            "",
            verdict,
        ]
    )


def time_lines(kernels: Sequence[KernelTime]) -> list[str]:
    """The table of times, and what was not measured."""
    ways = (OURS, "eager", "compile", "cublas", "liger", f"{OURS} 3/4")
    rows = [
        (
            one.kernel,
            *(f"{one.times_ns[way] / 1e3:.1f}" if way in one.times_ns else "-" for way in ways),
            _ratio(one.speedup),
            f"{_ratio(one.share_of_limit)} {one.bound}",
            _ratio(one.growth),
        )
        for one in kernels
    ]
    head = ("kernel", *ways, "best rival", "of the limit", "3/4 SMs")
    return [*table(head, rows), *_note_lines(kernels)]


def _note_lines(kernels: Sequence[KernelTime]) -> list[str]:
    """What was not measured and why, with the kernels that it holds for."""
    found: dict[str, list[str]] = {}
    for one in kernels:
        for way, note in one.notes.items():
            found.setdefault(f"{way}: {note}", []).append(one.kernel)
    return [
        note if len(names) == len(kernels) else f"{note} ({'; '.join(names)})"
        for note, names in found.items()
    ]


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
