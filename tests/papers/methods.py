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

    @property
    def shards_parameters(self) -> bool:
        """Whether every rank holds only its share of the parameters."""
        return self in (Method.ZERO3, Method.CENTAURI_FSDP)


class Priority(StrEnum):
    """Which gradient of a layer is computed first (Centauri section 3.2.2)."""

    ACTIVATION = "activation"
    WEIGHT = "weight"


@dataclass(frozen=True)
class Matmul:
    """A product [rows, inputs] x [inputs, outputs] in elements of two bytes."""

    rows: int
    inputs: int
    outputs: int

    @property
    def flops(self) -> int:
        """Of all of it."""
        return 2 * self.rows * self.inputs * self.outputs

    def ns(self, gpu: Gpu, share: float = 1.0) -> int:
        """Time of a share of it, with its launch: bound by arithmetic or by memory."""
        a, b, c = self.rows, self.inputs, self.outputs
        traffic, flops = 2 * (a * b + b * c + a * c) * share, self.flops * share
        memory_ns = traffic / (gpu.memory_bytes_per_s * gpu.memory_efficiency) * 1e9
        arithmetic_ns = flops / (gpu.peak_flops_per_s * gpu.gemm.at(flops)) * 1e9
        return round(gpu.launch_ns + max(memory_ns, arithmetic_ns))


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A weight matrix of a layer with the computation that uses it, and what follows without weights."""

    name: str
    parameters: int
    matmul: Matmul
    """Forward, of one micro-batch; each gradient costs as much."""
    attached_forward_ns: int = 0
    attached_backward_ns: int = 0


def weight(name: str, matmul: Matmul, forward_ns: float = 0, backward_ns: float = 0) -> Unit:
    """A weight matrix, and nanoseconds of what follows it in both passes."""
    attached = {"attached_forward_ns": round(forward_ns), "attached_backward_ns": round(backward_ns)}
    return Unit(name=name, parameters=matmul.inputs * matmul.outputs, matmul=matmul, **attached)


@dataclass(frozen=True, kw_only=True)
class Step:
    """The work of one optimizer step on one rank."""

    units: tuple[Unit, ...]
    """Of one layer, in the order of the forward pass."""
    layers: int
    micro_batches: int
    group: RankGroup
    """Ranks that share the parameters, or hold copies of them."""
    replicas: RankGroup | None = None
    """Ranks of different groups that hold the same shard, if parameters are sharded in several groups."""
    optimizer_ns_per_parameter: float = 0.0
    element_bytes: int = 2
    """Of a parameter and of a gradient, as they are sent."""

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
    priority: Priority = Priority.ACTIVATION
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
            for pieces, hierarchical, priority in product(PIECE_COUNTS, (False, True), Priority):
                base = Choice(pieces=pieces, hierarchical=hierarchical, priority=priority)
                if method is Method.CENTAURI_FSDP:
                    yield from (replace(base, lag=lag) for lag in (1, 2, 3))
                else:
                    yield from (replace(base, substituted=cut) for cut in (True, False))
        case Method.OOO_BACKPROP:
            yield from (Choice(delayed=k, substituted=False) for k in range(step.layers + 1))
        case Method.DDP:
            yield Choice(substituted=False)
        case Method.ZERO1 | Method.ZERO2 | Method.ZERO3:
            yield Choice()


def state_bytes(method: Method, parameters: int, ranks: int) -> int:
    """Parameters and gradients in two bytes, master weights and Adam's moments in four each, of one rank."""
    whole = {Method.DDP: 16, Method.OOO_BACKPROP: 16, Method.ZERO1: 4, Method.CENTAURI: 4, Method.ZERO2: 2}
    kept = whole.get(method, 0)
    return parameters * (kept * ranks + 16 - kept) // ranks
