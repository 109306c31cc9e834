"""Turns an order of blocks into a complete `Schedule`, in steps that are pure functions."""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from braid.scheduling.generate.fixed_orders import fixed_order
from braid.scheduling.generate.named import Pipeline
from braid.scheduling.generate.partitions import with_partitions
from braid.scheduling.generate.pipelines import BlockOrder, forward_only
from braid.scheduling.generate.programs import graph_of, program_of, serial_program
from braid.scheduling.generate.setting import Setting
from braid.scheduling.generate.update import Stages, with_gathering, with_update
from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.mesh.partition import Partition
from braid.scheduling.model.operators import Part
from braid.scheduling.model.units import unit_parts
from braid.scheduling.schedule.buckets import buckets_of
from braid.scheduling.schedule.operations import Message, Pass, PassKind, Receive, Send, Start, Wait
from braid.scheduling.schedule.order import Orders, parse_orders, write_orders
from braid.scheduling.schedule.rounds import rounds, rounds_of_all
from braid.scheduling.schedule.schedule import Block, Instruction, Program, Schedule, Side, Sides, passes_in

# -- messages ------------------------------------------------------------------------------------------------


def with_transfers(order: BlockOrder, layout: ParallelLayout) -> Stages:
    """Add messages between stages to an order of blocks.

    Inputs are received before a block and outputs sent after it. The wait for an activation's send comes when
    its gradient returns; for a gradient's send, after two later blocks.
    """
    return tuple(tuple(_stage_transfers(blocks, stage, layout)) for stage, blocks in enumerate(order))


def _stage_transfers(blocks: tuple[Block, ...], stage: int, layout: ParallelLayout) -> Iterator[Instruction]:
    sent: dict[Pass, Send] = {}
    gradients: dict[int, deque[Pass]] = defaultdict(deque)
    for block in blocks:
        travelling = [pass_.whole for pass_ in block.passes if pass_.kind.travels]
        for pass_ in travelling:
            before = pass_.before(layout)
            if before is not None and layout.stage_of(before.chunk) != stage:
                received = Receive(pass_, layout.stage_of(before.chunk))
                yield Start(received)
                yield Wait(received)
                activation = before._replace(kind=PassKind.FORWARD)
                if not pass_.forward and activation in sent:
                    # The gradient is back, so the activation arrived long ago: free it without waiting.
                    yield Wait(sent.pop(activation))
        yield block
        for pass_ in travelling:
            after = pass_.after(layout)
            if after is not None and layout.stage_of(after.chunk) != stage:
                message = Send(after, layout.stage_of(after.chunk))
                if not pass_.forward:
                    # No answer follows a gradient: keep only the sends of two blocks under way.
                    channel = gradients[message.stage]
                    if len(channel) >= 2 * sum(not moved.forward for moved in travelling):
                        yield Wait(sent.pop(channel.popleft()))
                    channel.append(after)
                yield Start(message)
                sent[after] = message
    for message in sent.values():
        yield Wait(message)


def with_early_receives(stages: Stages, ahead: int = 1) -> Stages:
    """Return the stages with every receive started ``ahead`` blocks before the block that needs it.

    gloo and NCCL move a message only once both sides have asked for it: a receive that starts when its result
    is needed exposes the whole message, however long ago it was sent. If a block needs several messages of
    one kind, only the first starts early: a rank that asked for the second would wait for it, while its peer,
    whose messages go the other way, would do the same.
    """
    moved = []
    for stage in stages:
        instructions: list[Instruction] = []
        blocks: list[int] = []  # positions of the last blocks
        asked: set[tuple[PassKind, int]] = set()
        for instruction in stage:
            match instruction:
                case Start(Receive() as receive) if blocks and _way(receive) not in asked:
                    asked.add(_way(receive))
                    instructions.insert(blocks[0], instruction)
                    blocks = [position + 1 for position in blocks]
                    continue
            if isinstance(instruction, Block):
                blocks = [*blocks, len(instructions)][-ahead:]
                asked.clear()
            instructions.append(instruction)
        moved.append(tuple(instructions))
    return tuple(moved)


