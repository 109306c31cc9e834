"""Runs blocks: one pass of one micro-batch over one chunk, or two of different strands at the same time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from braid.actors.stage.bindings import Binder, BoundAction
from braid.actors.stage.model import PartInstance, StageModel
from braid.actors.stage.slots import SlotKey, Slots, Values
from braid.actors.stage.streams import Streams
from braid.scheduling.fusion import pair_up
from braid.scheduling.operators import Part
from braid.scheduling.schedule import (
    Barrier,
    Block,
    Direction,
    Gradients,
    Pair,
    PairKey,
    PairProgram,
    Schedule,
    Twin,
    Twins,
    is_late,
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
    end: tuple[tuple[bool, BoundAction], ...] = ()
    """The backward pass with what it does for the one before it, if it can: whose action, and the action."""
    inputs: tuple[BoundAction, ...] = ()
    weights: tuple[BoundAction, ...] = ()
    paired: Mapping[tuple[Direction, PairKey], Mapping[int, BoundAction]] = field(default_factory=dict)
    """By pass and paired program: actions by their positions in the program."""
    twins: Mapping[Direction, Mapping[Twin, Mapping[int, BoundAction]]] = field(default_factory=dict)
    """By pass, for the passes that go together: the same of each micro-batch."""


@dataclass
class _Late:
    """A backward run whose late operators have not run yet."""

    held: _Held
    values: Values
    block: Block
    key: PairKey
    """The paired program that put them off."""


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
        self._puts_off = {key: any(map(is_late, program)) for key, program in schedule.pairs.items()}
        self._late: _Late | None = None
        self._chunks = {
            chunk: tuple(
                self._hold(binder, place, instance)
                for place, instance in enumerate(model.runs(chunk, schedule.fused))
            )
            for chunk in model.chunks
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
        end: tuple[tuple[bool, BoundAction], ...] = ()
        if any(map(is_late, backward)):
            before = next(program for (_, own), program in schedule.pairs.items() if own == name)
            left, rest = binder.bind_end(backward, before, part, instance), iter(whole)
            end = tuple((n in left, left[n] if n in left else next(rest)) for n in range(len(backward)))
        inputs: tuple[BoundAction, ...] = ()
        weights: tuple[BoundAction, ...] = ()
        if schedule.splits:
            first = schedule.splits[name, Gradients.INPUT]
            second = schedule.splits[name, Gradients.WEIGHT]
            inputs, weights = binder.bind_split(first, second, part, instance)
        paired = {
            (direction, key): binder.bind_side(program, part, instance, direction, direction)
            for key, program in schedule.pairs.items()
            for direction, own in zip((Direction.FORWARD, Direction.BACKWARD), key, strict=True)
            if own == name
        }
        twins = {
            direction: {side: binder.bind_side(program, part, instance, direction, side) for side in Twin}
            for (own, direction), program in schedule.twins.items()
            if own == name
        }
        return _Held(place, instance, bound, whole, end, inputs, weights, paired, twins)

    def names(self, block: Block) -> list[str]:
        """The parts or runs of a block in the order of its pass."""
        names = [held.instance.name for held in self._chunks[block.chunk]]
        return names if block.direction is Direction.FORWARD else names[::-1]

    def clear(self) -> None:
        """Forget the losses of the last step."""
        self.losses.clear()

    def assert_empty(self) -> None:
        """Check that every slot was closed."""
        self._slots.assert_empty()

    def held(self) -> list[object]:
        """All values in slots but tokens and targets, which belong to the batch."""
        return self._slots.values()

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
        *,
        keeps_late: bool = False,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Run both passes of a paired block; received and returned: of the forward, of the backward pass.

        Runs that have no partner go by their own programs. ``keeps_late``: what the last run puts off is left
        to the block that follows.
        """
        front, back = pair.forward, pair.backward
        ahead, behind = self._chunks[front.chunk], self._chunks[back.chunk][::-1]
        x, dy = received
        pairs = self._schedule.pairs if back.gradients is Gradients.BOTH else {}
        for i, j in pair_up(self.names(front), self.names(back), pairs):
            if i is not None and j is not None:
                x, dy = self._together(pair, (ahead[i], behind[j]), (x, dy), batch, loss_scale)
                continue
            self._finish()
            if j is not None:
                dy = self._backward(back, behind[j], dy)
            if i is not None:
                x = self._forward(front, ahead[i], x, batch, loss_scale)
        if not keeps_late:
            self._finish()
        return x, dy

    def run_twins(
        self,
        twins: Twins,
        received: tuple[Tensor | None, Tensor | None],
        batches: tuple[MicroBatch | None, MicroBatch | None],
        loss_scale: float,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Run the same pass of two micro-batches; runs without a program for both, one after the other."""
        held, direction = self._chunks[twins.first.chunk], twins.direction
        passed = list(received)
        for one in held if direction is Direction.FORWARD else held[::-1]:
            program = self._schedule.twins.get((one.instance.name, direction))
            if program is not None:
                passed = self._side_by_side(twins, one, program, passed, batches, loss_scale)
                continue
            for n, block in enumerate(twins.blocks):
                if direction is Direction.FORWARD:
                    passed[n] = self._forward(block, one, passed[n], batches[n], loss_scale)
                else:
                    passed[n] = self._backward(block, one, passed[n])
        return passed[0], passed[1]

    def _side_by_side(
        self,
        twins: Twins,
        held: _Held,
        program: PairProgram,
        received: Sequence[Tensor | None],
        batches: tuple[MicroBatch | None, MicroBatch | None],
        loss_scale: float,
    ) -> list[Tensor | None]:
        """One run's pass of both micro-batches, by the program for it."""
        forward = twins.direction is Direction.FORWARD
        values = [
            self._open(block, held, x, batch, loss_scale) if forward else self._reopen(block, held, x)
            for block, x, batch in zip(twins.blocks, received, batches, strict=True)
        ]
        places = dict(zip(Twin, zip(values, twins.blocks, strict=True), strict=True))
        bound = held.twins[twins.direction]
        for position, action in enumerate(program):
            assert not isinstance(action, Barrier)
            assert isinstance(action.side, Twin)
            bound[action.side][position](*places[action.side])
        results: list[Tensor | None] = []
        for block, own in zip(twins.blocks, values, strict=True):
            if forward:
                results.append(self._result(block, held, own))
            else:
                results.append(own.pop("d.x", None))
                self._slots.close(self._slot(block, held))
        return results

    def _together(
        self,
        pair: Pair,
        held: tuple[_Held, _Held],
        received: tuple[Tensor | None, Tensor | None],
        batch: MicroBatch | None,
        loss_scale: float,
    ) -> tuple[Tensor | None, Tensor | None]:
        """A forward run beside a backward run, and what the backward run before has put off."""
        (ahead, behind), (x, dy) = held, received
        key = ahead.instance.name, behind.instance.name
        if self._late is not None and self._late.key != key:
            self._finish()
        late, self._late = self._late, None
        front = self._open(pair.forward, ahead, x, batch, loss_scale)
        back = self._reopen(pair.backward, behind, dy)
        forward = ahead.paired[Direction.FORWARD, key]
        backward = behind.paired[Direction.BACKWARD, key]
        put_off = late.held.paired[Direction.BACKWARD, key] if late is not None else {}
        for position, action in enumerate(self._schedule.pairs[key]):
            if isinstance(action, Barrier):
                self._streams.synchronise()
            elif is_late(action):
                if late is not None:
                    put_off[position](late.values, late.block)
            elif action.side is Direction.FORWARD:
                forward[position](front, pair.forward)
            else:
                backward[position](back, pair.backward)
        if late is not None:
            self._slots.close(self._slot(late.block, late.held))
        y, dx = self._result(pair.forward, ahead, front), back.pop("d.x", None)
        if self._puts_off[key]:
            self._late = _Late(behind, back, pair.backward, key)
        else:
            self._slots.close(self._slot(pair.backward, behind))
        return y, dx

    def _finish(self) -> None:
        """Run what the last run has put off, if it has."""
        late, self._late = self._late, None
        if late is None:
            return
        bound = late.held.paired[Direction.BACKWARD, late.key]
        for position, action in enumerate(self._schedule.pairs[late.key]):
            if is_late(action):
                bound[position](late.values, late.block)
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
        late, self._late = self._late, None
        if late is not None:
            for (put_off, theirs), (_, ours) in zip(late.held.end, held.end, strict=True):
                if put_off:
                    theirs(late.values, late.block)
                else:
                    ours(values, block)
            self._slots.close(self._slot(late.block, late.held))
        else:
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
        if held.instance.ends_model:
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
