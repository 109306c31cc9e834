"""Collects the tasks of data-parallel steps: computation, collectives and updates of uses, stream by stream.

A *use* is one pass of one micro-batch over one unit; sizes are per rank, payloads of whole tensors.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from braid.scheduling.cost.collectives import collective_ns
from braid.scheduling.mesh.cluster import ClusterSpec, RankGroup, Stream, dim_group
from braid.scheduling.model.operators import Kind
from tests.papers.methods import Choice, Step, Unit
from tests.papers.tasks import Task


@dataclass(frozen=True, kw_only=True)
class StepTask(Task):
    """A task with its place in the step."""

    operator: str
    micro_batch: int
    layer: int
    flops: int = 0


@dataclass(frozen=True)
class Use:
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


Stage = tuple[Kind, RankGroup, float]
"""A collective, over which ranks, and the bytes of its tensor."""


def hierarchical(kind: Kind, payload: float, group: RankGroup) -> tuple[Stage, ...]:
    """Stages over nodes x ranks of a node, in the order that sends least between nodes; of an all-reduce
    perhaps as reduce-scatter and all-gather. None where the ranks have one kind of link."""
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


class StepBuilder:
    """Collects tasks per stream, in static order."""

    def __init__(self, step: Step, cluster: ClusterSpec, choice: Choice) -> None:
        self.step, self.cluster, self.choice = step, cluster, choice
        self.queues: dict[Stream, list[StepTask]] = defaultdict(list)
        self.consumed: list[tuple[float, str]] = []
        """Bytes of every part gathered so far and the task that lets go of it."""
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
        ns, flops = use.unit.matmul.ns(self.cluster.gpu, 1 / pieces), use.unit.matmul.flops // pieces
        return self._add(use, operator, piece, Stream.COMPUTE, ns, after, flops=flops)

    def attached(self, use: Use, backward: bool) -> None:
        """The operators of a unit that have no weights, if any."""
        ns = use.unit.attached_backward_ns if backward else use.unit.attached_forward_ns
        if ns:
            self._add(use, "attached_backward" if backward else "attached", 0, Stream.COMPUTE, ns, ())

    def update(self, use: Use, sharded: bool, after: Iterable[str]) -> str:
        """The optimizer on a unit's parameters, or on this rank's share of them."""
        share = self.step.group.size if sharded else 1
        ns = use.unit.parameters * self.step.optimizer_ns_per_parameter / share
        launched = round(self.cluster.gpu.launch_ns + ns)
        return self._add(use, "optimizer", 0, Stream.COMPUTE, launched, after)

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
        payload, group = use.unit.parameters * self.step.element_bytes, of or self.step.group
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
        """The task that must end before another part of so many bytes is within the budget."""
        held = size
        for bytes_held, task in reversed(self.consumed):
            held += bytes_held
            if held > budget:
                return (task,)
        return ()

    def _add(
        self,
        use: Use,
        operator: str,
        piece: int | str,
        stream: Stream,
        ns: int,
        after: Iterable[str],
        flops: int = 0,
    ) -> str:
        task = StepTask(
            name=use.task(operator, piece),
            stream=stream,
            ns=ns,
            after=tuple(after),
            operator=f"{use.unit.name}.{operator}.{piece}",
            micro_batch=use.micro_batch,
            layer=use.layer,
            flops=flops,
        )
        self.queues[stream].append(task)
        return task.name
