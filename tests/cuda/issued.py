"""What every rank's host issues on CUDA in a step, from linked code, without torch.

It mirrors the runtime as far as streams and communicators go, and names the file at each place. Of the code
it takes how many parameters each bucket has.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import NamedTuple

from braid.scheduling import code as linked
from braid.scheduling.buckets import flat_elements, share_elements
from braid.scheduling.code import Barrier, Body, Code, Message, Node, Operation, Stretch, name_of
from braid.scheduling.operators import Kind, Operator, Stream
from braid.scheduling.operators import Pass as Phase
from braid.scheduling.schedule import Direction, Gather, Prefetch, Receive, Reduce, Send, Step
from braid.scheduling.spec import ModelShape, ParallelLayout
from braid.scheduling.topology import Topology

COMPUTE = "compute"
"""The stream of computation."""


class Group(NamedTuple):
    """A process group, or one of its communicators."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """One kernel of a communicator."""

    kind: str
    group: Group
    elements: int
    peer: int | None = None
    """Of a message, the other rank."""
    what: str = ""
    """What travels, named alike by all members. NCCL knows nothing of it; data would be mixed up."""
    batched: bool = False
    """Whether it is one of several messages in a kernel of the group's own communicator."""

    def __str__(self) -> str:
        way = "" if self.peer is None else f" {'to' if self.kind == 'send' else 'from'} rank {self.peer}"
        return f"{self.kind}{way} of {self.elements} on {self.group.name}{f': {self.what}' * bool(self.what)}"

    def communicator(self, rank: int) -> Group:
        """The communicator that runs it; each pair of ranks has one for messages by themselves."""
        if self.peer is None or self.batched:
            return self.group
        low, high = sorted((rank, self.peer))
        return Group(f"{self.group.name} {low}:{high}", (low, high))

    def line(self, rank: int) -> tuple[object, ...]:
        """What it is counted along: the members' collectives, or the messages from one rank to another."""
        return {"send": (rank, self.peer), "receive": (self.peer, rank)}.get(self.kind, ())

    def meets(self, other: "Call") -> bool:
        """Whether another member's call of the same number is this one's counterpart."""
        kinds = {self.kind, other.kind}
        same = (self.elements, self.what) == (other.elements, other.what)
        return same and len(kinds) == (1 if self.peer is None else 2)


@dataclass(frozen=True)
class Compute:
    """Kernels on the compute stream."""

    name: str


@dataclass(frozen=True)
class Start:
    """Issue calls from a side stream, after what was computed so far (`CudaStreams.start`). Messages that are
    batched are one kernel."""

    name: str
    side: str
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Wait:
    """Let the compute stream wait for what was started under this name."""

    name: str


@dataclass(frozen=True)
class Synchronise:
    """Let the host wait for its device, or for the compute stream alone."""

    name: str
    everything: bool = True


Action = Compute | Start | Wait | Synchronise
Programs = Sequence[Sequence[Action]]
"""What every rank's host issues, by rank."""


def issued(code: Code, model: ModelShape, hosts: Sequence[str] = (), *, barriers: bool = False) -> Programs:
    """The programs of all ranks; ``hosts``: of the ranks, by default one.

    ``barriers``: whether a barrier synchronises the device, which is wrong; `CudaStreams.barrier` orders
    streams by events, and nothing is left to issue: the transfers of a program are waited for before its
    barriers, and every transfer waits for what was computed before it.
    """
    ranks = range(code.layout.ranks)
    return [list(Issuer(code, model, rank, hosts, barriers=barriers).step()) for rank in ranks]


class Groups:
    """A rank's process groups, and the streams that their transfers are queued on (`Mesh`)."""

    def __init__(self, layout: ParallelLayout, rank: int, hosts: Sequence[str] = ()) -> None:
        self.layout, self.rank = layout, rank
        self.position = layout.coordinate(rank)
        mesh = layout.mesh
        self._topology = Topology(mesh, hosts)
        self._members = {
            axis: tuple(mesh.members(self.position, mesh.factors_of(axis)))
            for axis in (*self.position, *dict(mesh.joined))
        }

    def line(self, axis: str) -> Group:
        """The ranks along an axis; strands share it."""
        return Group(axis, self._members[axis])

    def shared(self, axis: str) -> Group:
        """The ranks that share parameters along an axis."""
        if axis != "ends":
            return self.line(axis)
        return Group("ends", tuple(sorted((self.rank, self.peer(self._other_end)))))

    @cached_property
    def channels(self) -> dict[tuple[Direction, str], Group]:
        """The pipeline, for what passes of a direction send one way."""
        kinds = product(Direction, ("down", "up"))
        return {kind: Group(" ".join(kind), self._members["pp"]) for kind in kinds}

    def peer(self, stage: int) -> int:
        """The rank at this one's place on another stage."""
        return self._members["pp"][stage]

    def stream(self, axis: str) -> Stream:
        """Where what a group along an axis exchanges is queued."""
        if axis == "ends":
            return self.stream_to(self._other_end)
        return self._topology.between(self._members[axis])

    def stream_to(self, stage: int) -> Stream:
        """Where messages to and from a stage are queued."""
        return self._topology.between((self.rank, self.peer(stage)))

    @property
    def _other_end(self) -> int:
        return self.layout.pp - 1 - self.position["pp"]


