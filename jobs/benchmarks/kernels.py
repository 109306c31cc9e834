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
from time import perf_counter_ns
from typing import Any, Final

import torch
import triton

from braid.jobs.benchmarks.gpu import table
from braid.jobs.benchmarks.kernel_cases import OURS, Case, Shapes, cases
from braid.kernels.fused.launch import INTERPRETING, multiprocessors

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


class _Clock:
    """Times what is called: by events on a GPU, by the host's clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._flush = torch.empty(1 << 28, dtype=torch.uint8, device=device) if self._cuda else None

    def ns(self, call: Callable[[], object]) -> int:
        """Nanoseconds of one call with cold caches."""
        if self._flush is None:
            begin = perf_counter_ns()
            call()
            return perf_counter_ns() - begin
        self._flush.zero_()
        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)  # launches are no part of the time
        begin_event.record()
        call()
        end_event.record()
        end_event.synchronize()
        return round(begin_event.elapsed_time(end_event) * 1e6)


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
    clock = _Clock(device)
    progress("rates of the card")
    copy_rate, product_rate = _rates(clock, device, quick, rounds)
    times = []
    for case in cases(shapes, device):
        progress(case.name)
        if tune and case.tune is not None:
            case.tune(lambda call: round(median(clock.ns(call) for _ in range(5))))
        times.append(_measure(case, clock, order, rounds, copy_rate, product_rate))
    return KernelBenchmark(
        machine={
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _NO_MEASUREMENT,
            "multiprocessors": multiprocessors(device),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "rounds": rounds,
            "seed": seed,
        },
        shapes=shapes,
        copy_bytes_per_s=copy_rate,
        product_flops_per_s=product_rate,
        kernels=tuple(times),
    )


def _rates(clock: _Clock, device: torch.device, quick: bool, rounds: int) -> tuple[float, float]:
    """Bytes per second (read and written) of a copy, FLOP/s of a dense 16-bit product."""
    source = torch.empty(_COPY_BYTES >> 16 * quick, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    size = _PRODUCT >> 7 * quick
    a = torch.randn(size, size, device=device).bfloat16()
    c = torch.empty_like(a)
    ways = (lambda: target.copy_(source), lambda: torch.mm(a, a, out=c))
    copy_ns, product_ns = (median(clock.ns(way) for _ in range(rounds + 2)) for way in ways)
    return 2 * source.nbytes / copy_ns * 1e9, 2 * size**3 / product_ns * 1e9


def _measure(
    case: Case, clock: _Clock, order: random.Random, rounds: int, copy_rate: float, product_rate: float
) -> KernelTime:
    """All ways by turns, in an order that changes from round to round; the first round is not counted."""
    ways, notes = dict(case.ways), dict(case.notes)
    times: dict[str, list[int]] = {way: [] for way in ways}
    for turn in range(rounds + 1):
        for way in order.sample(sorted(ways), len(ways)):
            try:
                ns = clock.ns(ways[way])
            except Exception as error:  # a rival that cannot do it is a note, not the end of the benchmark
                if way.startswith(OURS):
                    raise
                del ways[way]
                notes[way] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:200]
                continue
            if turn:
                times[way].append(ns)
    bytes_ns, flops_ns = case.bytes / copy_rate * 1e9, case.flops / product_rate * 1e9
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
    ways = (OURS, "eager", "compile", "cublas", "liger", f"{OURS} 3/4")
    rows = [
        (
            one.kernel,
            *(f"{one.times_ns[way] / 1e3:.1f}" if way in one.times_ns else "-" for way in ways),
            _ratio(one.speedup),
            f"{_ratio(one.share_of_limit)} {one.bound}",
            _ratio(one.growth),
        )
        for one in result.kernels
    ]
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
            *table(("kernel", *ways, "best rival", "of the limit", "3/4 SMs"), rows),
            *_note_lines(result.kernels),
            "",
            verdict,
        ]
    )


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
