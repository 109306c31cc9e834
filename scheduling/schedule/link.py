"""The linker turns a schedule into code. No later stage decides what runs when.

The passes of a block advance through their units together where the schedule has a program for a combination
of units. A unit without a partner runs by itself: at the begin or at the end of the block, backward passes
first. The operators that a program leaves of a backward pass are run by the next program with a side for
them, in the same block or in the block that names them (``L2.1``), or else by themselves right after.
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
    """A schedule that names units or operators which its parts lack, at a stage and a position."""

    def __init__(self, stage: int, position: int, cause: str) -> None:
        super().__init__(cause)
        self.stage, self.position = stage, position


def link(
    schedule: Schedule, layout: ParallelLayout, kinds: tuple[str, ...], parts: Mapping[str, Part]
) -> Code:
    """Unroll every stage. ``kinds``: kinds of the model's layers; ``parts``: from `scheduled_parts`.

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
class _PendingEnd:
    """The end, not run yet, of backward pass number ``turn`` in the unit with ``index`` in its chunk."""

    turn: int
    index: int
    unit: str
    program: Program
    """The program that left the end, and the number of the side that runs it."""
    side: int


@dataclass(frozen=True)
class _Unrolled:
    """A block's operations and the ends that its backward passes leave, by turn."""

    body: Body
    frames: tuple[Frame, ...]
    """Frames of the block's passes, and of the passes that take their outputs."""
    pending: Mapping[int, _PendingEnd]


@dataclass(frozen=True, eq=False)
class _Role:
    """Facts common to all passes of a kind through a chunk."""

    chunk: ChunkLayout
    passes_on: bool
    """Whether another pass takes the output."""
    follower: tuple[PassKind, int] | None
    """Kind and chunk of the pass on the same stage that takes the output."""
    alike: tuple[object, ...]
    """Roles with equal keys have the same operations and registers."""