def _way(receive: Receive) -> tuple[PassKind, int]:
    """Return (kind of the pass that takes the message, sending stage), which messages of one kind share."""
    return receive.moved.kind, receive.stage


@lru_cache(maxsize=4)
def _travelling(pipeline: Pipeline, layout: ParallelLayout, micro_batches: int, hop: int) -> Stages:
    """Return a pipeline's blocks with messages; cached, since messages do not depend on what passes
    compute."""
    order = pipeline.order(layout, micro_batches, hop)
    return with_early_receives(with_transfers(order, layout), max(1, (hop or pipeline.hops[0]) - 1))


# -- programs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Decisions of planning that a `Setting` does not contain: the orders of operators. By default none."""

    orders: Orders = field(default_factory=dict)
    """Passes of a program -> order in which it issues operators. An unpaired pass without an order is
    serial."""

    @classmethod
    def from_plain(cls, content: Any, where: str) -> "Choices":
        """Parse the choices from a plan's YAML content; ``where`` is named in errors."""
        return cls(orders=parse_orders(content.get("orders", {}), f"{where}.orders"))

    def to_plain(self) -> dict[str, Any]:
        """Return the choices in the plain form in which a plan stores them."""
        return {"orders": write_orders(self.orders)}


def scheduled_parts(
    members: Mapping[str, Part],
    layout: ParallelLayout,
    kinds: tuple[str, ...],
    *,
    unit_layers: int = 0,
    partitions: Sequence[Partition] = (),
) -> dict[str, Part]:
    """Return the graphs that a schedule's programs run, by name.

    ``members``: parts of the model; ``partitions`` are applied to them, and then they are joined to units.
    """
    return unit_parts(with_partitions(members, partitions, layout), layout, kinds, unit_layers)


def training_schedule(
    setting: Setting, parts: Mapping[str, Part], choices: Choices | None = None
) -> Schedule:
    """Lower a setting to the schedule of a training step.

    ``parts``: the result of `scheduled_parts`. Raises `ValueError` if ``choices`` lacks a decision that the
    schedule needs, or does not fit the model and layout.
    """
    kind, layout = setting.kind, setting.layout
    stages = _travelling(setting.order, layout, setting.micro_batches, setting.hop)
    schedule = Schedule(
        name=setting.title,
        chunks=layout.chunks,
        micro_batches=setting.micro_batches,
        stages=stages,
        programs=_programs(setting, stages, parts, choices or Choices()),
        unit_layers=setting.unit_layers,
        partitions=setting.partitions,
        prefetch=setting.distances[0],
        keep=setting.distances[1],
    )
    schedule = with_ends(schedule, layout, setting.kinds)
    buckets = buckets_of(parts, layout, setting.kinds, setting.unit_layers)
    stages = with_update(schedule.stages, layout, buckets, early=kind.early_sums)
    return replace(schedule, stages=with_gathering(stages, layout, buckets, early=kind.early_sums))


def _programs(
    setting: Setting, stages: Stages, parts: Mapping[str, Part], choices: Choices
) -> dict[Sides, Program]:
    """Return the schedule's programs: one for each unit in each kind of unpaired pass, and one for each
    combination with a fixed or decided order."""
    kinds = {pass_.kind for stage in stages for i in stage for pass_ in passes_in(i)}
    programs: dict[Sides, Program] = {}
    for kind in (kind for kind in PassKind if kind in kinds):
        for name, part in parts.items():
            programs[Side(kind, name),] = serial_program(graph_of(part, kind))
    blocks = (passes_in(i) for stage in stages for i in stage)
    together = dict.fromkeys(tuple(p.kind for p in passes) for passes in blocks if len(passes) > 1)
    orders = dict(choices.orders)
    for sides in _meeting(setting, stages, parts):
        if not orders.get(sides) and (order := fixed_order(setting.pairs, sides, parts)) is not None:
            orders[sides] = order
    decided = set()
    for sides, order in orders.items():
        if not order:
            continue  # an empty order in a plan: none is needed
        movers = tuple(side.kind for side in sides if side.kind is not PassKind.END)
        if len(movers) == 1 or movers in together:
            programs[sides] = program_of(sides, parts, order)
            decided.add(movers)
    if any(len(set(movers)) > 1 and movers not in decided for movers in together):
        raise ValueError(
            f"overlap.schedule={setting.schedule} needs a pairing: measure the run with `braid profile`, or "
            f"make a plan with `braid plan --output plan.yaml` and set overlap.plan"
        )
    return programs