@lru_cache(maxsize=4096)
def _without_compute_in_between(body: Body) -> tuple[Operation, ...]:
    """A body's operations; of kernels that follow each other on the compute stream only the last one."""
    found: list[Operation] = []
    for operation in body.operations:
        if isinstance(operation, linked.Hand | linked.Loss | linked.Release):
            continue  # nothing that a device sees
        computes = found and isinstance(operation, linked.Compute) and isinstance(found[-1], linked.Compute)
        if computes and not _counts_rows(found[-1]):
            found.pop()
        found.append(operation)
    return tuple(found)


def _counts_rows(operation: Operation) -> bool:
    """Whether it tells the host which rows go where (`ExpertRows`)."""
    return isinstance(operation.what, Node) and operation.what.operator.module == "router_rows"


class Issuer:
    """One rank's step (`Executor.run`)."""

    def __init__(
        self, code: Code, model: ModelShape, rank: int, hosts: Sequence[str] = (), *, barriers: bool = False
    ) -> None:
        self._code, self._model, self._barriers = code, model, barriers
        self._groups = Groups(code.layout, rank, hosts)
        self._stage = self._groups.position["pp"]

    def step(self) -> Iterator[Action]:
        """All that the host issues; at the end it reads losses and marks, which all have to be there.

        In a first step it begins to gather what a step before would have begun (`Executor.run`).
        """
        *_, last = self._code.stages[self._stage]
        if isinstance(last.instruction, Prefetch):
            for operation in last.operations:
                if isinstance(operation, linked.Start):
                    yield from self._operation(operation, last)
        for stretch in self._code.stages[self._stage]:
            for operation in _without_compute_in_between(stretch.body):
                yield from self._operation(operation, stretch)
        yield Synchronise("the step's end")

    def _operation(self, operation: Operation, stretch: Stretch) -> Iterator[Action]:
        match operation:
            case linked.Compute(what=Step()):
                yield Synchronise("the norm", everything=False)  # `Optimizer.step`: float(norm)
                yield Compute("optimizer")
            case linked.Compute(what=linked.Clip()):
                yield Synchronise("the norm", everything=False)  # `Optimizer.clip`: float(norm)
                yield Compute("clip")
            case linked.Compute(what=what):
                if _counts_rows(operation) and not self._model.capacity_factor:
                    yield Synchronise("how many rows go where", everything=False)  # `ExpertRows.forward`
                yield Compute(name_of(what))
            case linked.Allocate(what=reduce):
                yield Compute(f"zeros for {name_of(reduce)}{_bucket(reduce)}")
            case linked.Start(what=Node()):
                yield self._collective(operation, stretch)
            case linked.Wait(what=Node()):
                yield Wait(_named(operation, stretch))
            case linked.Start(what=Message()):
                yield self._message(operation, stretch)
            case linked.Wait(what=Message()):
                yield Wait(str(stretch.transfer))
            case linked.Start(what=Reduce() as reduce):
                mesh = self._code.layout.mesh
                sharded = reduce.chunk is not None and mesh.shares_along(reduce.axis)
                kind = "reduce_scatter" if sharded else "all_reduce"
                for number, elements in enumerate(self._summed(reduce)):
                    what = f"{self._place(reduce)} {number}"
                    call = Call(kind, self._groups.shared(reduce.axis), elements, what=what)
                    side = f"{self._groups.stream(reduce.axis)} data"  # `GradientBuckets.start`
                    yield Start(f"{name_of(reduce)}{_bucket(reduce)} {number}", side, (call,))
            case linked.Wait(what=Reduce() as reduce):
                for number, _ in enumerate(self._summed(reduce)):
                    yield Wait(f"{name_of(reduce)}{_bucket(reduce)} {number}")
            case linked.Start(what=Gather() as gather):
                for number, elements in enumerate(self._gathered(gather)):
                    what = f"{name_of(gather)}{_bucket(gather)} {number}"
                    place = f"{self._place(gather)} {number}, gathered"
                    call = Call("all_gather", self._groups.shared(gather.axis), elements, what=place)
                    side = f"{self._groups.stream(gather.axis)} data"  # `ShardedWeights.start`
                    yield Start(what, side, (call,))
            case linked.Wait(what=Gather() as gather):
                for number, _ in enumerate(self._gathered(gather)):
                    yield Wait(f"{name_of(gather)}{_bucket(gather)} {number}")
            case Barrier():
                if self._barriers:
                    yield Synchronise("a barrier")  # `CudaStreams.synchronise`
            case _:
                raise AssertionError(operation)

    def _collective(self, start: linked.Start, stretch: Stretch) -> Start:
        """A collective of a layer (`Binder.start`). Rows of experts are as many for each."""
        assert isinstance(start.what, Node)
        op, source = start.what.operator, start.reads[0]
        assert op.axis is not None
        elements = stretch.frames[start.turn].values[source].elements
        elements //= op.piece.ways if op.piece is not None else 1
        line, name = self._groups.line(op.axis), _named(start, stretch)
        if op.kind is Kind.SEND_RECEIVE or len(start.reads) > 1:
            calls = tuple(self._messages(op, line, elements, name))
        else:
            calls = (Call(op.kind.value, line, elements, what=name),)
        return Start(name, str(self._groups.stream(op.axis)), calls)

    def _messages(self, op: Operator, line: Group, elements: int, what: str) -> Iterator[Call]:
        """In the place of a collective with shares that may differ (`Communicator`), and around a ring."""
        at, size = line.ranks.index(self._groups.rank), len(line.ranks)
        others = [rank for rank in line.ranks if rank != self._groups.rank]
        to, source = others, others
        if op.kind is Kind.SEND_RECEIVE:
            by = -1 if op.phase is Phase.INPUT_GRADIENT else 1
            to, source = [line.ranks[(at + by) % size]], [line.ranks[(at - by) % size]]
        elif op.kind is not Kind.ALL_GATHER:
            elements //= size
        for kind, peers in (("send", to), ("receive", source)):
            for peer in peers:
                yield Call(kind, line, elements, peer, what, batched=True)

    def _message(self, start: linked.Start, stretch: Stretch) -> Start:
        """A message between stages (`Executor._send`, `Executor._receive`): a lane for each kind."""
        transfer = stretch.transfer
        assert isinstance(transfer, Send | Receive)
        sent = isinstance(transfer, Send)
        (register,) = start.reads or start.writes
        way = "down" if (transfer.stage > self._stage) is sent else "up"
        group = self._groups.channels[transfer.moved.direction, way]
        kind = "send" if sent else "receive"
        elements = stretch.frames[0].values[register].elements
        call = Call(kind, group, elements, self._groups.peer(transfer.stage), str(transfer.moved))
        side = f"{self._groups.stream_to(transfer.stage)} {kind} {group.name}"
        return Start(str(transfer), side, (call,))

    def _gathered(self, gather: Gather) -> list[int]:
        """Elements of this rank's shares of what is gathered (`ShardedWeights._of`)."""
        cut = self._flat(gather)
        return [share_elements(count, ways) for count, ways in cut if ways > 1]

    def _place(self, what: Reduce | Gather) -> str:
        """What is summed, as all members name it: a chunk; the table."""
        if what.chunk is None:
            return "norm"
        if what.axis == "ends":
            return "table"
        return f"chunk {what.chunk}{_bucket(what)}"

    def _summed(self, reduce: Reduce) -> list[int]:
        """Elements of what is summed (`GradientBuckets._summed`); of the norm, a number for each parameter of
        the model, which stands here for their count."""
        if reduce.chunk is None:
            return [self._model.layers]
        behind = self._code.layout.zero > 1 and reduce.bucket is None
        shares = behind or reduce.axis == "replica"
        return [(1 if shares else ways) * share_elements(count, ways) for count, ways in self._flat(reduce)]

    def _flat(self, what: Reduce | Gather) -> list[tuple[int, int]]:
        """Elements of flat memories that share an axis, and over how many ranks each is cut (`bucket_plans`).

        Those that are cut are of one bucket each, others of all that are summed together.
        """
        layout = self._code.layout
        assert what.chunk is not None
        own = self._code.buckets.of(what.chunk)
        chosen = own if what.bucket is None else own[what.bucket : what.bucket + 1]
        of_axes: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for one in chosen:
            for axes, count in flat_elements(layout, one.parameters).items():
                of_axes[axes].append(count)
        found = []
        for axes in sorted(of_axes, key=lambda axes: (len(axes), axes)):
            if what.axis in (*axes, "replica"):  # over which all is summed
                counts = of_axes[axes] if layout.zero else [sum(of_axes[axes])]
                summed = {name for axis in axes for name in layout.mesh.factors_of(axis)}
                ways = layout.mesh.size([name for name in layout.mesh.sharded if name in summed])
                found += [(count, ways) for count in counts]
        return found


def _bucket(what: Reduce | Gather) -> str:
    return "" if what.bucket is None else f", bucket {what.bucket}"


def _named(operation: linked.Start | linked.Wait, stretch: Stretch) -> str:
    """A collective of a pass, named once in a step."""
    assert isinstance(operation.what, Node)
    node, one = operation.what, stretch.passes[operation.turn]
    return f"{node.operator.own_name} of {one}, part {node.part}"
