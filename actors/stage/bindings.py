"""Turns operator programs into bound actions: closures over modules, groups and value names.

Everything that can be decided before a step is decided here: which method an operator calls, which values die
after which action, which transfers are awaited at once. What cannot be bound fails here, when it is loaded.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from braid.actors.stage.mesh import Mesh
from braid.actors.stage.model import PartInstance
from braid.actors.stage.slots import Values
from braid.actors.stage.streams import Streams, Transfer
from braid.actors.stage.telemetry import Recorder
from braid.kernels.collectives.chunks import place_chunk, rows_of_chunk, whole_for
from braid.kernels.collectives.primitives import Launch, all_gather, all_reduce, reduce_scatter
from braid.kernels.operators.operator import ComputeOperator
from braid.scheduling.lowering.split import Chunk, chunk_of
from braid.scheduling.operators import Graph, Kind, Operator, Part, Pass
from braid.scheduling.profile import operator_key
from braid.scheduling.schedule import (
    Action,
    Barrier,
    Block,
    Compute,
    Direction,
    Late,
    PairProgram,
    Program,
    Side,
    Start,
    Wait,
    is_late,
)
from braid.scheduling.trace import Label

BoundAction = Callable[[Values, Block], None]

COLLECTIVES: Mapping[Kind, Callable[[Tensor, Any], Launch]] = {
    Kind.ALL_GATHER: all_gather,
    Kind.REDUCE_SCATTER: reduce_scatter,
    Kind.ALL_REDUCE: lambda x, line: all_reduce(x, line.group),
}


class Binder:
    """Binds programs of one rank; ``collectives`` are called with a tensor and the mesh's line."""

    def __init__(
        self,
        mesh: Mesh,
        streams: Streams,
        recorder: Recorder,
        activation_bytes: int,
        collectives: Mapping[Kind, Callable[[Tensor, Any], Launch]] = COLLECTIVES,
    ) -> None:
        self._collectives = collectives
        self._mesh = mesh
        self._streams = streams
        self._recorder = recorder
        self._activation_bytes = activation_bytes

    def bind(
        self, program: Program, part: Part, instance: PartInstance, direction: Direction, trains: bool
    ) -> tuple[BoundAction, ...]:
        """The actions of one part instance, but for late ones (`bind_end`).

        ``trains``: a backward pass follows the forward pass.
        """
        order = [(position, action) for position, action in enumerate(program) if not is_late(action)]
        return tuple(self._bind(program, order, part, instance, direction, trains).values())

    def bind_end(
        self, program: Program, before: PairProgram, part: Part, instance: PartInstance
    ) -> dict[int, BoundAction]:
        """What a backward pass by itself does for the one before, by position in its program.

        ``before``: the paired program that has put that off. Late operators run after all others of their
        pass, which let go of what these alone have read.
        """
        first = [a for a in before if not isinstance(a, Barrier) and a.side is Direction.BACKWARD]
        whole, count = (*first, *program), len(first)
        own = [(n, action) for n, action in enumerate(whole) if n < count or is_late(action)]
        bound = self._bind(whole, own, part, instance, Direction.BACKWARD, True)
        return {position - count: action for position, action in bound.items() if position >= count}

    def bind_split(
        self, inputs: Program, weights: Program, part: Part, instance: PartInstance
    ) -> tuple[tuple[BoundAction, ...], tuple[BoundAction, ...]]:
        """A backward pass in two halves; what the second reads lives until then."""
        whole = (*inputs, *weights)
        bound = self._bind(whole, list(enumerate(whole)), part, instance, Direction.BACKWARD, True)
        actions = tuple(bound.values())
        return actions[: len(inputs)], actions[len(inputs) :]

    def bind_side(
        self, program: PairProgram, part: Part, instance: PartInstance, direction: Direction, side: Side
    ) -> dict[int, BoundAction]:
        """The actions of one pass (``side``) in a program of two, by position.

        Late operators run when the next program comes to their positions: of all that this pass does they
        are the last.
        """
        sides = (side, Late.BACKWARD) if side is Direction.BACKWARD else (side,)
        own = [
            (position, action)
            for position, action in enumerate(program)
            if not isinstance(action, Barrier) and action.side in sides
        ]
        own.sort(key=lambda entry: is_late(entry[1]))
        return self._bind(program, own, part, instance, direction, True)

    def _bind(
        self,
        program: PairProgram,
        own: Sequence[tuple[int, Action]],
        part: Part,
        instance: PartInstance,
        direction: Direction,
        trains: bool,
    ) -> dict[int, BoundAction]:
        """Actions (positions in ``program``) in the order in which they run."""
        graph = part.forward if direction is Direction.FORWARD else part.backward
        dying = _last_reads([action for _, action in own], part, direction, trains)
        bound: dict[int, BoundAction] = {}
        for turn, (position, action) in enumerate(own):
            operator = graph.named(action.operator)
            frees = dying[turn]
            match action:
                case Compute():
                    chunk = chunk_of(operator.name)
                    bound[position] = (
                        self._compute(operator, instance, frees)
                        if chunk is None
                        else self._compute_chunk(operator, chunk, graph, instance, frees)
                    )
                case Start():
                    following = program[position + 1] if position + 1 < len(program) else None
                    awaited_next = following == Wait(action.operator, action.side)
                    bound[position] = self._start(operator, part, instance, awaited_next)
                case Wait():
                    bound[position] = self._wait(operator, frees)
        return bound

    def _compute(self, operator: Operator, instance: PartInstance, frees: Iterable[str]) -> BoundAction:
        call = method_of(operator, instance)
        reads, writes, gone = operator.reads, operator.writes, tuple(frees)
        name, layer = instance.locate(operator.name)
        key = operator_key(instance.name, operator)
        label = Label(operator=name, stream=operator.stream, layer=layer, flops=operator.flops, key=key)
        mark, record = self._streams.mark, self._recorder.compute

        def run(values: Values, block: Block) -> None:
            nonlocal label
            begin = mark()
            inputs = [values[name] for name in reads]
            results = call(*inputs)
            if not label.shapes:
                label = replace(label, shapes=shapes_of(inputs, results if writes else ()))
            del inputs
            if writes:
                values.update(zip(writes, results, strict=True))
            for name in gone:
                del values[name]
            record(label, block, begin, mark())

        return run

    def _compute_chunk(
        self, operator: Operator, chunk: Chunk, graph: Graph, instance: PartInstance, frees: Iterable[str]
    ) -> BoundAction:
        """A GEMM on one chunk of what is gathered; its rows go to their places in the whole result."""
        call = method_of(operator, instance)
        writers = {name: op for op in graph.operators for name in op.writes}
        if (
            len(operator.reads) != 1
            or operator.reads[0] not in writers
            or len(_chunks_written(operator)) != 1
        ):
            raise ValueError(
                f"operator {operator.name} of {instance.name} {instance.index} reads "
                f"{', '.join(operator.reads)} and writes {', '.join(operator.writes)}; only what turns the "
                f"gathered value alone into one other can run in chunks: use another overlap.schedule"
            )
        (source,), (target,), gone = operator.reads, _chunks_written(operator), tuple(frees)
        ranks = self._ranks(writers[source])
        name, layer = instance.locate(operator.name)
        key = operator_key(instance.name, operator)
        label = Label(operator=name, stream=operator.stream, layer=layer, flops=operator.flops, key=key)
        mark, record = self._streams.mark, self._recorder.compute

        def run(values: Values, block: Block) -> None:
            nonlocal label
            begin = mark()
            (result,) = call(values[source])
            if not label.shapes:
                label = replace(label, shapes=shapes_of([values[source]], [result]))
            _keep_chunk(values, target, result, chunk, ranks)
            for name in gone:
                del values[name]
            record(label, block, begin, mark())

        return run

    def _ranks(self, operator: Operator) -> int:
        """How many ranks take part in a collective."""
        assert operator.axis is not None
        return self._mesh.layout.degree(operator.axis)

    def _start(
        self, operator: Operator, part: Part, instance: PartInstance, awaited_next: bool
    ) -> BoundAction:
        assert operator.axis is not None
        collective = self._collectives[operator.kind]
        lines = {s: line for (axis, s), line in self._mesh.lines.items() if axis == operator.axis}
        (source,), key, chunk = operator.reads, _transfer_key(operator), chunk_of(operator.name)
        precision = part.values[source].precision
        moved = operator.bytes * precision.bytes_each(self._activation_bytes) // precision.bytes_each(2)
        name, layer = instance.locate(operator.name)
        label = Label(
            operator=name,
            stream=operator.stream,
            layer=layer,
            bytes=moved,
            key=operator_key(instance.name, operator),
        )
        start, record = self._streams.start, self._recorder.transfer

        def run(values: Values, block: Block) -> None:
            nonlocal label
            x, line = values[source], lines[block.strand]
            if chunk is not None:
                x = rows_of_chunk(x, chunk.number, chunk.ways)
            if not label.shapes:
                label = replace(label, shapes=shapes_of([x], ()))
            transfer = start(operator.stream, collective(x, line), awaited_next=awaited_next)
            values[key] = transfer
            record(label, block, transfer)

        return run

    def _wait(self, operator: Operator, frees: Iterable[str]) -> BoundAction:
        chunk, key = chunk_of(operator.name), _transfer_key(operator)
        (target,) = operator.writes if chunk is None else _chunks_written(operator)
        ranks = self._ranks(operator)
        gone = tuple(frees)
        wait = self._streams.wait

        def run(values: Values, block: Block) -> None:
            transfer: Transfer = values.pop(key)
            wait(transfer)
            if chunk is None:
                values[target] = transfer.take()
            else:
                _keep_chunk(values, target, transfer.take(), chunk, ranks)
            for name in gone:
                del values[name]

        return run


