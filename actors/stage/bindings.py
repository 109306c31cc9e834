"""Binds operations of linked code to modules, groups and registers: each becomes a function of frames.

Everything that can be decided before a step is decided here: which method an operator calls, which group a
collective uses, how a span is labelled. What cannot be bound fails here, when it is loaded.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from torch import Tensor

from braid.actors.stage.mesh import Mesh
from braid.actors.stage.model import PartInstance, StageModel
from braid.actors.stage.streams import Streams, Transfer
from braid.actors.stage.telemetry import Recorder
from braid.kernels.collectives.pieces import place_piece, rows_of_piece, whole_for
from braid.kernels.collectives.primitives import Launch, Line
from braid.kernels.operators.operator import ComputeOperator
from braid.scheduling.code import Compute, Frame, Node, Start, Wait, name_of
from braid.scheduling.operators import Kind, Operator, Piece
from braid.scheduling.operators import Pass as Phase
from braid.scheduling.schedule import Pass
from braid.scheduling.trace import Label

Registers = list[Any]
"""Of a frame, by number."""
Bound = Callable[[Sequence[Registers], Sequence[Pass]], None]
"""An operation of a stretch, called with the frames and the passes of the stretch."""

COLLECTIVES: Mapping[Kind, Callable[[Line, Tensor], Launch]] = {
    Kind.ALL_GATHER: lambda line, x: line.all_gather(x),
    Kind.REDUCE_SCATTER: lambda line, x: line.reduce_scatter(x),
    Kind.ALL_REDUCE: lambda line, x: line.all_reduce(x),
}


class Binder:
    """Binds what layers do on one rank."""

    def __init__(self, model: StageModel, mesh: Mesh, streams: Streams, recorder: Recorder) -> None:
        self._model, self._mesh, self._streams, self._recorder = model, mesh, streams, recorder
        self._activation_bytes = model.context.dtype.itemsize

    def compute(self, operation: Compute, chunk: int) -> Bound:
        """A compute operator of a chunk of the model."""
        node = operation.what
        assert isinstance(node, Node)
        op, instance = node.operator, self._instance(node, chunk)
        if op.piece is not None:
            return self._compute_rows(operation, op.piece, node, instance)
        call, label = method_of(op, instance), self._label(node, instance)
        turn, writes, gone = operation.turn, operation.writes, operation.frees
        inputs_of = _getter(operation.reads)
        mark, record = self._recorder.mark, self._recorder.compute

        def run(frames: Sequence[Registers], passes: Sequence[Pass]) -> None:
            nonlocal label
            frame = frames[turn]
            begin = mark()
            inputs = inputs_of(frame)
            results = call(*inputs)
            if not label.shapes:
                label = replace(label, shapes=shapes_of(inputs, results if writes else ()))
            if writes:
                for register, result in zip(writes, results, strict=True):
                    frame[register] = result
            for register in gone:
                frame[register] = None
            record(label, passes[turn], begin, mark())

        return run

    def _compute_rows(self, operation: Compute, piece: Piece, node: Node, instance: PartInstance) -> Bound:
        """A GEMM on one piece of what is gathered; its rows go to their places in the whole result."""
        op = node.operator
        if len(operation.reads) != 1 or len(operation.writes) != 2:
            raise ValueError(
                f"operator {op.name} of {instance.name} {instance.index} reads {', '.join(op.reads)} and "
                f"writes {', '.join(op.writes)}; only what turns the gathered value alone into one other can "
                f"run in pieces: use another overlap.schedule"
            )
        call, label = method_of(op, instance), self._label(node, instance)
        (source,), (rows, whole) = operation.reads, operation.writes
        turn, gone = operation.turn, operation.frees
        keep = self._keeper(piece, rows, whole)
        mark, record = self._recorder.mark, self._recorder.compute

        def run(frames: Sequence[Registers], passes: Sequence[Pass]) -> None:
            nonlocal label
            frame = frames[turn]
            begin = mark()
            (result,) = call(frame[source])
            if not label.shapes:
                label = replace(label, shapes=shapes_of([frame[source]], [result]))
            keep(frame, result)
            for register in gone:
                frame[register] = None
            record(label, passes[turn], begin, mark())

        return run

    def start(self, operation: Start, frame: Frame, chunk: int) -> Bound:
        """The begin of a collective; the register of its result holds the transfer until its wait."""
        node = operation.what
        assert isinstance(node, Node)
        op = node.operator
        collective = COLLECTIVES[op.kind]
        assert op.axis is not None
        line = self._mesh.lines[op.axis]
        (source,), (target,) = operation.reads, operation.writes
        precision = frame.values[source].precision
        moved = op.bytes * precision.bytes_each(self._activation_bytes) // precision.bytes_each(2)
        label = replace(self._label(node, self._instance(node, chunk)), bytes=moved, flops=0)
        turn, stream, lone, rows = operation.turn, label.stream, operation.lone, op.piece
        start, record = self._streams.start, self._recorder.transfer

        def run(frames: Sequence[Registers], passes: Sequence[Pass]) -> None:
            nonlocal label
            frame, one = frames[turn], passes[turn]
            x = frame[source]
            if rows is not None:
                x = rows_of_piece(x, rows.number, rows.ways)
            if not label.shapes:
                label = replace(label, shapes=shapes_of([x], ()))
            transfer = start(stream, collective(line, x), awaited_next=lone)
            frame[target] = transfer
            record(label, one, transfer)

        return run

    def wait(self, operation: Wait) -> Bound:
        """The end of a collective."""
        node = operation.what
        assert isinstance(node, Node)
        turn, target, gone = operation.turn, operation.writes[0], operation.frees
        piece = node.operator.piece
        keep = None if piece is None else self._keeper(piece, *operation.writes)
        wait = self._streams.wait

        def run(frames: Sequence[Registers], passes: Sequence[Pass]) -> None:
            frame = frames[turn]
            transfer: Transfer = frame[target]
            wait(transfer)
            frame[target] = transfer.take()
            if keep is not None:
                keep(frame, frame[target])
            for register in gone:
                frame[register] = None

        return run

    def _keeper(self, piece: Piece, rows: int, whole: int) -> Callable[[Registers, Tensor], None]:
        """Keeps a piece of a value, and its rows in the whole value, which the first piece to come makes."""
        ranks = self._mesh.layout.degree(piece.axis)

        def keep(frame: Registers, x: Tensor) -> None:
            frame[rows] = x
            if frame[whole] is None:
                frame[whole] = whole_for(x, piece.ways)
            place_piece(frame[whole], x, piece.number, piece.ways, ranks)

        return keep

    def _instance(self, node: Node, chunk: int) -> PartInstance:
        return self._model.chunks[chunk][node.part]

    def _label(self, node: Node, instance: PartInstance) -> Label:
        op = node.operator
        stream = op.stream if op.axis is None else self._mesh.stream(op.axis)
        return Label(operator=name_of(node), stream=stream, layer=instance.index, flops=op.flops, key=op.key)


def _getter(reads: Sequence[int]) -> Callable[[Registers], tuple[Any, ...]]:
    """What reads some registers of a frame."""
    match reads:
        case ():
            return lambda frame: ()
        case (register,):
            return lambda frame: (frame[register],)
        case _:
            return itemgetter(*reads)


def shapes_of(inputs: Iterable[Any], results: Iterable[Any]) -> str:
    """Shapes of what an operator reads and writes, for people: ``512x1024, 1024 -> 512x1024``."""

    def told(values: Iterable[Any]) -> str:
        found = (tuple(value.shape) for value in values if isinstance(value, Tensor))
        return ", ".join("x".join(map(str, shape)) or "1" for shape in found)

    return f"{told(inputs)} -> {told(results)}".removesuffix(" -> ") or "-"


def method_of(operator: Operator, instance: PartInstance) -> Callable[..., Any]:
    """The method of a part's module that an operator calls; `ValueError` if there is no such module."""
    if operator.kind is Kind.ADD:
        return _add
    module = instance.modules.get(operator.module)
    if module is None:
        raise ValueError(
            f"operator {operator.name} of {instance.name} {instance.index} needs a module "
            f"{operator.module!r}; there are {', '.join(instance.modules)}"
        )
    match operator.phase:
        case Phase.FORWARD | Phase.RECOMPUTE:
            return module.forward
        case Phase.INPUT_GRADIENT:
            return module.input_gradient
        case Phase.WEIGHT_GRADIENT:
            return module.weight_gradient
        case Phase.GRADIENT:
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
