"""The layer tier (Centauri section 3.2.2): which gradient of a backward layer goes first.

`decide_priority` takes the cheaper of the paper's T1 and T2 (equation 1) and sets beside them what the same
two orders, and the best order of all, take on streams. Equation 1 lets every phase wait for the one before;
streams do not, so the formula is never below the timeline of its own order.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import permutations, product

from braid.scheduling.operators import Stream
from braid.scheduling.planner.operation import Task, makespan_ns, run_in_order
from braid.scheduling.records import require_positive


@dataclass(frozen=True, kw_only=True)
class BackwardCosts:
    """Times of the operators of a backward layer under tensor (or sequence) and fully sharded parallelism.

    What the layer does not have takes zero.
    """

    weight_gather_ns: int
    """W_AG: the sharded weights, needed by the activation gradient."""
    activation_gather_ns: int
    """act_AG: the sharded activations, needed by the weight gradient."""
    activation_gradient_ns: int
    weight_gradient_ns: int
    activation_scatter_ns: int
    """act_RS, of the activation gradient."""
    weight_scatter_ns: int
    """G_w_RS, of the weight gradient."""
    others_ns: int
    """Computation that follows the activation scatter."""
    weight_stream: Stream = Stream.INTER
    activation_stream: Stream = Stream.INTRA

    def __post_init__(self) -> None:
        times = [name for name in vars(self) if name.endswith("_ns")]
        require_positive(self, times, zero=True)
        for name in ("weight_stream", "activation_stream"):
            if getattr(self, name) is Stream.COMPUTE:
                raise ValueError(f"{name}=compute must be intra or inter: it carries collectives")


class Priority(StrEnum):
    """Which gradient is computed first."""

    ACTIVATION = "activation"
    WEIGHT = "weight"


@dataclass(frozen=True, kw_only=True)
class LayerDecision:
    """Equation 1's choice and, in simulated time, how far it is from the best order."""

    priority: Priority
    ns: int
    """By equation 1, of the chosen priority."""
    runner_up_ns: int
    activation_first_ns: int
    """T1."""
    weight_first_ns: int
    """T2."""
    simulated_activation_first_ns: int
    """The best order on streams that computes the activation gradient first."""
    simulated_weight_first_ns: int
    best_order: tuple[str, ...]
    """Operators by their start in the best order on streams."""
    best_ns: int

    @property
    def simulated_ns(self) -> int:
        """The chosen priority on streams."""
        if self.priority is Priority.ACTIVATION:
            return self.simulated_activation_first_ns
        return self.simulated_weight_first_ns

    @property
    def formula_excess(self) -> float:
        """How much the formula's cost lies above the best order on streams, as a share of the latter."""
        return self.ns / self.best_ns - 1 if self.best_ns else 0.0


def activation_first_ns(costs: BackwardCosts) -> int:
    """T1 of equation 1."""
    return (
        costs.weight_gather_ns
        + max(costs.activation_gradient_ns, costs.activation_gather_ns)
        + max(costs.weight_gradient_ns, costs.activation_scatter_ns)
        + max(costs.weight_scatter_ns, costs.others_ns)
    )


def weight_first_ns(costs: BackwardCosts) -> int:
    """T2 of equation 1."""
    return (
        costs.activation_gather_ns
        + max(costs.weight_gradient_ns, costs.weight_gather_ns)
        + max(costs.activation_gradient_ns, costs.weight_scatter_ns)
        + costs.activation_scatter_ns
        + costs.others_ns
    )


def decide_priority(costs: BackwardCosts) -> LayerDecision:
    """The cheaper of T1 and T2 (T1 where they are equal), beside the exact search on streams."""
    first, second = activation_first_ns(costs), weight_first_ns(costs)
    best = {priority: _best(costs, priority) for priority in Priority}
    best_ns, order = min(best.values())
    return LayerDecision(
        priority=Priority.ACTIVATION if first <= second else Priority.WEIGHT,
        ns=min(first, second),
        runner_up_ns=max(first, second),
        activation_first_ns=first,
        weight_first_ns=second,
        simulated_activation_first_ns=best[Priority.ACTIVATION][0],
        simulated_weight_first_ns=best[Priority.WEIGHT][0],
        best_order=order,
        best_ns=best_ns,
    )


def backward_tasks(costs: BackwardCosts) -> tuple[Task, ...]:
    """The operators of a backward layer with what each waits for."""
    weight, activation, compute = costs.weight_stream, costs.activation_stream, Stream.COMPUTE
    return (
        Task(name="weight_gather", stream=weight, ns=costs.weight_gather_ns),
        Task(name="activation_gather", stream=activation, ns=costs.activation_gather_ns),
        Task(
            name="activation_gradient",
            stream=compute,
            ns=costs.activation_gradient_ns,
            after=("weight_gather",),
        ),
        Task(
            name="weight_gradient",
            stream=compute,
            ns=costs.weight_gradient_ns,
            after=("activation_gather",),
        ),
        Task(
            name="activation_scatter",
            stream=activation,
            ns=costs.activation_scatter_ns,
            after=("activation_gradient",),
        ),
        Task(name="weight_scatter", stream=weight, ns=costs.weight_scatter_ns, after=("weight_gradient",)),
        Task(name="others", stream=compute, ns=costs.others_ns, after=("activation_scatter",)),
    )


def stream_orders(costs: BackwardCosts) -> Iterator[tuple[Task, ...]]:
    """Every static order of every stream that can run."""
    tasks = backward_tasks(costs)
    queues = [[task for task in tasks if task.stream is stream] for stream in Stream]
    for orders in product(*(permutations(queue) for queue in queues)):
        yield tuple(task for order in orders for task in order)


def _best(costs: BackwardCosts, priority: Priority) -> tuple[int, tuple[str, ...]]:
    """The shortest order with that priority: time and operators by their start."""
    found = []
    for tasks in stream_orders(costs):
        names = [task.name for task in tasks]
        activation_first = names.index("activation_gradient") < names.index("weight_gradient")
        if activation_first is not (priority is Priority.ACTIVATION):
            continue
        try:
            times = run_in_order(tasks)
        except ValueError:
            # Streams that wait for each other: no order to be had.
            continue
        found.append((makespan_ns(times), tuple(sorted(names, key=lambda name: (times[name], name)))))
    return min(found)
