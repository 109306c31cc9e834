"""The linker: from a schedule to linked code. What runs when is decided here and nowhere behind it.

A block's passes go through their units together where the schedule has a program for that combination of
units. What has no partner goes by itself: at the begin and at the end of the block, backward passes first.
What a program leaves of a backward pass is taken up by the next program that has a side for it, in the same
block or in the one that names it (``L2.1``); where there is none, it runs by itself right after.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.model.operators import Kind, Part
from braid.scheduling.model.stages import moves_of
from braid.scheduling.model.units import chunk_units
from braid.scheduling.schedule.buckets import buckets_of
from braid.scheduling.schedule.code import Body, Code, Frame, Stretch
from braid.scheduling.schedule.frames import (
    ChunkLayout,
    Placed,
    freeing,
    kept_after,
    laid_out,
    operations_of,
)
from braid.scheduling.schedule.operations import (
    Barrier,
    Clip,
    Compute,
    Hand,
    Loss,
    Message,
    Norm,
    Operation,
    Pass,
    PassKind,
    Receive,
    Reduce,
    Send,
    Start,
    Step,
    Wait,
)
from braid.scheduling.schedule.rounds import combinations, in_rounds
from braid.scheduling.schedule.schedule import (
    Block,
    Instruction,
    Prefetch,
    Program,
    Schedule,
    Side,
    Sides,
    on_side,
)
from braid.scheduling.schedule.sharing import Sharing, SharingError


class LinkError(ValueError):
    """A schedule that names what its parts do not have; ``stage`` and ``position`` say where."""

    def __init__(self, stage: int, position: int, cause: str) -> None:
        super().__init__(cause)
        self.stage, self.position = stage, position


def link(
    schedule: Schedule, layout: ParallelLayout, kinds: tuple[str, ...], parts: Mapping[str, Part]
) -> Code:
    """Unroll every stage. ``kinds``: of the model's layers; ``parts``: those of `scheduled_parts`.

    `LinkError` names the instruction.
    """
    linker = _Linker(schedule, layout, kinds, parts)
    buckets = buckets_of(parts, layout, kinds, schedule.unit_layers)
    sharing = Sharing(schedule, layout, buckets, linker.moves)
    stages = []
    for number in range(len(schedule.stages)):
        stretches = list(linker.stage(number))
        try:
            stages.append(tuple(sharing.stage(number, stretches)))
        except SharingError as error:
            raise LinkError(number, error.position, str(error)) from None
    return Code(schedule, layout, kinds, parts, tuple(stages), buckets)


@dataclass(frozen=True)
class _Left:
    """The end of a backward pass that has not run yet."""

    turn: int
    place: int
    unit: str
    program: Program
    """The program that left it, and the number of the side that takes it up."""
    side: int


@dataclass(frozen=True)
class _Unrolled:
    """A block's operations and the end that its backward passes leave, by turn."""

    body: Body
    frames: tuple[Frame, ...]
    """Of the block's passes, and of those that it hands something to."""
    left: Mapping[int, _Left]


@dataclass(frozen=True, eq=False)
class _Role:
    """What all passes of a kind through a chunk have in common."""

    chunk: ChunkLayout
    passes_on: bool
    """Whether something takes what the pass produces."""
    follower: tuple[PassKind, int] | None
    """Kind and chunk of the pass on the same stage that does."""
    alike: tuple[object, ...]
    """Equal where operations and registers are."""