def _meeting(setting: Setting, stages: Stages, parts: Mapping[str, Part]) -> Iterator[Sides]:
    """Yield the combinations of layer-containing units that blocks of several passes run together."""
    kinds, units = setting.kinds, [name for name, part in parts.items() if part.has_layers]
    rounds_of = rounds_of_all(units, setting.layout, kinds, setting.unit_layers)
    for instruction in (i for stage in stages for i in stage if isinstance(i, Block)):
        yield from (sides for sides in rounds_of(instruction) if len(sides) > 1)


def with_ends(schedule: Schedule, layout: ParallelLayout, kinds: tuple[str, ...]) -> Schedule:
    """Return the schedule with ends of backward passes added to the blocks that run them.

    A block runs the end that an earlier block leaves if only messages stand between the two blocks, and if
    the schedule has its first program with the end; that program is the earlier block's last one, or the
    program of an unpaired backward pass.
    """
    if not any(side.kind is PassKind.END for sides in schedule.programs for side in sides):
        return schedule
    rounds_of, stages = rounds(schedule, layout, kinds), []
    for stage in schedule.stages:
        instructions: list[Instruction] = []
        pending: tuple[Pass, Sides] | None = None
        for instruction in stage:
            if isinstance(instruction, Block):
                programs = rounds_of(instruction)
                if pending is not None and _takes_up(schedule, programs[0], pending[1]):
                    passes = (*instruction.passes, pending[0]._replace(kind=PassKind.END))
                    instruction = replace(instruction, passes=passes)
                pending = _leaves(schedule, instruction, programs[-1])
            elif not isinstance(instruction, Start | Wait) or not isinstance(instruction.what, Message):
                pending = None
            instructions.append(instruction)
        stages.append(tuple(instructions))
    return replace(schedule, stages=tuple(stages))


def _end_of(sides: Sides) -> Side | None:
    """Return the side that would run the end of a program's backward pass; None if it has no such pass."""
    back = next((side for side in sides if side.kind is PassKind.BACKWARD), None)
    return None if back is None else Side(PassKind.END, back.unit)


def _takes_up(schedule: Schedule, first: Sides, last: Sides) -> bool:
    end = _end_of(last)
    assert end is not None
    alone = first == (Side(PassKind.BACKWARD, end.unit),)
    return (*first, end) in schedule.programs and (first == last or alone)


def _leaves(schedule: Schedule, block: Block, last: Sides) -> tuple[Pass, Sides] | None:
    """Return (backward pass, ``last``) if the block's last program leaves the pass's end unrun, else None."""
    end = _end_of(last)
    whole = last in schedule.programs
    if len(last) < 2 or end is None or whole or (*last, end) not in schedule.programs:
        return None
    return next(p for p in block.passes if p.kind is PassKind.BACKWARD), last


def validation_schedule(
    layout: ParallelLayout, kinds: tuple[str, ...], micro_batches: int, parts: Mapping[str, Part]
) -> Schedule:
    """Return the schedule of a validation step: only forward passes, on the layout used for training.

    ``kinds``: kind of each model layer, with its degree and policy; ``parts``: the layers by these kinds.
    """
    forward = PassKind.FORWARD
    stages = with_early_receives(with_transfers(forward_only(layout, micro_batches), layout))
    return Schedule(
        name="validation",
        chunks=layout.chunks,
        micro_batches=micro_batches,
        stages=with_gathering(stages, layout, buckets_of(parts, layout, kinds)),
        programs={
            (Side(forward, name),): serial_program(graph_of(part, forward, trains=False))
            for name, part in parts.items()
        },
    )
