"""What of a card's peak a layer's passes reach (MFU), what an operator loses with fewer multiprocessors.

Model FLOPs as in docs/design.md, Numbers of overlap: matrix products and causal attention at half of its
square, the backward pass twice the forward pass, nothing for recomputation.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final

import torch

from braid.jobs.benchmarks.gpu_rig import Rig, first_line
from braid.jobs.benchmarks.gpu_schedules import SERIAL, Chain, Decision, phases_ns
from braid.scheduling.operators import Stream
from braid.scheduling.schedule import Direction

PEAK_FLOPS_PER_S: Final = {
    ("GB200",): 2500e12,
    ("B200",): 2250e12,
    ("H200", "NVL"): 835.5e12,
    ("H200",): 989.4e12,
    ("H100", "PCIe"): 756e12,
    ("H100", "NVL"): 835.5e12,
    ("H100", "HBM3"): 989.4e12,
    ("A800",): 312e12,
    ("A100",): 312e12,
    ("A40",): 149.7e12,
    ("RTX", "3090"): 71e12,
    ("V100",): 125e12,
}
"""Dense 16-bit peak by words of the device's name, the most special first: the makers' data sheets, as in
`scheduling/presets/clusters.yaml`, which needs a package that this benchmark does without."""

FENCES: Final = (1.0, 0.875, 0.75, 0.5, 0.25)
"""Shares of the multiprocessors that an operator is left with."""


def peak_flops_per_s(device_name: str) -> float | None:
    """A card's dense 16-bit peak; None if its name is not known."""
    words = set(re.split(r"[^A-Za-z0-9]+", device_name))
    return next((peak for key, peak in PEAK_FLOPS_PER_S.items() if words.issuperset(key)), None)


@dataclass(frozen=True, kw_only=True)
class PassTime:
    """A whole layer on one card, without tensor parallelism; medians."""

    sequence: int
    forward_ns: int
    backward_ns: int
    forward_flops: int
    backward_flops: int
    peak_flops_per_s: float | None

    def mfu(self, direction: Direction | None = None) -> float | None:
        """Model FLOPs over time and peak, of a pass or of both; None where the peak is not known."""
        if self.peak_flops_per_s is None:
            return None
        both = ((self.forward_flops, self.forward_ns), (self.backward_flops, self.backward_ns))
        chosen = {Direction.FORWARD: both[:1], Direction.BACKWARD: both[1:], None: both}[direction]
        flops, ns = (sum(column) for column in zip(*chosen, strict=True))
        return float(flops / ns * 1e9 / self.peak_flops_per_s)


def measure_passes(rig: Rig, sequences: Sequence[int], rounds: int) -> list[PassTime]:
    """A layer's forward and backward pass by themselves, for each sequence length, one sample."""
    return [
        _passes(replace(rig, shape=replace(rig.shape, sequence=s), tp=1, layers=1), rounds) for s in sequences
    ]


def _passes(rig: Rig, rounds: int) -> PassTime:
    times: list[list[int]] = []
    with rig.running():
        chain = Chain(rig, Decision(SERIAL), 0, rig.streams)
        for turn in range(rounds + 2):
            found = phases_ns(rig, chain)
            if turn > 1:
                times.append(found)
    forward_ns, backward_ns = (round(median(column)) for column in zip(*times, strict=True))
    flops = rig.layer.forward.flops
    return PassTime(
        sequence=rig.shape.sequence,
        forward_ns=forward_ns,
        backward_ns=backward_ns,
        forward_flops=flops,
        backward_flops=2 * flops,
        peak_flops_per_s=peak_flops_per_s(rig.hardware),
    )


@dataclass(frozen=True, kw_only=True)
class FenceTime:
    """An operator that has some multiprocessors to itself and none besides; medians in ns."""

    operator: str
    multiprocessors: int
    of: int
    alone_ns: int
    with_copy_ns: int
    """Until it and a copy over the link that began together have both finished."""


def measure_fences(rig: Rig, rounds: int, seed: int = 0) -> tuple[list[FenceTime], str]:
    """Matrix product and attention behind fences; or none, and why. To be called while the rig is running."""
    if rig.device.type != "cuda":
        return [], "fences need a CUDA device"
    contexts = getattr(torch.cuda, "GreenContext", None)
    if contexts is None:
        return [], f"torch {torch.__version__} has no torch.cuda.GreenContext"
    whole = torch.cuda.get_device_properties(rig.device).multi_processor_count
    try:
        # A context that nobody holds is destroyed, and its streams with it.
        fences = {n: _fence(contexts, rig.device, n) for n in _counts(whole)}
        streams = {n: fence.Stream() for n, fence in fences.items()}
    except (RuntimeError, AttributeError, TypeError) as error:  # the interface is still a beta of torch's
        return [], f"no green contexts here: {first_line(error)}"
    operators = _operators(rig)
    cases = [(name, n, beside) for name in operators for n in streams for beside in (False, True)]
    times: dict[tuple[str, int, bool], list[int]] = {case: [] for case in cases}
    order = random.Random(seed)
    for turn in range(rounds + 1):
        for case in order.sample(cases, len(cases)):
            name, n, beside = case
            ns = _behind_fence(rig, operators[name], streams[n], beside)
            if turn > 0:
                times[case].append(ns)
    found = [
        FenceTime(
            operator=name,
            multiprocessors=n,
            of=whole,
            alone_ns=round(median(times[name, n, False])),
            with_copy_ns=round(median(times[name, n, True])),
        )
        for name in operators
        for n in streams
    ]
    return found, ""


def _counts(whole: int) -> list[int]:
    """Numbers of multiprocessors to try; cards hand them out in groups of eight."""
    return sorted({max(8, int(whole * share) // 8 * 8) for share in FENCES}, reverse=True)


def _fence(contexts: Any, device: torch.device, multiprocessors: int) -> Any:
    """A context whose kernels run on so many multiprocessors."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return contexts.create(num_sms=multiprocessors, device_id=index)


def _operators(rig: Rig) -> dict[str, Callable[[], object]]:
    """The largest matrix product and attention of the rig's layer, on random inputs."""
    modules, sizes = rig.instance.modules, rig.model.context.sizes
    x = rig.tokens().repeat(rig.tp, 1)
    (qkv,) = modules["qkv"].forward(x)
    assert qkv.shape[0] == sizes.tokens
    return {
        "layer/mlp_in": lambda: modules["mlp_in"].forward(x),
        "layer/attention": lambda: modules["attention"].forward(qkv),
    }


def _behind_fence(rig: Rig, operator: Callable[[], object], stream: torch.cuda.Stream, beside: bool) -> int:
    spare = rig.tokens(seed=1)
    compute = torch.cuda.current_stream(rig.device)
    kept: list[object] = []  # until all is done: the allocator knows nothing of the fenced stream's reads

    def run() -> None:
        stream.wait_stream(compute)
        if beside:
            launch = rig.link.all_gather(spare)
            transfer = rig.streams.start(Stream.INTRA, launch, awaited_next=False)
        with torch.cuda.stream(stream):
            kept.append(operator())
        if beside:
            rig.streams.wait(transfer)
            kept.append(transfer.take())
        compute.wait_stream(stream)

    ns = rig.timed(run)
    rig.synchronise()
    return ns
