"""Runs a schedule: a loop without policy over one stage's instructions.

What runs when, on which stream and beside what is written in the schedule; the executor moves values between
slots, hands blocks' inputs from one to the next, and calls bound operators.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from braid.actors.stage.bindings import Binder, shapes_of
from braid.actors.stage.blocks import BlockRunner, MicroBatch
from braid.actors.stage.mesh import Mesh
from braid.actors.stage.model import StageModel
from braid.actors.stage.streams import Streams, Transfer
from braid.actors.stage.telemetry import Recorder
from braid.kernels.collectives.primitives import receive, send
from braid.scheduling.fusion import carrying, takes_up
from braid.scheduling.lowering.lower import successor
from braid.scheduling.operators import Part, Stream
from braid.scheduling.schedule import (
    Block,
    Gather,
    Pair,
    Receive,
    Reduce,
    Schedule,
    Send,
    Step,
    Twins,
    WaitGather,
    WaitReceive,
    WaitReduce,
    WaitSend,
)
from braid.scheduling.trace import Label


class Update(Protocol):
    """What ends a training step."""

    def start_reduce(self, chunk: int) -> None:
        """Begin to reduce a chunk's gradients."""

    def wait_reduce(self, chunk: int) -> None:
        """Finish that."""

    def step(self) -> None:
        """Update the parameters."""


def _check_executable(schedule: Schedule) -> None:
    """Raise `ValueError` for what a schedule may hold and this executor does not run."""
    for instruction in (i for stage in schedule.stages for i in stage):
        if isinstance(instruction, Gather | WaitGather):
            raise ValueError(
                f"schedule {schedule.name} holds {instruction}, which can be planned and simulated, but not "
                f"executed in this version; set parallel.zero to 0"
            )


