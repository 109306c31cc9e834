"""Optimizer steps under data parallelism and fully sharded data parallelism, as static orders of tasks.

Every method (PyTorch DDP, ZeRO 1 to 3, out-of-order backpropagation, Centauri) gives tasks for the three
streams of a rank, which run in their order. No stream slows another down here: contention is the pair
profile's business, and the same for every method. Sizes are per rank, payloads of whole tensors.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

from braid.scheduling.cost.collectives import collective_ns
from braid.scheduling.mesh.cluster import ClusterSpec, RankGroup, Stream, dim_group
from braid.scheduling.model.operators import Kind
from braid.scheduling.schedule.timeline import run_in_order
from tests.papers.methods import Choice, Method, Step, Unit, choices


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
    results = [
        simulated(step_tasks(method, step, cluster, choice, steps))
        for choice in choices(method, step)
        if not (whole_groups and choice.hierarchical)
    ]
    return min(results, key=lambda one: one.total_ns)


class Task(NamedTuple):
    """Work on one stream; it starts when its stream is free and all of ``after`` have ended."""

    name: str
    ns: int
    after: tuple[str, ...]


Tasks = dict[Stream, list[Task]]
"""In the order in which every stream serves them."""


def simulated(tasks: Tasks) -> StepResult:
    """How long tasks take."""
    named = {task.name: task for queue in tasks.values() for task in queue}
    queues = {stream: [task.name for task in queue] for stream, queue in tasks.items()}
    times, stuck = run_in_order(queues, lambda name: named[name].after, lambda name: named[name].ns)
    assert not stuck, "the streams wait for each other for ever"
    spent = {stream: sum(task.ns for task in queue) for stream, queue in tasks.items()}
    serial = sum(spent.values())
    return StepResult(
        total_ns=max(end for _, end in times.values()),
        serial_ns=serial,
        communication_ns=serial - spent[Stream.COMPUTE],
    )


# -- tasks ---------------------------------------------------------------------------------------------------


class Use(NamedTuple):
    """One pass of one micro-batch over one unit; the prefix of its tasks' names."""

    step: int
    micro_batch: int
    layer: int
    unit: Unit

    @property
    def weight(self) -> tuple[int, str]:
        """Which of the model's weights it is."""
        return self.layer, self.unit.name

    def task(self, operator: str, piece: int | str = 0) -> str:
        """The name of one of its tasks."""
        return f"{self.step}.{self.micro_batch}.{self.layer}.{self.unit.name}.{operator}.{piece}"


def hierarchical(kind: Kind, payload: float, group: RankGroup) -> tuple[tuple[Kind, RankGroup, float], ...]:
    """Stages over nodes x ranks of a node, with the bytes of each, in the order that sends least between
    nodes; an all-reduce perhaps as reduce-scatter and all-gather. None where ranks have one kind of link."""
    mesh = (group.nodes, group.per_node)
    if 1 in mesh:
        return ()
    across, inside = (dim_group(group, mesh, dim) for dim in (0, 1))
    part = payload / group.per_node
    scatter = (Kind.REDUCE_SCATTER, inside, payload), (Kind.REDUCE_SCATTER, across, part)
    gather = (Kind.ALL_GATHER, across, part), (Kind.ALL_GATHER, inside, payload)
    if kind is Kind.ALL_REDUCE:
        whole = (kind, inside, payload), (kind, across, payload)
        return whole if group.per_node == 2 else (*scatter, *gather)
    return gather if kind is Kind.ALL_GATHER else scatter


def step_tasks(method: Method, step: Step, cluster: ClusterSpec, choice: Choice, steps: int = 1) -> Tasks:
    """The tasks of so many optimizer steps."""
    builder = StepBuilder(step, cluster, choice)
    for number in range(steps):
        if method in (Method.ZERO3, Method.CENTAURI_FSDP):
            _sharded_step(builder, method, number)
        else:
            _replicated_step(builder, method, number, final=number == steps - 1)
    return builder.tasks


