"""The model tier (Centauri section 3.2.3): how many micro-batches are launched together.

Under pipeline and data parallelism the all-gather of a chunk's weights hides behind the forward passes of L1
micro-batches, the reduce-scatter of its gradients behind the backward passes of L2. More of them hide more
and hold more activations. Equation 2 is a small integer problem and is solved exactly.
"""

from collections.abc import Iterator
from dataclasses import dataclass

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
