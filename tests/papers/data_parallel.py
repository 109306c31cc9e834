"""Optimizer steps under data parallelism and fully sharded data parallelism, as static orders of tasks.

Every method (PyTorch DDP, ZeRO 1 to 3, out-of-order backpropagation, Centauri) gives tasks for the three
streams of a rank, which run in their order. No stream slows another down here: contention is the pair
profile's business, and the same for every method.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from operator import itemgetter

from braid.scheduling.mesh.cluster import ClusterSpec, Stream
from braid.scheduling.model.operators import Kind
from tests.papers.methods import Choice, Method, Priority, Step, choices
from tests.papers.step_builder import StepBuilder, StepTask, Use
from tests.papers.tasks import makespan_ns, run_in_order


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The best schedule of a method, simulated."""

    total_ns: int
    """Of all steps together, from the first start to the last end."""
    serial_ns: int
    """The same tasks one after the other."""
    communication_ns: int
    """Sum of the communication tasks."""

    @property
    def alpha(self) -> float:
        """Share of communication in the serial time (docs/design.md, Numbers of overlap)."""
        return self.communication_ns / self.serial_ns


def schedule_step(
    method: Method, step: Step, cluster: ClusterSpec, steps: int = 1, whole_groups: bool = False
) -> StepResult:
    """The fastest schedule among a method's choices, or those without stages of collectives."""

    def timed(choice: Choice) -> tuple[int, tuple[StepTask, ...]]:
        tasks = step_tasks(method, step, cluster, choice, steps)
        return makespan_ns(run_in_order(tasks)), tasks

    left = (choice for choice in choices(method, step) if not (whole_groups and choice.hierarchical))
    total, tasks = min(map(timed, left), key=itemgetter(0))
    return StepResult(
        total_ns=total,
        serial_ns=sum(task.ns for task in tasks),
        communication_ns=sum(task.ns for task in tasks if task.stream is not Stream.COMPUTE),
    )


def step_tasks(
    method: Method, step: Step, cluster: ClusterSpec, choice: Choice, steps: int = 1
) -> tuple[StepTask, ...]:
    """The tasks of so many optimizer steps; the order on every stream is theirs in the result."""
    builder = StepBuilder(step, cluster, choice)
    for number in range(steps):
        if method.shards_parameters:
            _sharded_step(builder, method, number)
        else:
            _replicated_step(builder, method, number, final=number == steps - 1)
    return tuple(task for queue in builder.queues.values() for task in queue)


def _backward(
    builder: StepBuilder, use: Use, pieces: int, parts: int = 1, gathered: Sequence[str] = ()
) -> list[str]:
    """Both gradients of a unit by the chosen priority; the tasks of the weight gradient."""
    builder.attached(use, backward=True)
    weights: list[str] = []
    first = builder.choice.priority
    for gradient in (first, *(other for other in Priority if other is not first)):
        if gradient is Priority.WEIGHT:
            weights = [builder.compute(use, "weight_gradient", c, pieces) for c in range(pieces)]
        else:
            for c in range(parts):
                builder.compute(use, "input_gradient", c, parts, gathered[c : c + 1])
    return weights


def _sharded_step(builder: StepBuilder, method: Method, number: int) -> None:
    """ZeRO 3 and its partitioned form: a unit is gathered, used and let go of.

    ZeRO 3 gathers a unit while the one before computes. Centauri gathers parts as far ahead as the same
    memory allows: that of the largest two neighbouring units. A unit used twice in a row is gathered once.
    """
    pieces, lag, whole = builder.choice.pieces, builder.choice.lag, method is Method.ZERO3
    uses = _sharded_uses(builder, number)
    neighbours = [a.use.unit.parameters + b.use.unit.parameters for a, b in pairwise(uses) if not b.again]
    budget = max(neighbours, default=0)
    gradients: dict[int, list[str]] = {}
    scattered: dict[tuple[int, str], list[str]] = defaultdict(list)
    for position in range(len(uses) + lag):
        gathered: list[str] = []
        for c in range(pieces):
            if position < len(uses) and not uses[position].again:
                gathered.append(_gather_part(builder, uses[position], c, budget, whole))
            done = position - lag
            if done in gradients:
                use = uses[done].use
                after = (gradients[done][c],)
                name = builder.collective(use, "scatter", Kind.REDUCE_SCATTER, (c, pieces), after)
                if builder.step.replicas and use.micro_batch == builder.step.micro_batches - 1:
                    of = builder.step.replicas
                    name = builder.collective(use, "reduce", Kind.ALL_REDUCE, (c, pieces), (name,), of)
                scattered[use.weight].append(name)
        if position < len(uses):
            use = uses[position].use
            if uses[position].backward:
                gradients[position] = _backward(builder, use, pieces, pieces, gathered)
            else:
                for c in range(pieces):
                    builder.compute(use, "forward", c, pieces, gathered[c : c + 1])
                builder.attached(use, backward=False)
    everything = [name for names in scattered.values() for name in names]
    for use in reversed(builder.uses(number, 0)):
        own = scattered[use.weight]
        builder.update(use, sharded=True, after=everything if whole else own)


