"""Runs a schedule: a loop without policy over one stage's instructions.

What runs when, on which stream and beside what is written in the schedule; the executor moves values between
slots, hands blocks' inputs from one to the next, and calls bound operators.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from braid.actors.stage.bindings import Binder, BoundAction
from braid.actors.stage.mesh import Mesh
from braid.actors.stage.model import PartInstance, StageModel
from braid.actors.stage.slots import SlotKey, Slots, Values
from braid.actors.stage.streams import Streams, Transfer
from braid.actors.stage.telemetry import Recorder, SpanLabel
from braid.kernels.collectives.primitives import receive, send
from braid.scheduling.operators import Part, Stream
from braid.scheduling.schedule import (
    Block,
    Direction,
    Gather,
    Gradients,
    Pair,
    Receive,
    Reduce,
    Schedule,
    Send,
    Step,
    WaitGather,
    WaitReceive,
    WaitReduce,
    WaitSend,
)


@dataclass(frozen=True)
class MicroBatch:
    """Token ids of one micro-batch on the device: inputs and their successors, each T long."""

    tokens: Tensor
    targets: Tensor


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
    unknown = (Pair, Gather, WaitGather)
    for instruction in (i for stage in schedule.stages for i in stage):
        split = isinstance(instruction, Block) and instruction.gradients is not Gradients.BOTH
        if split or isinstance(instruction, unknown):
            raise ValueError(
                f"schedule {schedule.name} holds {instruction}, which can be planned and simulated, but not "
                f"executed in this version; set overlap.schedule to megatron or folded"
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
        self._slots = Slots()
        self._instructions = schedule.stages[mesh.position["pp"]]
        self._inputs: dict[Block, Tensor | None] = {}
        self._sending: dict[Block, Transfer] = {}
        self._receiving: dict[Block, Transfer] = {}
        self._losses: list[Tensor] = []
        self._bound = self._bind(Binder(mesh, streams, recorder, model.context.dtype.itemsize))
        sizes = model.context.sizes
        self._message_shape = (sizes.local_tokens, model.shape.hidden)
        self._dtype, self._device = model.context.dtype, model.context.device

    def _bind(
        self, binder: Binder
    ) -> dict[tuple[int, Direction], list[tuple[PartInstance, tuple[BoundAction, ...]]]]:
        trains = self.schedule.trains
        directions = list(Direction) if trains else [Direction.FORWARD]
        return {
            (chunk, direction): [
                (
                    instance,
                    binder.bind(
                        self.schedule.programs[instance.name, direction],
                        self._parts[instance.name],
                        instance,
                        direction,
                        trains,
                    ),
                )
                for instance in instances
            ]
            for chunk, instances in self._model.chunks.items()
            for direction in directions
        }

    @torch.no_grad()
    def run(self, batches: Sequence[MicroBatch | None], loss_scale: float, update: Update | None) -> float:
        """Run the schedule once. Returns the sum of token losses this rank saw (0.0 without the head).

        ``batches``: one per micro-batch, None on ranks that hold neither the first nor the last chunk.
        ``loss_scale`` multiplies gradients. ``update`` may be None for a schedule without backward passes.
        """
        self._recorder.clear()
        self._losses.clear()
        for position, instruction in enumerate(self._instructions):
            match instruction:
                case Block():
                    self._run_block(instruction, batches[instruction.micro_batch], loss_scale)
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
        self._slots.assert_empty()
        left = [*self._inputs, *self._sending, *self._receiving]
        assert not left, f"messages were left over: {', '.join(map(str, left))}"
        return sum(float(loss) for loss in self._losses)

    # -- blocks ------------------------------------------------------------------------------------------

    def _run_block(self, block: Block, batch: MicroBatch | None, loss_scale: float) -> None:
        bound = self._bound[block.chunk, block.direction]
        if block.direction is Direction.FORWARD:
            x = self._inputs.pop(block, None)
            for place, (instance, actions) in enumerate(bound):
                values = self._slots.open(self._slot(block, place))
                self._feed(values, instance, x, batch, loss_scale)
                x = self._forward(block, place, instance, actions, values)
            if block.chunk < self.schedule.chunks - 1:
                self._inputs[Block(block.direction, block.micro_batch, block.chunk + 1, block.strand)] = x
            return
        dy = self._inputs.pop(block, None)
        for place in reversed(range(len(bound))):
            instance, actions = bound[place]
            values = self._slots.reopen(self._slot(block, place))
            part = self._parts[instance.name]
            if dy is not None:
                values[f"d.{part.output}"] = dy
            for action in actions:
                action(values, block)
            dy = values.pop("d.x", None)
            self._slots.close(self._slot(block, place))
        if block.chunk > 0:
            self._inputs[Block(block.direction, block.micro_batch, block.chunk - 1, block.strand)] = dy

    def _forward(
        self,
        block: Block,
        place: int,
        instance: PartInstance,
        actions: Sequence[BoundAction],
        values: Values,
    ) -> Tensor:
        for action in actions:
            action(values, block)
        y = values.pop(self._parts[instance.name].output)
        if instance.name == "head":
            self._losses.append(y)
        if not self.schedule.trains:
            self._slots.close(self._slot(block, place))
        return y

    @staticmethod
    def _slot(block: Block, place: int) -> SlotKey:
        return block.strand, block.micro_batch, block.chunk, place

    def _feed(
        self,
        values: Values,
        instance: PartInstance,
        x: Tensor | None,
        batch: MicroBatch | None,
        loss_scale: float,
    ) -> None:
        """Put a part's inputs into its slot."""
        available = {"x": x, "loss_scale": loss_scale}
        if batch is not None:
            available |= {"tokens": batch.tokens, "targets": batch.targets}
        part = self._parts[instance.name]
        needed = set(part.saved()) if self.schedule.trains else set()
        needed |= {name for op in part.forward.operators for name in op.reads}
        values.update((name, available[name]) for name in part.inputs if name in needed)

    # -- messages between stages ---------------------------------------------------------------------------

    def _send(self, block: Block, stage: int) -> None:
        x = self._inputs.pop(block)
        assert x is not None
        peer, tag = self._mesh.peer(stage), self._tag(block)
        group, lane = self._channel(block, down=stage > self._mesh.position["pp"])
        launch = send(x, peer, group, tag)
        transfer = self._streams.start(Stream.INTER, launch, awaited_next=False, lane=f"send {lane}")
        self._sending[block] = transfer
        self._recorder.transfer(SpanLabel(f"send {block}", Stream.INTER, bytes=x.nbytes), block, transfer)

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
