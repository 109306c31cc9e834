"""Binds operations of linked code to modules, groups and registers: each becomes a function of frames.

All decisions that can be made before a step are made here: the method that an operator calls, the group of a
collective, the label of a span. An operation that cannot be bound raises an error when the code is loaded.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from braid.actors.stage.measure.telemetry import Recorder
from braid.actors.stage.model.model import PartInstance, StageModel
from braid.actors.stage.rank.groups import Mesh
from braid.actors.stage.run.regions import Rows
from braid.actors.stage.run.streams import Streams, Transfer
from braid.kernels.collectives.primitives import Launch, gather_stage, scatter_stage
from braid.kernels.operators.linear import Linear
from braid.kernels.operators.operator import ComputeOperator
from braid.scheduling.mesh.mesh import place_in
from braid.scheduling.mesh.partition import WHOLE, DimRanks, Factor, Region, bounds, whole_axis
from braid.scheduling.model.operators import Kind, Operator, Phase, Value
from braid.scheduling.schedule.code import Frame
from braid.scheduling.schedule.operations import Compute, Node, Pass, Start, Wait, name_of
from braid.scheduling.trace.spans import Label

if TYPE_CHECKING:  # benchmarks on one GPU run where numpy is not installed
    from braid.actors.stage.model.routing import Routing

Registers = list[Any]
"""Registers of a frame (one micro-batch in one chunk), by number."""
Bound = Callable[[Sequence[Registers], Sequence[Pass]], None]
"""Function of a bound operation; its arguments are the frames and the passes of the operation's stretch."""


def collective_of(kind: Kind, phase: Phase = Phase.FORWARD) -> Callable[..., Launch]:
    """Return the function that launches a kind of collective, given line, x, and perhaps the rows of each
    rank.

    Gradients are passed around a ring in the opposite direction.
    """
    match kind:
        case Kind.ALL_GATHER:
            return lambda line, x, shares=None: line.all_gather(x, shares=shares)
        case Kind.REDUCE_SCATTER:
            return lambda line, x, shares=None: line.reduce_scatter(x, shares=shares)
        case Kind.ALL_TO_ALL:
            return lambda line, x, extents: line.all_to_all(x, extents)
        case Kind.ALL_REDUCE:
            return lambda line, x: line.all_reduce(x)
        case Kind.SEND_RECEIVE:
            by = -1 if phase is Phase.INPUT_GRADIENT else 1
            return lambda line, x: line.shift(x, by)
    raise AssertionError(kind)


