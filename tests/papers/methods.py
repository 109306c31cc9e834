"""A data-parallel step, the published methods to run it, and what each leaves open."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product

from braid.scheduling.mesh.cluster import Gpu, RankGroup
from braid.scheduling.plan.tiers import PIECE_COUNTS


class Method(StrEnum):
    """Schedules of a data-parallel step."""

    DDP = "ddp"
    """All-reduce of every gradient behind the last backward pass; everything is held by every rank."""
    OOO_BACKPROP = "ooo_backprop"
    """DDP with the weight gradients of the first layers put off and reversed (Oh et al. 2022)."""
    ZERO1 = "zero1"
    """Sharded optimizer: reduce-scatter behind the last backward pass, all-gather after the update."""
    ZERO2 = "zero2"
    """Sharded gradients as well: reduce-scatter behind every backward pass."""
    CENTAURI = "centauri"
    """Partitioned reduce-scatter behind the backward, all-gather behind the forward pass."""
    ZERO3 = "zero3"
    """Sharded parameters: every unit is gathered while the one before computes, and scattered."""
    CENTAURI_FSDP = "centauri_fsdp"
    """Sharded parameters, gathered and scattered in parts by partitioned collectives."""


@dataclass(frozen=True)
class Unit:
    """A weight matrix of a layer, [rows, inputs] x [inputs, outputs] in two bytes, and what follows it."""

    name: str
    rows: int
    inputs: int
    outputs: int
    attached: tuple[float, float] = (0, 0)
    """Nanoseconds of what has no weights, in the forward and the backward pass."""

    @property
    def parameters(self) -> int:
        """Of the matrix."""
        return self.inputs * self.outputs

    def ns(self, gpu: Gpu, share: float = 1.0) -> int:
        """A share of the product, with its launch: bound by arithmetic or by memory; gradients alike."""
        a, b, c = self.rows, self.inputs, self.outputs
        traffic, flops = 2 * (a * b + b * c + a * c) * share, 2 * a * b * c * share
        memory_ns = traffic / (gpu.memory_bytes_per_s * gpu.memory_efficiency) * 1e9
        arithmetic_ns = flops / (gpu.peak_flops_per_s * gpu.gemm.at(flops)) * 1e9
        return round(gpu.launch_ns + max(memory_ns, arithmetic_ns))


@dataclass(frozen=True, kw_only=True)
class Step:
    """The work of one optimizer step on one rank."""

    units: tuple[Unit, ...]
    """Of one layer, in the order of the forward pass."""
    layers: int
    group: RankGroup
    """Ranks that share the parameters, or hold copies of them."""
    micro_batches: int = 1
    replicas: RankGroup | None = None
    """Ranks of different groups that hold the same shard, if parameters are sharded in several groups."""
    optimizer_ns_per_parameter: float = 0.0

    @property
    def parameters(self) -> int:
        """Of all layers."""
        return self.layers * sum(unit.parameters for unit in self.units)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a method leaves open; the defaults are what the baselines do."""

    pieces: int = 1
    """Parts that every weight, and the computation on it, is cut into."""
    hierarchical: bool = False
    """Collectives run inside nodes and between them as separate stages (group partition)."""
    weight_first: bool = False
    """Which gradient of a layer is computed first (Centauri section 3.2.2)."""
    lag: int = 1
    """Gathers of so many further units are issued before a unit's gradient is scattered."""
    delayed: int = 0
    """First layers whose weight gradients are put off to the end of the backward pass."""
    substituted: bool = True
    """All-reduce is replaced by reduce-scatter and all-gather (primitive substitution)."""


def choices(method: Method, step: Step) -> Iterator[Choice]:
    """What a method may choose from; it does not depend on costs, so that better links never hurt."""
    match method:
        case Method.CENTAURI | Method.CENTAURI_FSDP:
            for pieces, hierarchical, first in product(PIECE_COUNTS, (False, True), (False, True)):
                base = Choice(pieces=pieces, hierarchical=hierarchical, weight_first=first)
                if method is Method.CENTAURI_FSDP:
                    yield from (replace(base, lag=lag) for lag in (1, 2, 3))
                else:
                    yield from (replace(base, substituted=cut) for cut in (True, False))
        case Method.OOO_BACKPROP:
            yield from (Choice(delayed=k, substituted=False) for k in range(step.layers + 1))
        case _:
            yield Choice(substituted=method is not Method.DDP)
