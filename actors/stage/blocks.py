"""Runs blocks: one pass of one micro-batch over one chunk, or two of different strands at the same time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from braid.actors.stage.bindings import Binder, BoundAction
from braid.actors.stage.model import PartInstance, StageModel
from braid.actors.stage.slots import SlotKey, Slots, Values
from braid.actors.stage.streams import Streams
from braid.scheduling.operators import Part
from braid.scheduling.schedule import (
    Barrier,
    Block,
    Compute,
    Direction,
    Gradients,
    Pair,
    PairProgram,
    Schedule,
)


@dataclass(frozen=True)
class MicroBatch:
    """Token ids of one micro-batch on the device: inputs and their successors, each T long."""

    tokens: Tensor
    targets: Tensor


@dataclass(frozen=True)
class _Held:
    """A part of a chunk with its programs, bound."""

    place: int
    instance: PartInstance
    forward: tuple[BoundAction, ...]
    backward: tuple[BoundAction, ...] = ()
    inputs: tuple[BoundAction, ...] = ()
    weights: tuple[BoundAction, ...] = ()
    paired_forward: Mapping[int, BoundAction] | None = None
    paired_backward: Mapping[int, BoundAction] | None = None
    """Actions by their positions in the paired program; layers alone have them."""


@dataclass
class _Late:
    """A backward layer whose late weight gradients have not run yet."""

    held: _Held
    values: Values
    block: Block


class BlockRunner:
    """Executes the programs of one schedule on one rank's parts and keeps their values in slots."""

    def __init__(
        self,
        *,
        schedule: Schedule,
        parts: Mapping[str, Part],
        model: StageModel,
        binder: Binder,
        streams: Streams,
    ) -> None:
        self._schedule = schedule
        self._parts = parts
        self._streams = streams
        self._slots = Slots()
        self._pair: PairProgram = schedule.pairs.get(("layer", "layer"), ())
        self._chunks = {
            chunk: tuple(self._hold(binder, place, instance) for place, instance in enumerate(instances))
            for chunk, instances in model.chunks.items()
        }
        self.losses: list[Tensor] = []
        """Sums of token losses that heads have computed since the last `clear`."""

    def _hold(self, binder: Binder, place: int, instance: PartInstance) -> _Held:
        schedule, part, name = self._schedule, self._parts[instance.name], instance.name
        forward = schedule.programs[name, Direction.FORWARD]
        bound = binder.bind(forward, part, instance, Direction.FORWARD, schedule.trains)
        if not schedule.trains:
            return _Held(place, instance, bound)
        backward = schedule.programs[name, Direction.BACKWARD]
        whole = binder.bind(backward, part, instance, Direction.BACKWARD, True)
        inputs: tuple[BoundAction, ...] = ()
        weights: tuple[BoundAction, ...] = ()
        if schedule.splits:
            first = schedule.splits[name, Gradients.INPUT]
            second = schedule.splits[name, Gradients.WEIGHT]
            inputs, weights = binder.bind_split(first, second, part, instance)
        paired: list[Mapping[int, BoundAction] | None] = [None, None]
        if self._pair and name == "layer":
            paired = [
                binder.bind_side(self._pair, part, instance, direction)
                for direction in (Direction.FORWARD, Direction.BACKWARD)
            ]
        return _Held(place, instance, bound, whole, inputs, weights, *paired)

    def clear(self) -> None:
        """Forget the losses of the last step."""
        self.losses.clear()

    def assert_empty(self) -> None:
        """Check that every slot was closed."""
        self._slots.assert_empty()

    # -- blocks --------------------------------------------------------------------------------------------

    def run(
        self, block: Block, received: Tensor | None, batch: MicroBatch | None, loss_scale: float
    ) -> Tensor | None:
        """Run a block on what it received; returns what the next chunk of its pass takes."""
        held = self._chunks[block.chunk]
        if block.direction is Direction.FORWARD:
            for one in held:
                received = self._forward(block, one, received, batch, loss_scale)
            return received
        if block.gradients is Gradients.WEIGHT:
            for one in reversed(held):
                self._weights(block, one)
            return None
        for one in reversed(held):
            received = self._backward(block, one, received)
        return received

    def run_pair(
        self,
        pair: Pair,
        received: tuple[Tensor | None, Tensor | None],
        batch: MicroBatch | None,
        loss_scale: float,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Run both passes of a paired block; received and returned: of the forward, of the backward pass.

        The ends of the model, and layers that have no partner, run by their own programs.
        """
        front, back = pair.forward, pair.backward
        ahead, behind = list(self._chunks[front.chunk]), list(reversed(self._chunks[back.chunk]))
        x, dy = received
        while behind and behind[0].paired_backward is None:
            dy = self._backward(back, behind.pop(0), dy)
        while ahead and ahead[0].paired_forward is None:
            x = self._forward(front, ahead.pop(0), x, batch, loss_scale)
        late: _Late | None = None
        while (
            back.gradients is Gradients.BOTH
            and ahead
            and behind
            and ahead[0].paired_forward is not None
            and behind[0].paired_backward is not None
        ):
            x, dy, late = self._layers(pair, (ahead.pop(0), behind.pop(0)), (x, dy), late, batch, loss_scale)
        if late is not None:
            self._finish(late)
        for one in behind:
            dy = self._backward(back, one, dy)
        for one in ahead:
            x = self._forward(front, one, x, batch, loss_scale)
        return x, dy

    def _layers(
        self,
        pair: Pair,
        held: tuple[_Held, _Held],
        received: tuple[Tensor | None, Tensor | None],
        late: _Late | None,
        batch: MicroBatch | None,
        loss_scale: float,
    ) -> tuple[Tensor | None, Tensor | None, _Late | None]:
        """A forward layer beside a backward layer, and what the backward layer before has put off."""
        (ahead, behind), (x, dy) = held, received
        assert ahead.paired_forward is not None
        assert behind.paired_backward is not None
        front, back = (
            self._open(pair.forward, ahead, x, batch, loss_scale),
            self._reopen(pair.backward, behind, dy),
        )
        puts_off = False
        for position, action in enumerate(self._pair):
            if isinstance(action, Barrier):
                self._streams.synchronise()
            elif isinstance(action, Compute) and action.late:
                puts_off = True
                if late is not None:
                    assert late.held.paired_backward is not None
                    late.held.paired_backward[position](late.values, late.block)
            elif action.side is Direction.FORWARD:
                ahead.paired_forward[position](front, pair.forward)
            else:
                behind.paired_backward[position](back, pair.backward)
        if late is not None:
            self._slots.close(self._slot(late.block, late.held))
        y, dx = self._result(pair.forward, ahead, front), back.pop("d.x", None)
        if puts_off:
            return y, dx, _Late(behind, back, pair.backward)
        self._slots.close(self._slot(pair.backward, behind))
        return y, dx, None

    def _finish(self, late: _Late) -> None:
        """Run what the last backward layer of a block has put off."""
        assert late.held.paired_backward is not None
        for position, action in enumerate(self._pair):
            if isinstance(action, Compute) and action.late:
                late.held.paired_backward[position](late.values, late.block)
        self._slots.close(self._slot(late.block, late.held))

    # -- passes through one part ---------------------------------------------------------------------------

    def _forward(
        self,
        block: Block,
        held: _Held,
        x: Tensor | None,
        batch: MicroBatch | None,
        loss_scale: float,
    ) -> Tensor | None:
        values = self._open(block, held, x, batch, loss_scale)
        _run(held.forward, values, block)
        return self._result(block, held, values)

    def _backward(self, block: Block, held: _Held, dy: Tensor | None) -> Tensor | None:
        """Input gradients alone leave the slot open for the weight gradients."""
        values = self._reopen(block, held, dy)
        inputs_alone = block.gradients is Gradients.INPUT
        _run(held.inputs if inputs_alone else held.backward, values, block)
        dx: Tensor | None = values.pop("d.x", None)
        if not inputs_alone:
            self._slots.close(self._slot(block, held))
        return dx

    def _weights(self, block: Block, held: _Held) -> None:
        _run(held.weights, self._slots.reopen(self._slot(block, held)), block)
        self._slots.close(self._slot(block, held))

    def _open(
        self,
        block: Block,
        held: _Held,
        x: Tensor | None,
        batch: MicroBatch | None,
        loss_scale: float,
    ) -> Values:
        """A part's slot with its inputs."""
        available = {"x": x, "loss_scale": loss_scale}
        if batch is not None:
            available |= {"tokens": batch.tokens, "targets": batch.targets}
        part = self._parts[held.instance.name]
        trains = self._schedule.trains
        graph = part.forward if trains else part.evaluation
        needed = {name for op in graph.operators for name in op.reads} | set(part.saved() if trains else ())
        values = self._slots.open(self._slot(block, held))
        values.update((name, available[name]) for name in part.inputs if name in needed)
        return values

    def _reopen(self, block: Block, held: _Held, dy: Tensor | None) -> Values:
        values = self._slots.reopen(self._slot(block, held))
        if dy is not None:
            values[f"d.{self._parts[held.instance.name].output}"] = dy
        return values

    def _result(self, block: Block, held: _Held, values: Values) -> Tensor:
        y: Tensor = values.pop(self._parts[held.instance.name].output)
        if held.instance.name == "head":
            self.losses.append(y)
        if not self._schedule.trains:
            self._slots.close(self._slot(block, held))
        return y

    @staticmethod
    def _slot(block: Block, held: _Held) -> SlotKey:
        return block.strand, block.micro_batch, block.chunk, held.place


def _run(actions: Sequence[BoundAction], values: Values, block: Block) -> None:
    for action in actions:
        action(values, block)