class Binder:
    """Binds the operators of layers on one rank."""

    def __init__(
        self,
        model: StageModel,
        mesh: Mesh,
        streams: Streams,
        recorder: Recorder,
        routing: "Routing | None" = None,
    ) -> None:
        self._model, self._mesh, self._streams, self._recorder = model, mesh, streams, recorder
        self._routing = routing
        self._activation_bytes = model.context.dtype.itemsize

    def compute(self, operation: Compute, frame: Frame, chunk: int) -> Bound:
        node = operation.what
        assert isinstance(node, Node)
        op, instance = node.operator, self._instance(node, chunk)
        if op.piece is not None:
            return self._compute_piece(operation, node, frame, instance)
        call, label = method_of(op, instance), self._label(node, instance)
        if self._routing is not None:
            call = self._routing.watched(op, instance, call)
        turn, writes, freed = operation.turn, operation.writes, operation.frees
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
            for register in freed:
                frame[register] = None
            record(label, passes[turn], begin, mark())

        return run

    def _compute_piece(self, operation: Compute, node: Node, frame: Frame, instance: PartInstance) -> Bound:
        """Bind an operator on some rows or columns; its result is copied into the whole value."""
        op, label = node.operator, self._label(node, instance)
        source, *so_far = operation.reads
        target = operation.writes[0]
        read, written = frame.values[source], frame.values[target]
        call = _method_for_columns(op, instance, read, written)
        wanted = written.region and replace(written.region, columns=WHOLE)  # a matrix has other input columns
        rows = self._rows(wanted, read, DimRanks.ALL)
        keep = self._keeper(frame, operation.writes, DimRanks.ALL)
        turn, freed = operation.turn, operation.frees
        mark, record = self._recorder.mark, self._recorder.compute

        def run(frames: Sequence[Registers], passes: Sequence[Pass]) -> None:
            nonlocal label
            frame = frames[turn]
            begin = mark()
            x = frame[source] if rows is None else rows.take(frame[source])
            (result,) = call(x)
            if not label.shapes:
                label = replace(label, shapes=shapes_of([x], [result]))
            frame[target] = frame[so_far[0]].add_(result) if so_far else result
            if keep is not None:
                keep(frame)
            for register in freed:
                frame[register] = None
            record(label, passes[turn], begin, mark())

        return run

    def start(self, operation: Start, frame: Frame, chunk: int) -> Bound:
        """Bind the start of a collective; the result's register holds the transfer until the wait."""
        node = operation.what
        assert isinstance(node, Node)
        op = node.operator
        assert op.axis is not None
        collective = self._collective(op, frame, operation)
        (source, *extents), (target,) = operation.reads, operation.writes
        precision = frame.values[source].precision
        moved = op.bytes * precision.bytes_each(self._activation_bytes) // precision.bytes_each(2)
        label = replace(self._label(node, self._instance(node, chunk)), bytes=moved, flops=0)
        turn, stream, lone = operation.turn, label.stream, operation.lone
        start, record = self._streams.start, self._recorder.transfer

        def run(frames: Sequence[Registers], passes: Sequence[Pass]) -> None:
            nonlocal label
            frame, pass_ = frames[turn], passes[turn]
            x = frame[source]
            if not label.shapes:
                label = replace(label, shapes=shapes_of([x], ()))
            transfer = start(stream, collective(x, *(frame[extent] for extent in extents)), awaited_next=lone)
            frame[target] = transfer
            record(label, pass_, transfer)

        return run

    def wait(self, operation: Wait, frame: Frame) -> Bound:
        node = operation.what
        assert isinstance(node, Node)
        turn, target, freed = operation.turn, operation.writes[0], operation.frees
        gathers = node.operator.kind is Kind.ALL_GATHER
        keep = self._keeper(frame, operation.writes, DimRanks.ALL if gathers else DimRanks.OWN)
        wait = self._streams.wait

        def run(frames: Sequence[Registers], passes: Sequence[Pass]) -> None:
            frame = frames[turn]
            transfer: Transfer = frame[target]
            wait(transfer)
            frame[target] = transfer.take()
            if keep is not None:
                keep(frame)
            for register in freed:
                frame[register] = None

        return run

    # -- pieces (`braid.scheduling.generate.partitions`) -----------------------------------------------------

    def _collective(self, op: Operator, frame: Frame, operation: Start) -> Callable[..., Launch]:
        """Return the function that launches a collective, or one of its stages on a piece."""
        assert op.axis is not None
        line, whole = self._mesh.line(op.axis), collective_of(op.kind, op.phase)
        if op.piece is None:
            return lambda x, *extents: whole(line, x, *extents)
        read, written = (frame.values[registers[0]] for registers in (operation.reads, operation.writes))
        mesh, dim = (op.axis.mesh, op.axis.dim) if isinstance(op.axis, Factor) else ((line.size,), 0)
        gathers = op.kind is Kind.ALL_GATHER
        end = Region(whole_axis(op.axis), mesh, ((DimRanks.ALL if gathers else DimRanks.OWN),) * len(mesh))
        region = written.region or end
        spans = list(region.spans)
        spans[dim] = DimRanks.OWN if gathers else DimRanks.ALL
        rows = self._rows(
            replace(region, spans=tuple(spans)), read, DimRanks.OWN if gathers else DimRanks.ALL
        )
        outer = prod(span.of(size) for span, size in zip(region.spans[:dim], mesh[:dim], strict=True))
        stage = gather_stage if gathers else scatter_stage

        def launch(x: Tensor) -> Launch:
            return stage(line, x if rows is None else rows.take(x), outer)

        return launch

    def _rows(self, wanted: Region | None, read: Value, whole: DimRanks) -> Rows | None:
        """Return a region's rows of a value; None if all. ``whole``: whose rows a whole value has."""
        if wanted is None:
            return None
        held = read.region or Region(wanted.axis, wanted.mesh, (whole,) * len(wanted.mesh))
        position = place_in(wanted.mesh, self._mesh.place.on(wanted.axis))
        rows = Rows(held, wanted, position)
        return None if rows.all_of_it else rows

    def _keeper(
        self, frame: Frame, writes: Sequence[int], whole: DimRanks
    ) -> Callable[[Registers], None] | None:
        """Return a function that copies a piece into the whole value, which the first piece allocates; None
        if the operation writes no whole value."""
        if len(writes) == 1:
            return None
        piece, target = writes
        value, all_of_it = frame.values[piece], frame.values[target]
        assert value.region is not None
        held = Region(value.region.axis, value.region.mesh, (whole,) * len(value.region.mesh))
        position = place_in(held.mesh, self._mesh.place.on(held.axis))
        rows = Rows(held, value.region, position)
        count, columns = all_of_it.rows, all_of_it.columns

        def keep(frame: Registers) -> None:
            piece_rows = frame[piece]
            if frame[target] is None:
                frame[target] = rows.whole_for(piece_rows, count, columns)
            rows.place(frame[target], piece_rows)

        return keep

    def _instance(self, node: Node, chunk: int) -> PartInstance:
        return self._model.chunks[chunk][node.part]

    def _label(self, node: Node, instance: PartInstance) -> Label:
        op = node.operator
        stream = op.stream if op.axis is None else self._mesh.stream(op.axis)
        return Label(
            operator=name_of(node),
            stream=stream,
            layer=instance.index,
            axis=op.axis or "",
            kind=op.kind.value if op.kind.communicates else "",
            flops=op.flops,
            key=op.key,
        )