@dataclass
class _Linker:
    schedule: Schedule
    layout: ParallelLayout
    kinds: tuple[str, ...]
    parts: Mapping[str, Part]
    _chunks: dict[int, ChunkLayout] = field(default_factory=dict)
    _laid_out: dict[tuple[str, ...], ChunkLayout] = field(default_factory=dict)
    """By the names of the units: equal chunks share their frame and their operators."""
    _roles: dict[tuple[PassKind, int], _Role] = field(default_factory=dict)
    _blocks: dict[tuple[object, ...], _Unrolled] = field(default_factory=dict)
    _ends_of_messages: dict[tuple[object, ...], tuple[Frame, int]] = field(default_factory=dict)
    """Frame and register that a message is sent from or received in, by what it carries."""
    _update: dict[tuple[object, ...], Body] = field(default_factory=dict)
    _begun: set[Reduce] = field(default_factory=set)
    """Sums of the stage that stand in blocks."""

    def __post_init__(self) -> None:
        kind = Kind.REDUCE_SCATTER if self.layout.zero else Kind.ALL_REDUCE
        self.moves = moves_of(kind, self.schedule.partitions, "dp")
        """Stages of sums over replicas."""
        self._by_movers: dict[Sides, list[Sides]] = {}
        self._combinations = combinations(self.schedule)
        for sides in self.schedule.programs:
            movers = tuple(side for side in sides if side.kind is not PassKind.END)
            self._by_movers.setdefault(movers, []).append(sides)

    def stage(self, stage: int) -> Iterator[Stretch]:
        """The stretches of a stage."""
        instructions = self.schedule.stages[stage]
        named = {one.whole for one in self.schedule.passes[stage] if one.kind is PassKind.END}
        ends: dict[Pass, _Left] = {}
        self._begun.clear()
        for position, instruction in enumerate(instructions):
            try:
                if isinstance(instruction, Block):
                    yield self._block(instruction, stage, named, ends)
                else:
                    yield self._other(instruction, by_bucket=isinstance(instructions[-1], Prefetch))
            except ValueError as error:
                raise LinkError(stage, position, str(error)) from None

    # -- blocks --------------------------------------------------------------------------------------------

    def _block(self, block: Block, stage: int, named: set[Pass], ends: dict[Pass, _Left]) -> Stretch:
        passes = block.passes
        roles = [self._role(one.kind, one.chunk, stage) for one in passes]
        before = {}
        for turn, one in enumerate(passes):
            if one.kind is PassKind.END:
                if one.whole not in ends:
                    raise ValueError(f"no block before it has left an end of {one.whole} for {one}")
                before[turn] = ends.pop(one.whole)
        leaves = tuple([one in named for one in passes])
        key = (
            *[role.alike for role in roles],
            leaves,
            *((turn, id(left.program), left.side, left.place) for turn, left in before.items()),
        )
        if key not in self._blocks:
            self._blocks[key] = self._unrolled(passes, roles, leaves, before)
        unrolled = self._blocks[key]
        for turn, left in unrolled.left.items():
            ends[passes[turn]] = left
        followers = [
            Pass(*role.follower[:1], one.micro_batch, role.follower[1], one.strand)
            for one, role in zip(passes, roles, strict=True)
            if role.follower is not None
        ]
        self._begun.update(block.sums)
        return Stretch(block, (*passes, *followers), unrolled.frames, unrolled.body)

    def _role(self, kind: PassKind, chunk: int, stage: int) -> _Role:
        if (kind, chunk) not in self._roles:
            one = Pass(kind, 0, chunk)
            after = one.after(self.layout) if kind.travels else None
            here = after is not None and self.layout.stage_of(after.chunk) == stage
            follower = (after.kind, after.chunk) if after is not None and here else None
            own, passes_on = self._chunk(chunk), after is not None or one.forward
            target = None if follower is None else self._chunk(follower[1])
            alike = kind, id(own), id(target), passes_on, after is None
            self._roles[kind, chunk] = _Role(own, passes_on, follower, alike)
        return self._roles[kind, chunk]

    def _unrolled(
        self,
        passes: Sequence[Pass],
        roles: Sequence[_Role],
        leaves: Sequence[bool],
        before: Mapping[int, _Left],
    ) -> _Unrolled:
        chunks = [role.chunk for role in roles]
        steps, left = self._steps(passes, chunks, leaves, before)
        operations = operations_of(steps, passes, chunks)
        keeps = []
        for turn, (one, role) in enumerate(zip(passes, roles, strict=True)):
            end = left.get(turn)
            ends = {str(op.what) for op in on_side(end.program, end.side)} if end else ()
            place = end.place if end else 0
            keeps.append(kept_after(one, role.chunk, ends, place, passes_on=role.passes_on))
        operations = freeing(operations, keeps)
        frames = [chunk.frame for chunk in chunks]
        for turn, (one, role) in enumerate(zip(passes, roles, strict=True)):
            frame, forward = role.chunk.frame, one.forward
            if forward and self.layout.is_last(one.chunk):
                operations.append(Loss(turn=turn, reads=(frame.output,), frees=(frame.output,)))
            elif role.follower is not None:
                target = self._chunk(role.follower[1]).frame
                out, into = frame.exit(forward), target.entry(forward)
                assert out is not None
                assert into is not None
                operations.append(Hand(turn=turn, reads=(out,), frees=(out,), to=len(frames), register=into))
                frames.append(target)
        return _Unrolled(Body(tuple(operations)), tuple(frames), left)

    def _steps(
        self,
        passes: Sequence[Pass],
        chunks: Sequence[ChunkLayout],
        leaves: Sequence[bool],
        before: Mapping[int, _Left],
    ) -> tuple[list[Placed], dict[int, _Left]]:
        """Programs one after the other, and the ends that are left at last."""
        movers = [turn for turn, one in enumerate(passes) if one.kind is not PassKind.END]
        units = [chunks[t].units if passes[t].forward else chunks[t].units[::-1] for t in movers]
        kinds = [passes[turn].kind for turn in movers]
        left = [replace(one, turn=turn) for turn, one in before.items()]
        steps: list[Placed] = []
        for places in in_rounds(units, kinds, self._combinations.get(tuple(kinds), set())):
            together = [(n, at) for n, at in enumerate(places) if at is not None]
            sides = self._program(tuple(Side(kinds[n], units[n][at]) for n, at in together), left)
            program = self.schedule.programs[sides]
            moving = [
                (movers[n], at if kinds[n] is PassKind.FORWARD else len(units[n]) - 1 - at)
                for n, at in together
            ]
            slots: list[tuple[int, int] | None] = []
            mover = iter(moving)
            for side in sides:
                if side.kind is not PassKind.END:
                    slots.append(next(mover))
                    continue
                taken = next((one for one in left if one.unit == side.unit), None)
                slots.append(None if taken is None else (taken.turn, taken.place))
                if taken is not None:
                    left.remove(taken)
            for one in left:  # what this program does not take up
                steps += _finish(one)
            steps += _actions(program, slots)
            left = list(self._left(sides, program, slots))
        for one in [one for one in left if not leaves[one.turn]]:
            steps += _finish(one)
            left.remove(one)
        return steps, {one.turn: one for one in left}

    def _left(
        self, sides: Sides, program: Program, slots: Sequence[tuple[int, int] | None]
    ) -> Iterator[_Left]:
        """The ends of backward passes that a program does not run."""
        for number, (side, slot) in enumerate(zip(sides, slots, strict=True)):
            end = Side(PassKind.END, side.unit)
            if slot is None or side.kind is not PassKind.BACKWARD or end not in sides:
                continue
            done = {str(op.what) for op in on_side(program, number)}
            if any(op.name not in done for op in self.parts[side.unit].backward.operators):
                yield _Left(*slot, side.unit, program, sides.index(end))

    def _program(self, movers: Sides, left: Sequence[_Left]) -> Sides:
        """The program of a combination: the one that takes up what is left, if there is one."""
        known = self._by_movers.get(movers)
        if known is None:
            raise ValueError(f"program {'|'.join(map(str, movers))} is missing")
        waiting = {one.unit for one in left}

        def rank(sides: Sides) -> tuple[bool, int]:
            ends = [side.unit for side in sides if side.kind is PassKind.END]
            fits = bool(ends) and all(unit in waiting for unit in ends)
            return not fits, len(ends)

        return min(known, key=rank)

    def _stages(self, reduce: Reduce) -> list[Reduce]:
        """What a sum that stands by itself comes to."""
        moves = self.moves if reduce.axis == "dp" and reduce.chunk is not None else ()
        return [replace(reduce, move=move) for move in moves] or [reduce]

    # -- everything else -----------------------------------------------------------------------------------

    def _other(self, instruction: Instruction, *, by_bucket: bool) -> Stretch:
        """Transfers and the update, ``by_bucket`` where gathers follow it."""
        match instruction:
            case Start(Send() | Receive() as message) | Wait(Send() | Receive() as message):
                return self._of_message(instruction, message)
            case Compute(Step()) if by_bucket:
                return Stretch(instruction, (), (), self._shared((instruction, Clip), Compute(Clip())))
            case Compute(Norm() | Step()):
                return Stretch(instruction, (), (), self._shared((instruction,), instruction))
            case Start(Reduce() as reduce):
                first = self._stages(reduce)[0]
                return Stretch(instruction, (), (), self._shared((instruction,), Start(first)))
            case Prefetch():
                return Stretch(instruction, (), (), self._shared(()))
            case Wait(Reduce() as reduce) if reduce in self._begun:
                return Stretch(instruction, (), (), self._shared(()))
            case Wait(Reduce() as reduce):
                first, *others = self._stages(reduce)
                rest = [kind(one) for one in others for kind in (Start, Wait)]
                return Stretch(instruction, (), (), self._shared((instruction,), Wait(first), *rest))
        raise ValueError(f"{instruction} does not stand by itself")

    def _shared(self, key: tuple[object, ...], *operations: Operation) -> Body:
        return self._update.setdefault(key, Body(operations))

    def _of_message(self, instruction: Start | Wait, message: Message) -> Stretch:
        """What is sent is read, and let go of at its wait; what is received has memory from its start on."""
        moved, sent = message.moved, isinstance(message, Send)
        one = moved.before(self.layout) if sent else moved
        key = moved.kind, moved.chunk, sent
        if key not in self._ends_of_messages:
            frame = None if one is None else self._chunk(one.chunk).frame
            register = None
            if frame is not None:
                register = frame.exit(moved.forward) if sent else frame.entry(moved.forward)
            if frame is None or register is None:
                raise ValueError(f"nothing for {moved} comes from another stage")
            self._ends_of_messages[key] = frame, register
        frame, register = self._ends_of_messages[key]
        at = (register,)
        if not sent:
            operation: Operation = replace(instruction, writes=at)
        elif isinstance(instruction, Start):
            operation = replace(instruction, reads=at)
        else:
            operation = replace(instruction, frees=at)
        assert one is not None
        return Stretch(instruction, (one,), (frame,), Body((operation,)))

    def _chunk(self, chunk: int) -> ChunkLayout:
        if chunk not in self._chunks:
            units = chunk_units(self.layout, self.kinds, chunk, self.schedule.unit_layers)
            names = tuple(unit.name for unit in units)
            if names not in self._laid_out:
                parts = [self.parts[name] for name in names]
                self._laid_out[names] = laid_out(parts, self.schedule.trains)
            self._chunks[chunk] = self._laid_out[names]
        return self._chunks[chunk]


def _actions(program: Program, slots: Sequence[tuple[int, int] | None]) -> Iterator[Placed]:
    """A program's operations with the turns and places of its sides; sides without a slot are left out."""
    for operation in program:
        if isinstance(operation, Barrier):
            yield operation, 0, 0
        elif (slot := slots[operation.turn]) is not None:
            yield operation, *slot


def _finish(left: _Left) -> Iterator[Placed]:
    return ((operation, left.turn, left.place) for operation in on_side(left.program, left.side))