@dataclass(frozen=True)
class _ShardedUse:
    """A use of a unit that is gathered for it, unless it is still there."""

    use: Use
    backward: bool
    again: bool
    """The use before was of the same unit."""
    last: str
    """Start of the names of the tasks after which the parts are let go of."""


def _sharded_uses(builder: StepBuilder, number: int) -> list[_ShardedUse]:
    """All uses of a step in order: forward and backward of every micro-batch."""
    order: list[tuple[Use, bool]] = []
    for micro_batch in range(builder.step.micro_batches):
        forward = builder.uses(number, micro_batch)
        order += [(use, False) for use in forward] + [(use, True) for use in reversed(forward)]
    found: list[_ShardedUse] = []
    for _, in_a_row in groupby(order, key=lambda one: one[0].weight):
        own = list(in_a_row)
        last, backward = own[-1]
        end = last.task("input_gradient" if backward else "forward", "")
        found += [_ShardedUse(use, backward, n > 0, end) for n, (use, backward) in enumerate(own)]
    return found


def _gather_part(builder: StepBuilder, sharded: _ShardedUse, c: int, budget: float, whole: bool) -> str:
    """Gather a part of a unit once there is room for it and it is up to date."""
    use, pieces = sharded.use, builder.choice.pieces
    size = use.unit.parameters / pieces
    before_last = tuple(task for _, task in builder.consumed[-2:-1])
    after = before_last if whole else builder.room(size, budget)
    if use.step:
        after = (*after, replace(use, step=use.step - 1, micro_batch=0).task("optimizer"))
    builder.consumed.append((size, f"{sharded.last}{c}"))
    label = "gather_backward" if sharded.backward else "gather"
    return builder.collective(use, label, Kind.ALL_GATHER, (c, pieces), after)


def _replicated_step(builder: StepBuilder, method: Method, number: int, final: bool) -> None:
    """Every rank holds all parameters: gradients are reduced behind the backward pass."""
    step, choice = builder.step, builder.choice
    kind = Kind.REDUCE_SCATTER if choice.substituted else Kind.ALL_REDUCE
    # A baseline's update waits for all gradients, and its next forward pass for all parameters.
    one_by_one = method in (Method.CENTAURI, Method.OOO_BACKPROP)
    reduced: dict[Use, list[str]] = defaultdict(list)
    for micro_batch in range(step.micro_batches):
        uses = builder.uses(number, micro_batch)
        last = micro_batch == step.micro_batches - 1
        for use in uses:
            _replicated_forward(builder, use)
        reduces = last or method is Method.ZERO2
        delayed = choice.delayed if last else 0
        for use, parts in _replicated_backward(builder, uses, delayed, choice.pieces if reduces else 1):
            for c, part in enumerate(parts if reduces else ()):
                name = builder.collective(use, "reduce", kind, (c, len(parts)), (part,))
                reduced[replace(use, micro_batch=0)].append(name)
    everything = [name for names in reduced.values() for name in names]
    order = builder.uses(number, 0)
    if one_by_one and not choice.substituted and not final:
        # Units are updated one by one as the next forward pass comes to them.
        builder.pending = {use.weight: (use, reduced[use]) for use in order}
        return
    for use in reversed(order) if choice.substituted else order:
        builder.update(use, choice.substituted, reduced[use] if one_by_one else everything)
    if choice.substituted:
        _gather_updated(builder, order, one_by_one)


def _replicated_forward(builder: StepBuilder, use: Use) -> None:
    """Forward pass of a unit, after whatever the step before has left to wait for."""
    if use.weight in builder.pending:
        before, reduced = builder.pending.pop(use.weight)
        builder.update(before, False, reduced)
    parts = builder.gathered.pop(use.weight, [()])
    for c, after in enumerate(parts):
        builder.compute(use, "forward", c, len(parts), after)
    builder.attached(use, backward=False)


def _replicated_backward(
    builder: StepBuilder, uses: Sequence[Use], delayed: int, pieces: int
) -> Iterator[tuple[Use, list[str]]]:
    """Backward pass of all units; yields the parts of every weight gradient in the order of their making."""
    for use in reversed(uses):
        if use.layer >= delayed:
            yield use, _backward(builder, use, pieces)
        else:
            builder.attached(use, backward=True)
            builder.compute(use, "input_gradient", 0, 1)
    for use in uses:
        if use.layer < delayed:
            yield use, [builder.compute(use, "weight_gradient", c, pieces) for c in range(pieces)]


def _gather_updated(builder: StepBuilder, order: Sequence[Use], one_by_one: bool) -> None:
    """All-gather of the updated parameters, and what the next forward pass waits for."""
    parts = [(c, builder.choice.pieces) for c in range(builder.choice.pieces)]
    updates = [use.task("optimizer") for use in order]
    names = {
        use.weight: [
            builder.collective(use, "gather", Kind.ALL_GATHER, part, [update] if one_by_one else updates)
            for part in parts
        ]
        for use, update in zip(order, updates, strict=True)
    }
    if one_by_one:
        builder.gathered = {key: [(name,) for name in own] for key, own in names.items()}
    else:
        builder.gathered[order[0].weight] = [tuple(name for own in names.values() for name in own)]
