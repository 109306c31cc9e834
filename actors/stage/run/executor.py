"""Runs linked code: a loop over one stage's operations.

The code determines the order of operations, their streams and when values are freed; the executor binds every
distinct operation once and calls the bound functions in order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from braid.actors.stage.measure.telemetry import Recorder
from braid.actors.stage.model.model import StageModel
from braid.actors.stage.rank.groups import Mesh
from braid.actors.stage.run.bindings import Binder, Bound, Registers, shapes_of
from braid.actors.stage.run.micro_batch import MicroBatch
from braid.actors.stage.run.step_graph import StepGraph
from braid.actors.stage.run.streams import Streams, Transfer
from braid.kernels.collectives.primitives import Channel
from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.schedule.code import Code, Frame, Stretch, prefetched, update_begins
from braid.scheduling.schedule.operations import (
    Allocate,
    Barrier,
    Clip,
    Compute,
    Gather,
    Hand,
    Loss,
    Node,
    Norm,
    Operation,
    Pass,
    Receive,
    Reduce,
    Release,
    Send,
    Start,
    Step,
    Update,
    Wait,
    name_of,
)
from braid.scheduling.trace.spans import Label

if TYPE_CHECKING:  # benchmarks on one GPU run where numpy is not installed
    from braid.actors.stage.model.routing import Routing
    from braid.actors.stage.rank.messages import RoutingSums
    from braid.actors.stage.state.buckets import RankBuckets
    from braid.actors.stage.state.optimizer import Optimizer


_Stretch = tuple[Stretch, tuple[Registers, ...], tuple[Bound, ...]]


class Executor:
    """Executes one stage's code on one rank, bound to the rank's modules and groups."""

    def __init__(
        self,
        *,
        code: Code,
        model: StageModel,
        mesh: Mesh,
        streams: Streams,
        recorder: Recorder,
        buckets: "RankBuckets | None" = None,
        watch: Callable[[Operation], None] | None = None,
        graph: StepGraph | None = None,
        routing: "Routing | None" = None,
        around: Callable[[Operation, Bound], Bound] | None = None,
    ) -> None:
        """``buckets``: parameters and gradients; None for code without sums and gathers. ``watch`` is called
        after every operation, before registers are freed. ``graph`` captures the operations before the
        update. ``routing`` adds up the routers' statistics. ``around`` returns a function to run in place
        of an operation's."""
        self._model, self._mesh, self._streams, self._recorder = model, mesh, streams, recorder
        self._binder = Binder(model, mesh, streams, recorder, routing)
        self._watch, self._around, self.graph, self._routing = watch, around, graph, routing
        self.before: Callable[[int], None] | None = None
        """Function called before every instruction with its position; drills inject faults there."""
        self.ended: Callable[[], None] | None = None
        """Called when a step's transfers have ended, before the next step's first transfer."""
        self.transfers: Callable[[Reduce | Gather], None] | None = None
        """Function called before every sum of gradients and every gather; drills inject faults there."""
        self._buckets = buckets
        self._update: Optimizer | None = None
        self._chunks = code.schedule.chunks
        self._sending: dict[Send, Transfer] = {}
        self._losses: list[Tensor] = []
        self._seen: list[int] = []  # micro-batch of each loss
        self._frames: dict[tuple[int, int], Registers] = {}
        self._constants: list[tuple[int, Registers, Mapping[str, tuple[int, ...]]]] = []
        """(number of a micro-batch, its registers, the registers that the batch fills by name)."""
        sizes = model.context.sizes
        self._message_shape = (sizes.local_tokens, model.shape.hidden)
        bound: dict[tuple[object, ...], tuple[Bound, ...]] = {}
        self._stretches: list[_Stretch] = []
        for stretch in code.stages[mesh.position["pp"]]:
            key = (id(stretch.operations), *(pass_.chunk for pass_ in stretch.passes))
            if key not in bound:
                bound[key] = tuple(self._bind(operation, stretch) for operation in stretch.operations)
            frames = tuple(map(self._frame, stretch.passes, stretch.frames))
            losses = [op for op in stretch.operations if isinstance(op, Loss)]
            self._seen += [stretch.passes[loss.turn].micro_batch for loss in losses]
            self._stretches.append((stretch, frames, bound[key]))
        self._update_begins = update_begins([stretch for stretch, _, _ in self._stretches])
        self._prefetched = prefetched([stretch for stretch, _, _ in self._stretches])
        self._next_begins = len(self._stretches) - bool(self._prefetched)

    def _frame(self, pass_: Pass, frame: Frame) -> Registers:
        key = pass_.micro_batch, pass_.chunk
        if key not in self._frames:
            self._frames[key] = [None] * len(frame.names)
            if frame.constants:
                self._constants.append((pass_.micro_batch, self._frames[key], frame.constants))
        return self._frames[key]

    @torch.no_grad()
    def run(
        self, batches: Sequence[MicroBatch | None], loss_scale: float, update: "Optimizer | None" = None
    ) -> float:
        """Run the code once; return the weighted sum of token losses on this rank (0.0 if it computes no
        loss).

        ``batches``: one per micro-batch, None on ranks that hold neither the first nor the last chunk.
        ``loss_scale`` multiplies gradients, as `MicroBatch.weights` do. ``update`` ends the step; None:
        parameters stay unchanged.
        """
        self._update = update
        self._recorder.clear()
        if self._routing is not None:
            self._routing.clear()
        if self._prefetched:
            for gather in self._prefetched:  # the parameters that are used first
                self._held.start(gather)
            if self.graph is not None:
                self._held.settle()  # transfers that a graph waits for must begin in the graph
        if self.graph is not None and self.before is None:
            self._losses = self.graph.run(self, batches, loss_scale)
        else:
            self._losses = self.passes(batches, loss_scale)
        self._do(self._update_begins, self._next_begins)
        if self.ended is not None:
            self.ended()
        self._do(self._next_begins, len(self._stretches))
        return sum(_total(loss_T, batches[m]) for m, loss_T in zip(self._seen, self._losses, strict=True))

    def passes(self, batches: Sequence[MicroBatch | None], loss_scale: float) -> list[Tensor]:
        """Run the operations before the update; return the token losses of each micro-batch on this rank."""
        self._losses = []
        self._fill(batches, loss_scale)
        self._do(0, self._update_begins)
        self._fill([None] * len(batches), None)
        remaining = [key for key, frame in self._frames.items() if any(value is not None for value in frame)]
        assert not remaining, (
            f"registers were left over of micro-batch and chunk {', '.join(map(str, remaining))}"
        )
        return self._losses

    def drop(self) -> None:
        """Free the registers and the transfers of passes that were broken off."""
        self._sending.clear()
        for frame in self._frames.values():
            frame[:] = [None] * len(frame)

    def _do(self, begin: int, end: int) -> None:
        before, mark, note = self.before, self._streams.mark, self._recorder.block
        for position in range(begin, end):
            stretch, frames, operations = self._stretches[position]
            if before is not None:
                before(position)
            passes = stretch.passes
            if stretch.block_passes:
                began = mark()
                for operation in operations:
                    operation(frames, passes)
                note(stretch.paired, passes[0], began, mark())
            else:
                for operation in operations:
                    operation(frames, passes)

    @property
    def losses(self) -> dict[int, Tensor]:
        """Losses of the tokens in the last run, by micro-batch; empty on a rank that computes no loss."""
        return dict(zip(self._seen, self._losses, strict=True))

    @property
    def routed(self) -> "RoutingSums | None":
        """Statistics of routers in the last run; None if these are not collected."""
        return None if self._routing is None else self._routing.read()

    def _fill(self, batches: Sequence[MicroBatch | None], loss_scale: float | None) -> None:
        """Write the batch's values into their registers; without a loss scale, write None."""
        for micro_batch, frame, constants in self._constants:
            batch = batches[micro_batch]
            values: dict[str, object] = {"loss_scale": loss_scale, "target_scale": loss_scale}
            if batch is not None:
                values |= {**vars(batch), **batch.documents}
                if batch.weights is not None and loss_scale is not None:
                    values["target_scale"] = batch.weights * loss_scale
            for name, registers in constants.items():
                for register in registers:
                    frame[register] = values.get(name)

    def held(self) -> list[object]:
        """Return all activations and messages that are alive now, except the batch's tensors."""
        from_batch = {
            id(frame[register])
            for _, frame, constants in self._constants
            for registers in constants.values()
            for register in registers
        }
        return [value for frame in self._frames.values() for value in frame if id(value) not in from_batch]

    # -- binding -------------------------------------------------------------------------------------------

    def _bind(self, operation: Operation, stretch: Stretch) -> Bound:
        if self._watch is None:
            run = self._bound(operation, stretch)
            return run if self._around is None else self._around(operation, run)
        run, watch = self._bound(replace(operation, frees=()), stretch), self._watch

        def watched(frames: Sequence[Registers], passes: Sequence[Pass]) -> None:
            run(frames, passes)
            watch(operation)
            for register in operation.frees:
                frames[operation.turn][register] = None

        return watched

    def _bound(self, operation: Operation, stretch: Stretch) -> Bound:
        turn = operation.turn
        match operation:
            case Compute(what=Node()):
                return self._binder.compute(operation, stretch.frames[turn], stretch.passes[turn].chunk)
            case Start(what=Node()):
                return self._binder.start(operation, stretch.frames[turn], stretch.passes[turn].chunk)
            case Wait(what=Node()):
                return self._binder.wait(operation, stretch.frames[turn])
            case Barrier():
                return lambda frames, passes: self._streams.barrier()
            case Hand(reads=(register,), to=to, register=into, frees=frees):
                return lambda frames, passes: _hand(frames[turn], register, frames[to], into, frees)
            case Loss(reads=(register,), frees=frees):
                return lambda frames, passes: self._keep_loss(frames[turn], register, frees)
            case Start(Send() as message):
                return self._send(message, operation.reads[0])
            case Start(Receive() as message):
                return self._receive(message, operation.writes[0])
            case Wait(Send() as message, frees=frees):
                return self._sent(message, frees)
            case Wait(Receive(), writes=(register,)):
                return lambda frames, passes: self._received(frames[0], register)
            case Start(what=Reduce() | Gather() as shared):
                return lambda frames, passes: self._start(shared)
            case Wait(what=Reduce() | Gather() as shared):
                return lambda frames, passes: self._held.wait(shared)
            case Allocate(what=reduce):
                return lambda frames, passes: self._held.allocate(reduce)
            case Release(what=gather):
                return lambda frames, passes: self._held.release(gather)
            case Compute(what=Norm() as norm):
                return self._timed(norm, lambda update: update.norm())
            case Compute(what=Step() as step):
                return self._timed(step, lambda update: update.step())
            case Compute(what=Clip() as clip):
                return self._timed(clip, lambda update: update.clip())
            case Compute(what=Update(chunk, bucket) as of_bucket):
                return self._timed(of_bucket, lambda update: update.update((chunk, bucket)))
        raise AssertionError(operation)

    def _timed(self, what: Norm | Step | Clip | Update, do: "Callable[[Optimizer], None]") -> Bound:
        label = Label(operator=name_of(what), stream=Stream.COMPUTE)

        def run(frames: Sequence[Registers], passes: Sequence[Pass]) -> None:
            begin = self._recorder.mark()
            if self._update is not None:
                do(self._update)
            self._recorder.compute(label, None, begin, self._recorder.mark())

        return run

    @property
    def _held(self) -> "RankBuckets":
        assert self._buckets is not None, "code that sums or gathers needs buckets"
        return self._buckets

    def _start(self, what: Reduce | Gather) -> None:
        if self.transfers is not None and what.chunk is not None:
            self.transfers(what)
        self._held.start(what)

    def _keep_loss(self, frame: Registers, register: int, frees: Sequence[int]) -> None:
        self._losses.append(frame[register])
        for freed in frees:
            frame[freed] = None

    # -- messages between stages ---------------------------------------------------------------------------

    def _send(self, sent: Send, register: int) -> Bound:
        tag = self._tag(sent.moved)
        line, lane = self._channel(sent.moved, down=sent.stage > self._mesh.position["pp"])
        stream = self._mesh.stream_to(sent.stage)
        label = Label(operator=name_of(sent), stream=stream)

        def run(frames: Sequence[Registers], passes: Sequence[Pass]) -> None:
            nonlocal label
            x = frames[0][register]
            if not label.shapes:
                label = replace(label, bytes=x.nbytes, shapes=shapes_of([x], ()))
            launch = line.send(x, sent.stage, tag)
            transfer = self._streams.start(stream, launch, awaited_next=False, lane=f"send {lane}")
            self._sending[sent] = transfer
            self._recorder.transfer(label, sent.moved, transfer)

        return run

    def _sent(self, sent: Send, frees: Sequence[int]) -> Bound:
        def run(frames: Sequence[Registers], passes: Sequence[Pass]) -> None:
            self._streams.result_of(self._sending.pop(sent))
            for register in frees:
                frames[0][register] = None

        return run

    def _receive(self, received: Receive, register: int) -> Bound:
        """Bind a receive. A receive is not recorded as communication: most of its time is a wait for the
        previous stage's compute, which is pipeline bubble; the sender's span shows the message."""
        tag = self._tag(received.moved)
        line, lane = self._channel(received.moved, down=received.stage < self._mesh.position["pp"])
        dtype, device = self._model.context.dtype, self._model.context.device
        stream = self._mesh.stream_to(received.stage)

        def run(frames: Sequence[Registers], passes: Sequence[Pass]) -> None:
            x = torch.empty(self._message_shape, dtype=dtype, device=device)
            launch = line.receive(x, received.stage, tag)
            frames[0][register] = self._streams.start(
                stream, launch, awaited_next=False, lane=f"receive {lane}"
            )

        return run

    def _received(self, frame: Registers, register: int) -> None:
        frame[register] = self._streams.result_of(frame[register])

    def _channel(self, moved: Pass, *, down: bool) -> tuple[Channel, str]:
        way = "down" if down else "up"
        return self._mesh.channels[moved.direction, way], f"{moved.direction.value} {way}"

    def _tag(self, moved: Pass) -> int:
        return moved.micro_batch * self._chunks + moved.chunk


def _total(loss_T: Tensor, batch: MicroBatch | None) -> float:
    if batch is None or batch.weights is None:
        return float(loss_T.sum())
    counted_T = batch.weights != 0
    return float((loss_T[counted_T] * batch.weights[counted_T]).sum())


def _hand(source: Registers, register: int, target: Registers, into: int, frees: Sequence[int]) -> None:
    target[into] = source[register]
    for freed in frees:
        source[freed] = None