def _getter(reads: Sequence[int]) -> Callable[[Registers], tuple[Any, ...]]:
    """Return a function that reads the given registers of a frame as a tuple."""
    match reads:
        case ():
            return lambda frame: ()
        case (register,):
            return lambda frame: (frame[register],)
        case _:
            return itemgetter(*reads)


def shapes_of(inputs: Iterable[Any], results: Iterable[Any]) -> str:
    """Return the shapes of an operator's inputs and results as text: ``512x1024, 1024 -> 512x1024``."""

    def listed(values: Iterable[Any]) -> str:
        shapes = (tuple(value.shape) for value in values if isinstance(value, Tensor))
        return ", ".join("x".join(map(str, shape)) or "1" for shape in shapes)

    return f"{listed(inputs)} -> {listed(results)}".removesuffix(" -> ") or "-"


def method_of(operator: Operator, instance: PartInstance) -> Callable[..., Any]:
    """Return the module method that an operator calls; raise `ValueError` if the part lacks the module."""
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


def _method_for_columns(
    op: Operator, instance: PartInstance, read: Value, result: Value
) -> Callable[..., Any]:
    """Return the method of an operator that reads only some columns, or writes only some columns.

    Raise `ValueError` if this is asked of any module but a linear map.
    """
    call = method_of(op, instance)
    read_columns, result_columns = (v.region.columns if v.region else WHOLE for v in (read, result))
    if read_columns == result_columns == WHOLE:
        return call
    module = instance.modules[op.module]
    if not isinstance(module, Linear):
        raise ValueError(
            f"operator {op.name} of {instance.name} {instance.index}: only linear maps can be cut along the "
            f"width; take tokens, or leave that partition out"
        )
    outputs, inputs = module.weight.shape
    forward = op.phase is Phase.FORWARD or op.phase is Phase.RECOMPUTE
    reads, makes = (inputs, outputs) if forward else (outputs, inputs)
    read_slice = slice(*bounds(read_columns, reads)) if read_columns != WHOLE else slice(None)
    written_slice = slice(*bounds(result_columns, makes)) if result_columns != WHOLE else slice(None)
    into, out = (read_slice, written_slice) if forward else (written_slice, read_slice)
    return partial(call, inputs=into, outputs=out)


def _both_gradients(module: ComputeOperator) -> Callable[..., Any]:
    parameters = any(True for _ in module.parameters(recurse=False))

    def run(*values: Any) -> Any:
        if parameters:
            module.weight_gradient(*values)
        return module.input_gradient(*values)

    return run


def _add(partial: Any, part: Any) -> tuple[Any]:
    return (partial + part,)