class Executor:
    """One rank's loop over one schedule, bound to its modules and groups."""

    def __init__(
        self,
        *,
        schedule: Schedule,
        parts: Mapping[str, Part],
        model: StageModel,
        mesh: Mesh,
        streams: Streams,
        recorder: Recorder,
    ) -> None:
        _check_executable(schedule)
        self.schedule = schedule
        self._parts = parts
        self._model = model
        self._mesh = mesh
        self._streams = streams
        self._recorder = recorder
        self._instructions = schedule.stages[mesh.position["pp"]]
        self._inputs: dict[Block, Tensor | None] = {}
        self._sending: dict[Block, Transfer] = {}
        self._receiving: dict[Block, Transfer] = {}
        self._labels: dict[Block, Label] = {}
        """Of messages that are sent."""
        self.before: Callable[[int], None] | None = None
        """Called before every instruction with its position: drills break something there."""
        self._blocks = BlockRunner(
            schedule=schedule,
            parts=parts,
            model=model,
            binder=Binder(mesh, streams, recorder, model.context.dtype.itemsize),
            streams=streams,
        )
        ends = takes_up(schedule.programs)
        self._carrying = carrying(self._instructions, self._blocks.names, schedule.pairs, ends)
        sizes = model.context.sizes
        self._message_shape = (sizes.local_tokens, model.shape.hidden)
        self._dtype, self._device = model.context.dtype, model.context.device

    @torch.no_grad()
    def run(self, batches: Sequence[MicroBatch | None], loss_scale: float, update: Update | None) -> float:
        """Run the schedule once. Returns the sum of token losses this rank saw (0.0 without the head).

        ``batches``: one per micro-batch, None on ranks that hold neither the first nor the last chunk.
        ``loss_scale`` multiplies gradients. ``update`` may be None for a schedule without backward passes.
        """
        self._recorder.clear()
        self._blocks.clear()
        for position, instruction in enumerate(self._instructions):
            if self.before is not None:
                self.before(position)
            match instruction:
                case Block():
                    self._run_block(instruction, batches, loss_scale)
                case Pair():
                    self._run_pair(instruction, batches, loss_scale, position in self._carrying)
                case Twins():
                    self._run_twins(instruction, batches, loss_scale)
                case Send(block, stage):
                    self._send(block, stage)
                case Receive(block, stage):
                    following = self._instructions[position + 1]
                    self._receive(block, stage, following == WaitReceive(block))
                case WaitSend(block):
                    transfer = self._sending.pop(block)
                    self._streams.wait(transfer)
                    transfer.take()
                case WaitReceive(block):
                    transfer = self._receiving.pop(block)
                    self._streams.wait(transfer)
                    self._inputs[block] = transfer.take()
                case Reduce(chunk):
                    assert update is not None
                    update.start_reduce(chunk)
                case WaitReduce(chunk):
                    assert update is not None
                    update.wait_reduce(chunk)
                case Step():
                    assert update is not None
                    update.step()
        self._blocks.assert_empty()
        left = [*self._inputs, *self._sending, *self._receiving]
        assert not left, f"messages were left over: {', '.join(map(str, left))}"
        return sum(float(loss) for loss in self._blocks.losses)

    def held(self) -> list[object]:
        """All activations and messages that are alive at this moment; tokens are not among them."""
        return [self._blocks.held(), self._inputs, self._sending, self._receiving]

    # -- blocks ------------------------------------------------------------------------------------------

    def _run_block(self, block: Block, batches: Sequence[MicroBatch | None], loss_scale: float) -> None:
        received = self._inputs.pop(block.whole, None) if block.travels else None
        begin = self._streams.mark()
        result = self._blocks.run(block, received, batches[block.micro_batch], loss_scale)
        self._recorder.block(False, block, begin, self._streams.mark())
        self._hand_on(block, result)

    def _run_pair(
        self, pair: Pair, batches: Sequence[MicroBatch | None], loss_scale: float, keeps_late: bool
    ) -> None:
        received = self._inputs.pop(pair.forward, None), self._inputs.pop(pair.backward.whole, None)
        batch = batches[pair.forward.micro_batch]
        begin = self._streams.mark()
        results = self._blocks.run_pair(pair, received, batch, loss_scale, keeps_late=keeps_late)
        self._recorder.block(True, pair.forward, begin, self._streams.mark())
        for block, result in zip((pair.forward, pair.backward), results, strict=True):
            self._hand_on(block, result)

    def _run_twins(self, twins: Twins, batches: Sequence[MicroBatch | None], loss_scale: float) -> None:
        first, second = twins.blocks
        received = self._inputs.pop(first, None), self._inputs.pop(second, None)
        both = batches[first.micro_batch], batches[second.micro_batch]
        begin = self._streams.mark()
        results = self._blocks.run_twins(twins, received, both, loss_scale)
        self._recorder.block(True, first, begin, self._streams.mark())
        for block, result in zip(twins.blocks, results, strict=True):
            self._hand_on(block, result)

    def _hand_on(self, block: Block, result: Tensor | None) -> None:
        """Keep a block's result as the input of the next one of its pass."""
        following = successor(block.whole, self._mesh.layout) if block.travels else None
        if following is not None:
            self._inputs[following] = result

    # -- messages between stages ---------------------------------------------------------------------------

    def _send(self, block: Block, stage: int) -> None:
        x = self._inputs.pop(block)
        assert x is not None
        peer, tag = self._mesh.peer(stage), self._tag(block)
        group, lane = self._channel(block, down=stage > self._mesh.position["pp"])
        launch = send(x, peer, group, tag)
        transfer = self._streams.start(Stream.INTER, launch, awaited_next=False, lane=f"send {lane}")
        self._sending[block] = transfer
        label = self._labels.get(block)
        if label is None:
            label = self._labels[block] = Label(
                operator=f"send {block}", stream=Stream.INTER, bytes=x.nbytes, shapes=shapes_of([x], ())
            )
        self._recorder.transfer(label, block, transfer)

    def _receive(self, block: Block, stage: int, awaited_next: bool) -> None:
        x = torch.empty(self._message_shape, dtype=self._dtype, device=self._device)
        peer, tag = self._mesh.peer(stage), self._tag(block)
        group, lane = self._channel(block, down=stage < self._mesh.position["pp"])
        launch = receive(x, peer, group, tag)
        transfer = self._streams.start(
            Stream.INTER, launch, awaited_next=awaited_next, lane=f"receive {lane}"
        )
        self._receiving[block] = transfer
        # Not recorded as communication: most of a receive is waiting for the stage before to compute, which
        # is bubble; the message itself is the sender's span.

    def _channel(self, block: Block, *, down: bool) -> tuple[dist.ProcessGroup, str]:
        way = "down" if down else "up"
        return self._mesh.channels[block.direction, way], f"{block.direction.value} {way}"

    def _tag(self, block: Block) -> int:
        return block.micro_batch * self.schedule.chunks + block.chunk
