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
from braid.scheduling.schedule.code import Code, Frame, Stretch
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
from braid.scheduling.schedule.sharing import LinkError, Sharing


def link(
    schedule: Schedule, layout: ParallelLayout, kinds: tuple[str, ...], parts: Mapping[str, Part]
) -> Code:
    """Turn a schedule into code: the list of operations of every stage.

    ``kinds``: kind of each model layer; ``parts``: the units that programs run, by name (`scheduled_parts`).
    Raises `LinkError` that names the instruction.
    """
    linker = _Linker(schedule, layout, kinds, parts)
    buckets = buckets_of(parts, layout, kinds, schedule.unit_layers)
    sharing = Sharing(schedule, layout, buckets, linker.moves)
    stages = []
    for number in range(len(schedule.stages)):
        stages.append(tuple(sharing.stage(number, list(linker.stage(number)))))
    return Code(schedule, layout, kinds, parts, tuple(stages), buckets)


@dataclass(frozen=True)
class _PendingEnd:
    """Operators that backward pass ``turn`` of a block has left unrun in the unit ``index`` of its chunk."""

    turn: int
    index: int
    unit: str
    program: Program
    """The program that left these operators; its side number ``side`` lists them."""
    side: int


@dataclass(frozen=True)
class _Unrolled:
    """A linked block: its operations, and the ends that its backward passes leave, by pass number."""

    operations: tuple[Operation, ...]
    frames: tuple[Frame, ...]
    """Frames of the block's passes, then of the passes on this stage that take their outputs."""
    pending: Mapping[int, _PendingEnd]


@dataclass(frozen=True, eq=False)
class _Role:
    """Properties that all passes of one kind through one chunk have in common."""

    chunk: ChunkLayout
    passes_on: bool
    """Whether the pass's output outlives its block, because another pass or the loss takes it."""
    follower: tuple[PassKind, int] | None
    """Kind and chunk of the pass that takes the output, if it runs on the same stage; else None."""
    alike: tuple[object, ...]
    """Key: passes whose roles have equal keys have the same operations and registers."""


@dataclass
class _Linker:
    schedule: Schedule
    layout: ParallelLayout
    kinds: tuple[str, ...]
    parts: Mapping[str, Part]
    _chunks: dict[int, ChunkLayout] = field(default_factory=dict)
    _laid_out: dict[tuple[str, ...], ChunkLayout] = field(default_factory=dict)
    """Names of a chunk's units -> its layout; equal chunks share frame and operators."""
    _roles: dict[tuple[PassKind, int], _Role] = field(default_factory=dict)
    _blocks: dict[tuple[object, ...], _Unrolled] = field(default_factory=dict)
    _ends_of_messages: dict[tuple[object, ...], tuple[tuple[Frame], tuple[int]]] = field(default_factory=dict)
    """(pass kind, chunk, whether sent) -> frame and register that a message is sent from or received in."""
    _begun: set[Reduce] = field(default_factory=set)
    """Gradient sums that the stage's blocks have started so far."""

    def __post_init__(self) -> None:
        kind = Kind.REDUCE_SCATTER if self.layout.zero else Kind.ALL_REDUCE
        self.moves = moves_of(kind, self.schedule.partitions, "dp")
        """Stages into which gradient sums over ``dp`` are split; empty if they run whole."""
        self._by_movers: dict[Sides, list[Sides]] = {}
        self._combinations = combinations(self.schedule)
        for sides in self.schedule.programs:
            movers = tuple(side for side in sides if side.kind is not PassKind.END)
            self._by_movers.setdefault(movers, []).append(sides)

    def stage(self, stage: int) -> Iterator[Stretch]:
        """Yield the linked instructions of a stage, in order."""
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
        return Stretch(block, (*passes, *followers), unrolled.frames, unrolled.operations)

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
        return _Unrolled(tuple(operations), tuple(frames), pending)

    def _steps(
        self,
        passes: Sequence[Pass],
        chunks: Sequence[ChunkLayout],
        leaves: Sequence[bool],
        before: Mapping[int, _PendingEnd],
    ) -> tuple[list[Placed], dict[int, _PendingEnd]]:
        """Return the steps of a block's programs in order, and the ends that the block leaves, by pass
        number.

        ``leaves``: per pass, whether a later block runs its end; ``before``: ends of earlier blocks to run.
        """
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
            for end in pending:  # operators left earlier, which this program does not run
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
        """Yield the operators of backward passes that a program leaves to a later program.

        ``slots``: per side, (pass number, index of the unit), or None for a side with nothing to run.
        """
        for number, (side, slot) in enumerate(zip(sides, slots, strict=True)):
            end = Side(PassKind.END, side.unit)
            if slot is None or side.kind is not PassKind.BACKWARD or end not in sides:
                continue
            done = {str(op.what) for op in on_side(program, number)}
            if any(op.name not in done for op in self.parts[side.unit].backward.operators):
                yield _PendingEnd(*slot, side.unit, program, sides.index(end))

    def _program(self, movers: Sides, pending: Sequence[_PendingEnd]) -> Sides:
        """Return the key of the program for these passes and units, preferably one that runs ``pending``."""
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
        """Return the stages into which a sum that stands outside blocks is split."""
        moves = self.moves if reduce.axis == "dp" and reduce.chunk is not None else ()
        return [replace(reduce, move=move) for move in moves] or [reduce]

    # -- instructions other than blocks --------------------------------------------------------------------

    def _standalone(self, instruction: Instruction, *, by_bucket: bool) -> Stretch:
        """Link an instruction other than a block.

        ``by_bucket``: the stage ends with gathers for the next step, so that each bucket is updated
        separately.
        """
        operations: tuple[Operation, ...] = ()
        match instruction:
            case Start(Send() | Receive() as message) | Wait(Send() | Receive() as message):
                return self._of_message(instruction, message)
            case Compute(Step()) if by_bucket:
                operations = (Compute(Clip()),)
            case Compute(Norm() | Step()):
                operations = (instruction,)
            case Start(Reduce() as reduce):
                operations = (Start(self._stages(reduce)[0]),)
            case Wait(Reduce() as reduce) if reduce not in self._begun:
                first, *others = self._stages(reduce)
                operations = (Wait(first), *(kind(stage) for stage in others for kind in (Start, Wait)))
            case Wait(Reduce()) | Prefetch():
                pass  # blocks hold its operations
            case _:
                raise ValueError(f"{instruction} does not stand by itself")
        return Stretch(instruction, (), (), operations)

    def _of_message(self, instruction: Start | Wait, message: Message) -> Stretch:
        """Link the start or wait of a message.

        A sent value is freed at its wait; a received value has memory from its start.
        """
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
            self._ends_of_messages[key] = (frame,), (register,)
        frames, at = self._ends_of_messages[key]
        operation: Operation  # constructed, as `dataclasses.replace` takes ten times as long
        if isinstance(instruction, Start):
            operation = Start(message, reads=at) if sent else Start(message, writes=at)
        else:
            operation = Wait(message, frees=at) if sent else Wait(message, writes=at)
        assert pass_ is not None
        return Stretch(instruction, (pass_,), frames, (operation,))

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
    """Yield a program's operations, each with its pass number in the block and the index of its unit.

    ``slots``: these two numbers for every side of the program; sides with None are skipped.
    """
    for operation in program:
        if isinstance(operation, Barrier):
            yield operation, 0, 0
        elif (slot := slots[operation.turn]) is not None:
            yield operation, *slot


def _finish(end: _PendingEnd) -> Iterator[Placed]:
    return ((operation, end.turn, end.index) for operation in on_side(end.program, end.side))