class StepBuilder:
    """Collects tasks per stream."""

    def __init__(self, step: Step, cluster: ClusterSpec, choice: Choice) -> None:
        self.step, self.cluster, self.choice = step, cluster, choice
        self.tasks: Tasks = defaultdict(list)
        self.consumed: list[tuple[float, str]] = []
        """Parameters of every part gathered so far and the task that lets go of it."""
        self.pending: dict[tuple[int, str], tuple[Use, list[str]]] = {}
        """Units, by layer and name, that the step before has not updated yet; the ends of their gradients."""
        self.gathered: dict[tuple[int, str], list[tuple[str, ...]]] = {}
        """What the parts of a unit's first forward pass wait for."""

    def uses(self, step: int, micro_batch: int) -> list[Use]:
        """The units of all layers in the order of the forward pass."""
        layers = range(self.step.layers)
        return [Use(step, micro_batch, layer, unit) for layer in layers for unit in self.step.units]

    def compute(self, use: Use, operator: str, piece: int, pieces: int, after: Iterable[str] = ()) -> str:
        """Part of a forward pass (or of a gradient) of a unit's matrix product."""
        ns = use.unit.ns(self.cluster.gpu, 1 / pieces)
        return self._add(use, operator, piece, Stream.COMPUTE, ns, after)

    def attached(self, use: Use, backward: bool) -> None:
        """The operators of a unit that have no weights, if any."""
        if ns := round(use.unit.attached[backward]):
            self._add(use, "attached_backward" if backward else "attached", 0, Stream.COMPUTE, ns, ())

    def update(self, use: Use, sharded: bool, after: Iterable[str]) -> str:
        """The optimizer on a unit's parameters, or on this rank's share of them."""
        share = self.step.group.size if sharded else 1
        ns = use.unit.parameters * self.step.optimizer_ns_per_parameter / share
        return self._add(use, "optimizer", 0, Stream.COMPUTE, round(self.cluster.gpu.launch_ns + ns), after)

    def collective(
        self,
        use: Use,
        operator: str,
        kind: Kind,
        part: tuple[int, int],
        after: Iterable[str],
        of: RankGroup | None = None,
    ) -> str:
        """All stages of a part (number, of how many) of a unit's collective; the name of the last.

        Without ``of`` its group is that of the step and the payload the unit; else the rank's shard of it.
        """
        piece, pieces = part
        payload, group = use.unit.parameters * 2, of or self.step.group
        if of is not None:
            payload = -(-payload // self.step.group.size)
        if group.size == 1:
            return self._add(use, operator, piece, Stream.INTRA, 0, after)
        name = ""
        stages = hierarchical(kind, payload, group) if self.choice.hierarchical else ()
        for number, (stage, over, size) in enumerate(stages or ((kind, group, float(payload)),)):
            ns = self.cluster.gpu.launch_ns + collective_ns(self.cluster, stage, size / pieces, over)
            waits = (name,) if number else after
            name = self._add(use, operator, f"{piece}.{number}", over.stream, ns, waits)
        return name

    def room(self, size: float, budget: float) -> tuple[str, ...]:
        """The task that must end before another part of so many parameters is within the budget."""
        held = size
        for own, task in reversed(self.consumed):
            held += own
            if held > budget:
                return (task,)
        return ()

    def _add(
        self, use: Use, operator: str, piece: int | str, stream: Stream, ns: int, after: Iterable[str]
    ) -> str:
        self.tasks[stream].append(Task(use.task(operator, piece), ns, tuple(after)))
        return self.tasks[stream][-1].name


def _backward(
    builder: StepBuilder, use: Use, pieces: int, parts: int = 1, gathered: Sequence[str] = ()
) -> list[str]:
    """Both gradients of a unit by the chosen priority; the tasks of the weight gradient."""
    builder.attached(use, backward=True)
    weights: list[str] = []
    for of_weight in (builder.choice.weight_first, not builder.choice.weight_first):
        if of_weight:
            weights = [builder.compute(use, "weight_gradient", c, pieces) for c in range(pieces)]
        else:
            for c in range(parts):
                builder.compute(use, "input_gradient", c, parts, gathered[c : c + 1])
    return weights


# -- sharded parameters --------------------------------------------------------------------------------------


class _ShardedUse(NamedTuple):
    """A use of a unit that is gathered for it, unless it is still there."""

    use: Use
    backward: bool
    again: bool
    """The use before was of the same unit."""
    last: str
    """Start of the names of the tasks after which the parts are let go of."""


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
        builder.update(use, sharded=True, after=everything if whole else scattered[use.weight])


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
        after = (*after, use._replace(step=use.step - 1, micro_batch=0).task("optimizer"))
    builder.consumed.append((size, f"{sharded.last}{c}"))
    label = "gather_backward" if sharded.backward else "gather"
    return builder.collective(use, label, Kind.ALL_GATHER, (c, pieces), after)


# -- replicated parameters -----------------------------------------------------------------------------------


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
                reduced[use._replace(micro_batch=0)].append(name)
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
