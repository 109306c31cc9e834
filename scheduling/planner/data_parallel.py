"""Optimizer steps under data parallelism and fully sharded data parallelism, as static orders of tasks.

Every method (PyTorch DDP, ZeRO 1 to 3, out-of-order backpropagation, Centauri) gives tasks for the three
streams of a rank; `simulate` runs any of them. No stream slows another down here: contention is the pair
profile's business, and the same for every method.

A *use* is one pass of one micro-batch over one unit; sizes are per rank, payloads of whole tensors.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from braid.scheduling.cluster import ClusterSpec, Group
from braid.scheduling.operators import Kind, Stream
from braid.scheduling.planner.layer import Priority
from braid.scheduling.planner.model import Choice, Method, Step, Unit, choices
from braid.scheduling.planner.operation import STREAM_OF, Task, chain_ns, makespan_ns, run_in_order
from braid.scheduling.planner.partition import Collective, Stage, partition_space, stage_ns
from braid.scheduling.trace import Span


@dataclass(frozen=True, kw_only=True)
class StepTask(Task):
    """A task with its place in the step; ``bytes`` are those of a collective's payload."""

    operator: str
    step: int
    micro_batch: int
    layer: int
    bytes: int = 0
    flops: int = 0


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The best schedule of a method, simulated."""

    method: Method
    choice: Choice
    runner_up: Choice | None
    runner_up_ns: int | None
    total_ns: int
    """Of all steps together, from the first start to the last end."""
    serial_ns: int
    """The same tasks one after the other."""
    communication_ns: int
    """Sum of the communication tasks."""
    spans: tuple[Span, ...]

    @property
    def alpha(self) -> float:
        """Share of communication in the serial time (docs/design.md, Numbers of overlap)."""
        return self.communication_ns / self.serial_ns


def schedule_step(method: Method, step: Step, cluster: ClusterSpec, steps: int = 1) -> StepResult:
    """The fastest schedule among a method's choices, with all of its spans, and the runner-up."""
    options = list(choices(method, step))
    timed = [
        (makespan_ns(run_in_order(step_tasks(method, step, cluster, choice, steps))), n)
        for n, choice in enumerate(options)
    ]
    (total, best), *others = sorted(timed)
    tasks = step_tasks(method, step, cluster, options[best], steps)
    second = min(others, default=None)
    return StepResult(
        method=method,
        choice=options[best],
        runner_up=options[second[1]] if second else None,
        runner_up_ns=second[0] if second else None,
        total_ns=total,
        serial_ns=sum(task.ns for task in tasks),
        communication_ns=sum(task.ns for task in tasks if task.stream is not Stream.COMPUTE),
        spans=simulate(tasks),
    )


def step_tasks(
    method: Method, step: Step, cluster: ClusterSpec, choice: Choice, steps: int = 1
) -> tuple[StepTask, ...]:
    """The tasks of so many optimizer steps; the order on every stream is theirs in the result."""
    builder = _Builder(step, cluster, choice)
    for number in range(steps):
        if method.shards_parameters:
            _sharded_step(builder, method, number)
        else:
            _replicated_step(builder, method, number, final=number == steps - 1)
    return tuple(task for queue in builder.queues.values() for task in queue)


def simulate(tasks: Sequence[StepTask], rank: int = 0) -> tuple[Span, ...]:
    """Run tasks in their static orders; spans by start, `ValueError` where the orders lock each other."""
    times = run_in_order(tasks)
    spans = (
        Span(
            rank=rank,
            step=task.step,
            strand="alpha",
            micro_batch=task.micro_batch,
            chunk=0,
            layer=task.layer,
            operator=task.operator,
            stream=task.stream,
            start_ns=times[task.name][0],
            end_ns=times[task.name][1],
            bytes=task.bytes,
            flops=task.flops,
        )
        for task in tasks
    )
    return tuple(sorted(spans, key=lambda span: (span.start_ns, span.end_ns, span.stream)))


def serialised(tasks: Sequence[StepTask]) -> tuple[StepTask, ...]:
    """The same tasks without any overlap: each waits for the one that started before it."""
    times = run_in_order(tasks)
    ordered = sorted(tasks, key=lambda task: (times[task.name], tasks.index(task)))
    return (ordered[0], *(replace(b, after=(a.name,)) for a, b in pairwise(ordered)))


