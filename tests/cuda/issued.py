"""What every rank's host issues on CUDA in a step, from linked code, without torch.

It mirrors the runtime as far as streams and communicators go, and names the file at each place. Of the model
it takes how many gradients a chunk sums over each axis, all of a kind in one bucket.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import product

from braid.scheduling import code as linked
from braid.scheduling.code import Barrier, Body, Code, Message, Node, Operation, Stretch, name_of
from braid.scheduling.memory import share_elements
from braid.scheduling.operators import Stream
from braid.scheduling.schedule import Direction, Gather, Receive, Reduce, Send, Step
from braid.scheduling.spec import ModelShape, ParallelLayout
from braid.scheduling.topology import Topology
from braid.scheduling.units import chunk_parts
from tests.cuda.actions import Action, Call, Compute, Group, Start, Synchronise, Wait


def issued(
    code: Code, model: ModelShape, hosts: Sequence[str] = (), *, barriers: bool = False
) -> list[list[Action]]:
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
        self._topology = Topology(layout.mesh, hosts)
        self._members = {axis: tuple(layout.mesh.members(self.position, (axis,))) for axis in self.position}

    def line(self, axis: str) -> Group:
        """The ranks along an axis; strands share it."""
        return Group(axis, self._members[axis])

    def shared(self, axis: str) -> Group:
        """The ranks that share parameters along an axis."""
        if axis not in ("ends", "copies"):
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
        if axis in ("ends", "copies"):
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
        if isinstance(operation, linked.Hand | linked.Loss):
            continue  # nothing that a device sees
        if found and isinstance(operation, linked.Compute) and isinstance(found[-1], linked.Compute):
            found.pop()
        found.append(operation)
    return tuple(found)


class Issuer:
    """One rank's step (`Executor.run`)."""

    def __init__(
        self, code: Code, model: ModelShape, rank: int, hosts: Sequence[str] = (), *, barriers: bool = False
    ) -> None:
        self._code, self._model, self._barriers = code, model, barriers
        self._groups = Groups(code.layout, rank, hosts)
        self._stage = self._groups.position["pp"]
        self._line = self._groups.line("tp")
        self._layer_stream = str(self._groups.stream("tp"))

    def step(self) -> Iterator[Action]:
        """All that the host issues; at the end it reads losses and marks, which all have to be there."""
        for stretch in self._code.stages[self._stage]:
            for operation in _without_compute_in_between(stretch.body):
                yield from self._operation(operation, stretch)
        yield Synchronise("the step's end")

    def _operation(self, operation: Operation, stretch: Stretch) -> Iterator[Action]:
        match operation:
            case linked.Compute(what=Step()):
                yield Synchronise("the norm", everything=False)  # `Optimizer.step`: float(norm)
                yield Compute("optimizer")
            case linked.Compute(what=what):
                yield Compute(name_of(what))
            case linked.Start(what=Node()):
                yield self._collective(operation, stretch)
            case linked.Wait(what=Node()):
                yield Wait(_named(operation, stretch))
            case linked.Start(what=Message()):
                yield self._message(operation, stretch)
            case linked.Wait(what=Message()):
                yield Wait(str(stretch.transfer))
            case linked.Start(what=Reduce() as reduce):
                sharded = reduce.chunk is not None and reduce.axis in self._code.layout.mesh.sharded
                kind = "reduce_scatter" if sharded else "all_reduce"
                for number, elements in enumerate(self._summed(reduce)):
                    what = f"{self._place(reduce)} {number}"
                    call = Call(kind, self._groups.shared(reduce.axis), elements, what=what)
                    side = f"{self._groups.stream(reduce.axis)} data"  # `GradientBuckets.start`
                    yield Start(f"{_sum(reduce)} {number}", side, (call,))
            case linked.Wait(what=Reduce() as reduce):
                for number, _ in enumerate(self._summed(reduce)):
                    yield Wait(f"{_sum(reduce)} {number}")
            case linked.Start(what=Gather() as gather):
                for number, elements in enumerate(self._gathered(gather)):
                    what = f"{name_of(gather)}, part {gather.part} {number}"
                    place = f"{self._place(gather)} {number}, gathered"
                    call = Call("all_gather", self._groups.shared(gather.axis), elements, what=place)
                    side = f"{self._groups.stream(gather.axis)} data"  # `ShardedWeights.start`
                    yield Start(what, side, (call,))
            case linked.Wait(what=Gather() as gather):
                for number, _ in enumerate(self._gathered(gather)):
                    yield Wait(f"{name_of(gather)}, part {gather.part} {number}")
            case Barrier():
                if self._barriers:
                    yield Synchronise("a barrier")  # `CudaStreams.synchronise`
            case _:
                raise AssertionError(operation)

    def _collective(self, start: linked.Start, stretch: Stretch) -> Start:
        """A collective of a layer (`Binder.start`)."""
        assert isinstance(start.what, Node)
        op, (source,) = start.what.operator, start.reads
        assert op.axis == "tp", "layers that run communicate over tp alone"
        elements = stretch.frames[start.turn].values[source].elements
        elements //= op.piece.ways if op.piece is not None else 1
        line = self._line
        name = _named(start, stretch)
        return Start(name, self._layer_stream, (Call(op.kind.value, line, elements, what=name),))

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
        """Elements of every rank's share of the buckets that are gathered."""
        ways = self._code.layout.dp
        return [elements // ways for elements in self._summed(Reduce(gather.chunk, gather.axis, gather.part))]

    def _place(self, reduce: Reduce | Gather) -> str:
        """What is summed, as all members name it: a chunk of the model, in each of its copies; the table."""
        if reduce.chunk is None:
            return "norm"
        if reduce.axis == "ends":
            return "table"
        part = "" if reduce.part is None else f", part {reduce.part}"
        return f"chunk {reduce.chunk % self._code.layout.chunks_per_copy}{part}"

    def _summed(self, reduce: Reduce) -> list[int]:
        """Elements of the buckets that a sum is of (`GradientBuckets`); of the norm, a number for each
        parameter of the model, which stands here for their count."""
        if reduce.chunk is None:
            return [self._model.layers]
        layout, chunk = self._code.layout, reduce.chunk
        if layout.zero:
            parts = range(len(chunk_parts(layout, self._model.kinds, chunk)))
            of_parts = [self._of(reduce, n) for n in ([reduce.part] if reduce.part is not None else parts)]
            kinds = max(map(len, of_parts))
            found = [own[kind] for kind in range(kinds) for own in of_parts if kind < len(own) and own[kind]]
            return [layout.dp * share_elements(elements, layout.dp) for elements in found]
        return [elements for elements in self._of(reduce, reduce.part) if elements]

    def _of(self, reduce: Reduce, part: int | None) -> list[int]:
        """Elements of a chunk, or a part of it, that are summed, by kind of bucket; perhaps none."""
        layout, chunk = self._code.layout, reduce.chunk
        assert chunk is not None
        dense, held_whole = _parameters(self._model, layout, chunk, part)
        cut = dense - held_whole
        tied = (
            self._model.tied_head and layout.ends_apart and (layout.is_first(chunk) or layout.is_last(chunk))
        )
        table = -(-self._model.vocabulary // layout.tp) * self._model.hidden if tied else 0
        whole = [held_whole] if layout.tp > 1 else []
        rest = [cut - table] if layout.tp > 1 else [dense - table]
        match reduce.axis:
            case "tp":
                return whole
            case "ends":
                return [table]
        return [*rest, *whole, *([table] if tied else [])]


def _sum(reduce: Reduce) -> str:
    return name_of(reduce) if reduce.part is None else f"{name_of(reduce)}, part {reduce.part}"


def _parameters(shape: ModelShape, layout: ParallelLayout, chunk: int, part: int | None) -> tuple[int, int]:
    """Of a chunk, or a part of it, on the fullest rank, and of those what all tensor-parallel ranks hold
    whole."""
    norm = shape.hidden * (2 if shape.biases else 1)
    matrices = shape.hidden * (2 * shape.query_width + 2 * shape.kv_width + 3 * shape.ffn)
    table = -(-shape.vocabulary // layout.tp) * shape.hidden
    of_layer = 2 * norm + (2 * shape.hidden if shape.biases else 0)
    sizes = {"embedding": (table, 0), "head": (table + norm, norm)}
    held = [
        sizes.get(name, (of_layer + matrices // layout.tp, of_layer))
        for name, _ in chunk_parts(layout, shape.kinds, chunk)
    ]
    chosen = held if part is None else held[part : part + 1]
    return sum(dense for dense, _ in chosen), sum(whole for _, whole in chosen)


def _named(operation: linked.Start | linked.Wait, stretch: Stretch) -> str:
    """A collective of a pass, named once in a step."""
    assert isinstance(operation.what, Node)
    node, one = operation.what, stretch.passes[operation.turn]
    return f"{node.operator.own_name} of {one}, part {node.part}"
