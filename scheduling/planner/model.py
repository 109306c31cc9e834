"""The model tier (Centauri section 3.2.3): what a step is made of, and what is launched together.

A data-parallel `Step`, the methods to run it and what each leaves open are described here;
`braid.scheduling.planner.data_parallel` makes their schedules.

Under pipeline and data parallelism the all-gather of a chunk's weights hides behind the forward passes of L1
micro-batches, the reduce-scatter of its gradients behind the backward passes of L2. More of them hide more
and hold more activations. Equation 2 is a small integer problem and is solved exactly.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from braid.scheduling.cluster import Group
from braid.scheduling.planner.chain import ChainOperator
from braid.scheduling.planner.layer import Priority
from braid.scheduling.planner.partition import CHUNK_COUNTS
from braid.scheduling.records import require_positive


@dataclass(frozen=True, kw_only=True)
class LaunchCosts:
    """What equation 2 is given, of one stage's model chunk."""

    gather_ns: int
    """C_AG: all-gather of the chunk's weights."""
    scatter_ns: int
    """C_RS: reduce-scatter of the chunk's gradients."""
    forward_ns: int
    """C_fw: forward pass of one micro-batch."""
    backward_ns: int
    activation_bytes: int
    """m: held by one micro-batch from its forward to its backward pass."""
    free_bytes: int
    """M: left on the device by weights, gradients, optimizer and buffers."""
    micro_batches: int
    """mb: of one optimizer step."""
    stages: int
    """Depth of the pipeline: depth-first launches as many together."""

    def __post_init__(self) -> None:
        require_positive(self, ("gather_ns", "scatter_ns", "forward_ns", "backward_ns"), zero=True)
        require_positive(self, ("activation_bytes", "micro_batches", "stages"))


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Numbers of micro-batches launched together, and what they come to."""

    forward: int
    """L1."""
    backward: int
    """L2."""
    exposed_ns: int
    """T of equation 2: communication that they leave uncovered."""
    peak_bytes: int
    """Activations held: the larger number of micro-batches times m."""
    fits: bool
    """Whether all constraints of equation 2 hold."""


@dataclass(frozen=True, kw_only=True)
class LaunchDecision:
    """The solution of equation 2 beside what was not chosen."""

    launch: Launch
    runner_up: Launch | None
    """None where only one pair of numbers is allowed."""
    depth_first: Launch
    """As many as the pipeline is deep (Centauri figure 7b)."""
    breadth_first: Launch
    """All micro-batches (figure 7c)."""


def launch(costs: LaunchCosts, forward: int, backward: int) -> Launch:
    """What launching so many forward and backward passes together comes to (equation 2)."""
    uncovered = max(costs.gather_ns - forward * costs.forward_ns, 0)
    uncovered += max(costs.scatter_ns - backward * costs.backward_ns, 0)
    peak = max(forward, backward) * costs.activation_bytes
    return Launch(
        forward=forward,
        backward=backward,
        exposed_ns=uncovered,
        peak_bytes=peak,
        fits=peak <= costs.free_bytes and forward + backward <= costs.micro_batches,
    )


def allowed_launches(costs: LaunchCosts) -> Iterator[Launch]:
    """Every pair of numbers, each at least one, that the constraints of equation 2 allow."""
    most = min(costs.free_bytes // costs.activation_bytes, costs.micro_batches - 1)
    for forward in range(1, most + 1):
        for backward in range(1, min(most, costs.micro_batches - forward) + 1):
            yield launch(costs, forward, backward)


def decide_launch(costs: LaunchCosts) -> LaunchDecision:
    """The launch with the least exposed communication; of equals the one with the least memory.

    Raises `ValueError` where not even one micro-batch fits, or the step has fewer than two.
    """
    missing = costs.activation_bytes - costs.free_bytes
    if missing > 0:
        raise ValueError(
            f"activations of one micro-batch take {costs.activation_bytes} bytes, {missing} more than the "
            f"{costs.free_bytes} that are free; lower train.micro_batch, recompute activations, or raise "
            f"parallel.pp or parallel.tp"
        )
    if costs.micro_batches < 2:
        raise ValueError(
            f"micro_batches={costs.micro_batches} must be at least 2, one forward and one backward (equation "
            f"2: L1 + L2 <= mb); raise train.global_batch or lower train.micro_batch"
        )
    ranked = sorted(
        allowed_launches(costs),
        key=lambda one: (one.exposed_ns, one.peak_bytes, one.forward + one.backward, one.forward),
    )
    return LaunchDecision(
        launch=ranked[0],
        runner_up=ranked[1] if len(ranked) > 1 else None,
        depth_first=launch(costs, costs.stages, costs.stages),
        breadth_first=launch(costs, costs.micro_batches, costs.micro_batches),
    )


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


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A weight matrix of a layer with the computation that uses it, and what follows without weights."""

    name: str
    parameters: int
    matmul: ChainOperator
    """Forward, of one micro-batch; each gradient costs as much."""
    attached_forward_ns: int = 0
    attached_backward_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class Step:
    """The work of one optimizer step on one rank."""

    units: tuple[Unit, ...]
    """Of one layer, in the order of the forward pass."""
    layers: int
    micro_batches: int
    group: Group
    """Ranks that share the parameters, or hold copies of them."""
    replicas: Group | None = None
    """Ranks of different groups that hold the same shard, if parameters are sharded in several groups."""
    optimizer_ns_per_parameter: float = 0.0
    element_bytes: int = 2
    """Of a parameter and of a gradient, as they are sent."""

    def __post_init__(self) -> None:
        require_positive(self, ("layers", "micro_batches", "element_bytes"))
        require_positive(self, ("optimizer_ns_per_parameter",), zero=True)
        if not self.units:
            raise ValueError("units=() must hold at least one weight matrix of a layer")

    @property
    def parameters(self) -> int:
        """Of all layers."""
        return self.layers * sum(unit.parameters for unit in self.units)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a method leaves open; the defaults are what the baselines do."""

    chunks: int = 1
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
            for chunks in CHUNK_COUNTS:
                for hierarchical in (False, True):
                    for priority in Priority:
                        base = Choice(chunks=chunks, hierarchical=hierarchical, priority=priority)
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
    held = {
        Method.DDP: 16 * ranks,
        Method.OOO_BACKPROP: 16 * ranks,
        Method.ZERO1: 4 * ranks + 12,
        Method.CENTAURI: 4 * ranks + 12,
        Method.ZERO2: 2 * ranks + 14,
        Method.ZERO3: 16,
        Method.CENTAURI_FSDP: 16,
    }
    return parameters * held[method] // ranks