@dataclass(frozen=True)
class _Use:
    """One pass of one micro-batch over one unit; the prefix of its tasks' names."""

    step: int
    micro_batch: int
    layer: int
    unit: Unit

    @property
    def weight(self) -> tuple[int, str]:
        """Which of the model's weights it is."""
        return self.layer, self.unit.name

    def task(self, operator: str, chunk: int | str = 0) -> str:
        return f"{self.step}.{self.micro_batch}.{self.layer}.{self.unit.name}.{operator}.{chunk}"


class _Builder:
    """Collects tasks per stream, in static order."""

    def __init__(self, step: Step, cluster: ClusterSpec, choice: Choice) -> None:
        self.step, self.cluster, self.choice = step, cluster, choice
        self.queues: dict[Stream, list[StepTask]] = defaultdict(list)
        self.consumed: list[tuple[float, str]] = []
        """Bytes of every part gathered so far and the task that lets go of it."""
        self.pending: dict[tuple[int, str], tuple[_Use, list[str]]] = {}
        """Units, by layer and name, that the step before has not updated yet; the ends of their gradients."""
        self.gathered: dict[tuple[int, str], list[tuple[str, ...]]] = {}
        """What the parts of a unit's first forward pass wait for."""
        self._stages = cache(self._find_stages)

    def uses(self, step: int, micro_batch: int) -> list[_Use]:
        """The units of all layers in the order of the forward pass."""
        layers = range(self.step.layers)
        return [_Use(step, micro_batch, layer, unit) for layer in layers for unit in self.step.units]

    def compute(self, use: _Use, operator: str, chunk: int, chunks: int, after: Iterable[str] = ()) -> str:
        """Part of a forward pass (or of a gradient) of a unit's matrix product."""
        ns = chain_ns(self.cluster.gpu, (use.unit.matmul,), 1 / chunks)
        return self._add(
            use, operator, chunk, Stream.COMPUTE, ns, after, flops=use.unit.matmul.flops // chunks
        )

    def attached(self, use: _Use, backward: bool) -> None:
        """The operators of a unit that have no weights, if any."""
        ns = use.unit.attached_backward_ns if backward else use.unit.attached_forward_ns
        if ns:
            self._add(use, "attached_backward" if backward else "attached", 0, Stream.COMPUTE, ns)

    def update(self, use: _Use, sharded: bool, after: Iterable[str]) -> str:
        """The optimizer on a unit's parameters, or on this rank's share of them."""
        share = self.step.group.size if sharded else 1
        ns = use.unit.parameters * self.step.optimizer_ns_per_parameter / share
        launched = round(self.cluster.gpu.launch_ns + ns)
        return self._add(use, "optimizer", 0, Stream.COMPUTE, launched, after)

    def collective(
        self,
        use: _Use,
        operator: str,
        kind: Kind,
        part: tuple[int, int],
        after: Iterable[str],
        group: Group | None = None,
    ) -> str:
        """All stages of a part (number, of how many) of a unit's collective; the name of the last.

        Without ``group`` it is that of the step and the payload the unit; else the rank's shard of it.
        """
        chunk, chunks = part
        payload = use.unit.parameters * self.step.element_bytes
        if group is None:
            group = self.step.group
        else:
            payload = -(-payload // self.step.group.size)
        if group.size == 1:
            return self._add(use, operator, chunk, Stream.INTRA, 0, after)
        name = ""
        for number, stage in enumerate(self._stages(kind, payload, group)):
            ns = self.cluster.gpu.launch_ns + stage_ns(self.cluster, stage, chunks)
            waits = (name,) if number else after
            label = f"{chunk}.{number}"
            sent = round(stage.payload_bytes / chunks)
            name = self._add(use, operator, label, STREAM_OF[stage.group.level], ns, waits, sent=sent)
        return name

    def room(self, size: float, budget: float) -> tuple[str, ...]:
        """The task that must end before another part of so many bytes is within the budget."""
        held = size
        for bytes_held, task in reversed(self.consumed):
            held += bytes_held
            if held > budget:
                return (task,)
        return ()

    def _find_stages(self, kind: Kind, payload: int, group: Group) -> tuple[Stage, ...]:
        """Direct, or nodes x ranks of a node in the order that sends least between nodes."""
        space = partition_space(Collective(kind=kind, payload_bytes=payload), group, self.cluster)
        mesh = (group.nodes, group.per_node)
        if not self.choice.hierarchical or 1 in mesh:
            return space.schemes[0].stages
        found = [scheme.stages for scheme in space.schemes if scheme.mesh == mesh and scheme.chunks == 1]

        def between(stages: tuple[Stage, ...]) -> tuple[float, int]:
            inter = [stage.payload_bytes for stage in stages if stage.group.per_node == 1]
            return sum(inter), len(stages)

        return min(found, key=between)

    def _add(
        self,
        use: _Use,
        operator: str,
        chunk: int | str,
        stream: Stream,
        ns: int,
        after: Iterable[str] = (),
        *,
        sent: int = 0,
        flops: int = 0,
    ) -> str:
        task = StepTask(
            name=use.task(operator, chunk),
            stream=stream,
            ns=ns,
            after=tuple(after),
            operator=f"{use.unit.name}.{operator}.{chunk}",
            step=use.step,
            micro_batch=use.micro_batch,
            layer=use.layer,
            bytes=sent,
            flops=flops,
        )
        self.queues[stream].append(task)
        return task.name


def _backward(
    builder: _Builder, use: _Use, chunks: int, parts: int = 1, gathered: Sequence[str] = ()
) -> list[str]:
    """Both gradients of a unit by the chosen priority; the tasks of the weight gradient."""
    builder.attached(use, backward=True)
    weights: list[str] = []
    first = builder.choice.priority
    for gradient in (first, *(other for other in Priority if other is not first)):
        if gradient is Priority.WEIGHT:
            weights = [builder.compute(use, "weight_gradient", c, chunks) for c in range(chunks)]
        else:
            for c in range(parts):
                builder.compute(use, "input_gradient", c, parts, gathered[c : c + 1])
    return weights


def _sharded_step(builder: _Builder, method: Method, number: int) -> None:
    """ZeRO 3 and its partitioned form: a unit is gathered, used and let go of.

    ZeRO 3 gathers a unit while the one before computes. Centauri gathers parts as far ahead as the same
    memory allows: that of the largest two neighbouring units. A unit used twice in a row is gathered once.
    """
    chunks, lag, whole = builder.choice.chunks, builder.choice.lag, method is Method.ZERO3
    uses = _sharded_uses(builder, number)
    neighbours = [a.use.unit.parameters + b.use.unit.parameters for a, b in pairwise(uses) if not b.again]
    budget = max(neighbours, default=0)
    gradients: dict[int, list[str]] = {}
    scattered: dict[tuple[int, str], list[str]] = defaultdict(list)
    for position in range(len(uses) + lag):
        gathered: list[str] = []
        for c in range(chunks):
            if position < len(uses) and not uses[position].again:
                gathered.append(_gather_part(builder, uses[position], c, budget, whole))
            done = position - lag
            if done in gradients:
                use = uses[done].use
                after = (gradients[done][c],)
                name = builder.collective(use, "scatter", Kind.REDUCE_SCATTER, (c, chunks), after)
                if builder.step.replicas and use.micro_batch == builder.step.micro_batches - 1:
                    of = builder.step.replicas
                    name = builder.collective(use, "reduce", Kind.ALL_REDUCE, (c, chunks), (name,), of)
                scattered[use.weight].append(name)
        if position < len(uses):
            use = uses[position].use
            if uses[position].backward:
                gradients[position] = _backward(builder, use, chunks, chunks, gathered)
            else:
                for c in range(chunks):
                    builder.compute(use, "forward", c, chunks, gathered[c : c + 1])
                builder.attached(use, backward=False)
    everything = [name for names in scattered.values() for name in names]
    for use in reversed(builder.uses(number, 0)):
        own = scattered[use.weight]
        builder.update(use, sharded=True, after=everything if whole else own)


@dataclass(frozen=True, kw_only=True)
class _ShardedUse:
    """A use of a unit that is gathered for it, unless it is still there."""

    use: _Use
    backward: bool
    again: bool
    """The use before was of the same unit."""
    last: str
    """Start of the names of the tasks after which the parts are let go of."""


def _sharded_uses(builder: _Builder, number: int) -> list[_ShardedUse]:
    """All uses of a step in order: forward and backward of every micro-batch."""
    order: list[tuple[_Use, bool]] = []
    for micro_batch in range(builder.step.micro_batches):
        forward = builder.uses(number, micro_batch)
        order += [(use, False) for use in forward] + [(use, True) for use in reversed(forward)]
    uses: list[_ShardedUse] = []
    last = ""
    for n, (use, backward) in reversed(list(enumerate(order))):

        def same(other: int, use: _Use = use) -> bool:
            return 0 <= other < len(order) and order[other][0].weight == use.weight

        if not same(n + 1):
            last = use.task("input_gradient" if backward else "forward", "")
        uses.append(_ShardedUse(use=use, backward=backward, again=same(n - 1), last=last))
    return uses[::-1]


def _gather_part(builder: _Builder, sharded: _ShardedUse, c: int, budget: float, whole: bool) -> str:
    """Gather a part of a unit once there is room for it and it is up to date."""
    use, chunks = sharded.use, builder.choice.chunks
    size = use.unit.parameters / chunks
    before_last = tuple(task for _, task in builder.consumed[-2:-1])
    after = before_last if whole else builder.room(size, budget)
    if use.step:
        after = (*after, replace(use, step=use.step - 1, micro_batch=0).task("optimizer"))
    builder.consumed.append((size, f"{sharded.last}{c}"))
    label = "gather_backward" if sharded.backward else "gather"
    return builder.collective(use, label, Kind.ALL_GATHER, (c, chunks), after)


def _replicated_step(builder: _Builder, method: Method, number: int, final: bool) -> None:
    """Every rank holds all parameters: gradients are reduced behind the backward pass."""
    step, choice = builder.step, builder.choice
    kind = Kind.REDUCE_SCATTER if choice.substituted else Kind.ALL_REDUCE
    # A baseline's update waits for all gradients, and its next forward pass for all parameters.
    one_by_one = method in (Method.CENTAURI, Method.OOO_BACKPROP)
    reduced: dict[_Use, list[str]] = defaultdict(list)
    for micro_batch in range(step.micro_batches):
        uses = builder.uses(number, micro_batch)
        last = micro_batch == step.micro_batches - 1
        for use in uses:
            _replicated_forward(builder, use)
        reduces = last or method is Method.ZERO2
        delayed = choice.delayed if last else 0
        for use, parts in _replicated_backward(builder, uses, delayed, choice.chunks if reduces else 1):
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


def _replicated_forward(builder: _Builder, use: _Use) -> None:
    """Forward pass of a unit, after whatever the step before has left to wait for."""
    if use.weight in builder.pending:
        before, reduced = builder.pending.pop(use.weight)
        builder.update(before, False, reduced)
    parts = builder.gathered.pop(use.weight, [()])
    for c, after in enumerate(parts):
        builder.compute(use, "forward", c, len(parts), after)
    builder.attached(use, backward=False)


def _replicated_backward(
    builder: _Builder, uses: Sequence[_Use], delayed: int, chunks: int
) -> Iterator[tuple[_Use, list[str]]]:
    """Backward pass of all units; yields the parts of every weight gradient in the order of their making."""
    for use in reversed(uses):
        if use.layer >= delayed:
            yield use, _backward(builder, use, chunks)
        else:
            builder.attached(use, backward=True)
            builder.compute(use, "input_gradient", 0, 1)
    for use in uses:
        if use.layer < delayed:
            yield use, [builder.compute(use, "weight_gradient", c, chunks) for c in range(chunks)]


def _gather_updated(builder: _Builder, order: Sequence[_Use], one_by_one: bool) -> None:
    """All-gather of the updated parameters, and what the next forward pass waits for."""
    chunks = builder.choice.chunks
    updates = tuple(use.task("optimizer") for use in order)
    everything: list[str] = []
    for use in order:
        after = (use.task("optimizer"),) if one_by_one else updates
        names = [
            builder.collective(use, "gather", Kind.ALL_GATHER, (c, chunks), after) for c in range(chunks)
        ]
        everything += names
        if one_by_one:
            builder.gathered[use.weight] = [(name,) for name in names]
    if not one_by_one:
        builder.gathered[order[0].weight] = [tuple(everything)]