@dataclass
class _Linker:
    schedule: Schedule
    layout: ParallelLayout
    kinds: tuple[str, ...]
    parts: Mapping[str, Part]
    _chunks: dict[int, ChunkLayout] = field(default_factory=dict)
    _laid_out: dict[tuple[str, ...], ChunkLayout] = field(default_factory=dict)
    """Layout by the names of the units: equal chunks share frame and operators."""
    _roles: dict[tuple[PassKind, int], _Role] = field(default_factory=dict)
    _blocks: dict[tuple[object, ...], _Unrolled] = field(default_factory=dict)
    _ends_of_messages: dict[tuple[object, ...], tuple[Frame, int]] = field(default_factory=dict)
    """Frame and register that a message is sent from or received in, by (kind, chunk, whether sent)."""
    _update: dict[tuple[object, ...], Body] = field(default_factory=dict)
    _begun: set[Reduce] = field(default_factory=set)
    """Sums that blocks of the stage start."""

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
        """Return the stretches of a stage."""
        instructions = self.schedule.stages[stage]
        named = {pass_.whole for pass_ in self.schedule.passes[stage] if pass_.kind is PassKind.END}
        ends: dict[Pass, _PendingEnd] = {}
        self._begun.clear()
        for position, instruction in enumerate(instructions):
            try:
                if isinstance(instruction, Block):
                    yield self._block(instruction, stage, named, ends)
                else:
                    yield self._standalone(instruction, by_bucket=isinstance(instructions[-1], Prefetch))
            except ValueError as error:
                raise LinkError(stage, position, str(error)) from None

    # -- blocks --------------------------------------------------------------------------------------------

    def _block(self, block: Block, stage: int, named: set[Pass], ends: dict[Pass, _PendingEnd]) -> Stretch:
        passes = block.passes
        roles = [self._role(pass_.kind, pass_.chunk, stage) for pass_ in passes]
        before = {}
        for turn, pass_ in enumerate(passes):
            if pass_.kind is PassKind.END:
                if pass_.whole not in ends:
                    raise ValueError(f"no block before it has left an end of {pass_.whole} for {pass_}")
                before[turn] = ends.pop(pass_.whole)
        leaves = tuple([pass_ in named for pass_ in passes])
        key = (
            *[role.alike for role in roles],
            leaves,
            *((turn, id(end.program), end.side, end.index) for turn, end in before.items()),
        )
        if key not in self._blocks:
            self._blocks[key] = self._unrolled(passes, roles, leaves, before)
        unrolled = self._blocks[key]
        for turn, end in unrolled.pending.items():
            ends[passes[turn]] = end
        followers = [
            Pass(*role.follower[:1], pass_.micro_batch, role.follower[1], pass_.strand)
            for pass_, role in zip(passes, roles, strict=True)
            if role.follower is not None
        ]
        self._begun.update(block.sums)
        return Stretch(block, (*passes, *followers), unrolled.frames, unrolled.body)

    def _role(self, kind: PassKind, chunk: int, stage: int) -> _Role:
        if (kind, chunk) not in self._roles:
            pass_ = Pass(kind, 0, chunk)
            after = pass_.after(self.layout) if kind.travels else None
            on_stage = after is not None and self.layout.stage_of(after.chunk) == stage
            follower = (after.kind, after.chunk) if after is not None and on_stage else None
            layout, passes_on = self._chunk(chunk), after is not None or pass_.forward
            target = None if follower is None else self._chunk(follower[1])
            alike = kind, id(layout), id(target), passes_on, after is None
            self._roles[kind, chunk] = _Role(layout, passes_on, follower, alike)
        return self._roles[kind, chunk]

    def _unrolled(
        self,
        passes: Sequence[Pass],
        roles: Sequence[_Role],
        leaves: Sequence[bool],
        before: Mapping[int, _PendingEnd],
    ) -> _Unrolled:
        chunks = [role.chunk for role in roles]
        steps, pending = self._steps(passes, chunks, leaves, before)
        operations = operations_of(steps, passes, chunks)
        keeps = []
        for turn, (pass_, role) in enumerate(zip(passes, roles, strict=True)):
            end = pending.get(turn)
            ends = {str(op.what) for op in on_side(end.program, end.side)} if end else ()
            index = end.index if end else 0
            keeps.append(kept_after(pass_, role.chunk, ends, index, passes_on=role.passes_on))
        operations = freeing(operations, keeps)
        frames = [chunk.frame for chunk in chunks]
        for turn, (pass_, role) in enumerate(zip(passes, roles, strict=True)):
            frame, forward = role.chunk.frame, pass_.forward
            if forward and self.layout.is_last(pass_.chunk):
                operations.append(Loss(turn=turn, reads=(frame.output,), frees=(frame.output,)))
            elif role.follower is not None:
                target = self._chunk(role.follower[1]).frame
                out, into = frame.exit(forward), target.entry(forward)
                assert out is not None
                assert into is not None
                operations.append(Hand(turn=turn, reads=(out,), frees=(out,), to=len(frames), register=into))
                frames.append(target)
        return _Unrolled(Body(tuple(operations)), tuple(frames), pending)

    def _steps(
        self,
        passes: Sequence[Pass],
        chunks: Sequence[ChunkLayout],
        leaves: Sequence[bool],
        before: Mapping[int, _PendingEnd],
    ) -> tuple[list[Placed], dict[int, _PendingEnd]]:
        """Return the programs' steps in order, and the pending ends, by turn, that no program has run."""
        movers = [turn for turn, pass_ in enumerate(passes) if pass_.kind is not PassKind.END]
        units = [chunks[t].units if passes[t].forward else chunks[t].units[::-1] for t in movers]
        kinds = [passes[turn].kind for turn in movers]
        pending = [replace(end, turn=turn) for turn, end in before.items()]
        steps: list[Placed] = []
        for positions in in_rounds(units, kinds, self._combinations.get(tuple(kinds), set())):
            together = [(n, at) for n, at in enumerate(positions) if at is not None]
            sides = self._program(tuple(Side(kinds[n], units[n][at]) for n, at in together), pending)
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
                taken = next((end for end in pending if end.unit == side.unit), None)
                slots.append(None if taken is None else (taken.turn, taken.index))
                if taken is not None:
                    pending.remove(taken)
            for end in pending:  # ends that this program does not run
                steps += _finish(end)
            steps += _actions(program, slots)
            pending = list(self._ends_left(sides, program, slots))
        for end in [end for end in pending if not leaves[end.turn]]:
            steps += _finish(end)
            pending.remove(end)
        return steps, {end.turn: end for end in pending}

    def _ends_left(
        self, sides: Sides, program: Program, slots: Sequence[tuple[int, int] | None]
    ) -> Iterator[_PendingEnd]:
        """Yield the ends of backward passes that a program does not run."""
        for number, (side, slot) in enumerate(zip(sides, slots, strict=True)):
            end = Side(PassKind.END, side.unit)
            if slot is None or side.kind is not PassKind.BACKWARD or end not in sides:
                continue
            done = {str(op.what) for op in on_side(program, number)}
            if any(op.name not in done for op in self.parts[side.unit].backward.operators):
                yield _PendingEnd(*slot, side.unit, program, sides.index(end))

    def _program(self, movers: Sides, pending: Sequence[_PendingEnd]) -> Sides:
        """Return the program of a combination, preferably one that runs the pending ends."""
        programs = self._by_movers.get(movers)
        if programs is None:
            raise ValueError(f"program {'|'.join(map(str, movers))} is missing")
        waiting = {end.unit for end in pending}

        def rank(sides: Sides) -> tuple[bool, int]:
            ends = [side.unit for side in sides if side.kind is PassKind.END]
            fits = bool(ends) and all(unit in waiting for unit in ends)
            return not fits, len(ends)

        return min(programs, key=rank)

    def _stages(self, reduce: Reduce) -> list[Reduce]:
        """Return the stages of a sum that is an instruction of its own."""
        moves = self.moves if reduce.axis == "dp" and reduce.chunk is not None else ()
        return [replace(reduce, move=move) for move in moves] or [reduce]

    # -- instructions other than blocks --------------------------------------------------------------------

    def _standalone(self, instruction: Instruction, *, by_bucket: bool) -> Stretch:
        """Link a transfer or the update; ``by_bucket``: gathers follow, so that buckets are updated apart."""
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
                further = [kind(stage) for stage in others for kind in (Start, Wait)]
                return Stretch(instruction, (), (), self._shared((instruction,), Wait(first), *further))
        raise ValueError(f"{instruction} does not stand by itself")

    def _shared(self, key: tuple[object, ...], *operations: Operation) -> Body:
        return self._update.setdefault(key, Body(operations))

    def _of_message(self, instruction: Start | Wait, message: Message) -> Stretch:
        """Link a message: a sent value is freed at its wait, a received value has memory from its start."""
        moved, sent = message.moved, isinstance(message, Send)
        pass_ = moved.before(self.layout) if sent else moved
        key = moved.kind, moved.chunk, sent
        if key not in self._ends_of_messages:
            frame = None if pass_ is None else self._chunk(pass_.chunk).frame
            register = None
            if frame is not None:
                register = frame.exit(moved.forward) if sent else frame.entry(moved.forward)
            if frame is None or register is None:
                raise ValueError(f"nothing for {moved} comes from another stage")
            self._ends_of_messages[key] = frame, register
        frame, register = self._ends_of_messages[key]
        at = (register,)
        operation: Operation  # constructed, as `dataclasses.replace` takes ten times as long
        if isinstance(instruction, Start):
            operation = Start(message, reads=at) if sent else Start(message, writes=at)
        else:
            operation = Wait(message, frees=at) if sent else Wait(message, writes=at)
        assert pass_ is not None
        return Stretch(instruction, (pass_,), (frame,), Body((operation,)))

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
    """Yield a program's operations with turn and unit index of their sides; a side may have no slot."""
    for operation in program:
        if isinstance(operation, Barrier):
            yield operation, 0, 0
        elif (slot := slots[operation.turn]) is not None:
            yield operation, *slot


def _finish(end: _PendingEnd) -> Iterator[Placed]:
    return ((operation, end.turn, end.index) for operation in on_side(end.program, end.side))