def shapes_of(inputs: Iterable[Any], results: Iterable[Any]) -> str:
    """Shapes of what an operator reads and writes, for people: ``512x1024, 1024 -> 512x1024``."""

    def told(values: Iterable[Any]) -> str:
        found = (tuple(value.shape) for value in values if isinstance(value, Tensor))
        return ", ".join("x".join(map(str, shape)) or "1" for shape in found)

    return f"{told(inputs)} -> {told(results)}".removesuffix(" -> ") or "-"


def _chunks_written(operator: Operator) -> tuple[str, ...]:
    """Of a chunk: the chunks of values that it writes, without the wholes that the last one completes."""
    return tuple(name for name in operator.writes if chunk_of(name) is not None)


def _keep_chunk(values: Values, name: str, x: Tensor, chunk: Chunk, ranks: int) -> None:
    """Keep a chunk of a value, and its rows in the whole value, which the first chunk to come makes."""
    written = chunk_of(name)
    assert written is not None
    values[name] = x
    if written.whole not in values:
        values[written.whole] = whole_for(x, chunk.ways)
    place_chunk(values[written.whole], x, chunk.number, chunk.ways, ranks)


def _transfer_key(operator: Operator) -> str:
    return f"transfer {operator.name}"


def method_of(operator: Operator, instance: PartInstance) -> Callable[..., Any]:
    if operator.kind is Kind.ADD:
        return _add
    module = instance.modules.get(operator.module)
    if module is None:
        raise ValueError(
            f"operator {operator.name} of {instance.name} {instance.index} needs a module "
            f"{operator.module!r}; there are {', '.join(instance.modules)}"
        )
    match operator.phase:
        case Pass.FORWARD | Pass.RECOMPUTE:
            return module.forward
        case Pass.INPUT_GRADIENT:
            return module.input_gradient
        case Pass.WEIGHT_GRADIENT:
            return module.weight_gradient
        case Pass.GRADIENT:
            return _both_gradients(module)


def _both_gradients(module: ComputeOperator) -> Callable[..., Any]:
    parameters = any(True for _ in module.parameters(recurse=False))

    def run(*values: Any) -> Any:
        if parameters:
            module.weight_gradient(*values)
        return module.input_gradient(*values)

    return run


def _add(partial: Any, part: Any) -> tuple[Any]:
    return (partial + part,)


def _last_reads(
    program: Sequence[Action], part: Part, direction: Direction, trains: bool
) -> Mapping[int, tuple[str, ...]]:
    """For every position of the program, the values that nothing reads after it."""
    graph = part.forward if direction is Direction.FORWARD else part.backward
    if direction is Direction.FORWARD:
        kept = {part.output, *(part.saved() if trains else ())}
    else:
        kept = {f"d.{name}" for name in part.inputs if name not in part.constants}
    last: dict[str, int] = {}
    for position, action in enumerate(program):
        if not isinstance(action, Start):
            operator = graph.named(action.operator)
            last |= {name: position for name in (*operator.reads, *operator.writes) if name not in kept}
    return {
        position: tuple(name for name, at in last.items() if at == position)
        for position in range(len(program))
    }
