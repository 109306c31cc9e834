"""Second half of the linker: inserts transfers between replicas among the operations of a stage.

Sums of gradients, gathers of parameters, and the allocation and release of their memory are inserted bucket
by bucket. A *use* of a bucket is a run of operators that read its parameters; gathers and releases are
positioned by counting uses over the whole stage, so that they reach from one block into others.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.mesh.mesh import is_tensor
from braid.scheduling.model.operators import Kind, Phase
from braid.scheduling.model.parameters import Parameters
from braid.scheduling.model.stages import Move, moves_of
from braid.scheduling.schedule.buckets import BucketKey, Buckets, BucketSpec, shard_axes
from braid.scheduling.schedule.code import Stretch
from braid.scheduling.schedule.operations import (
    Allocate,
    Compute,
    Gather,
    Node,
    Operation,
    Reduce,
    Release,
    Start,
    Update,
    Wait,
)
from braid.scheduling.schedule.schedule import Block, Prefetch, Schedule


class LinkError(ValueError):
    """Error in linking: the instruction at ``position`` of ``stage`` cannot be turned into operations."""

    def __init__(self, stage: int, position: int, cause: str) -> None:
        super().__init__(cause)
        self.stage, self.position = stage, position


class _Touch(NamedTuple):
    """Range of operations, ``first`` to ``last``, in a body that uses a bucket: consecutive operators that
    read its parameters, or all operators that add to its gradients."""

    key: BucketKey
    first: int
    last: int


@dataclass(frozen=True)
class _Touches:
    reads: tuple[_Touch, ...]
    adds: Mapping[BucketKey, _Touch]


class _PlacedTouch(NamedTuple):
    """A use of a bucket in the stretch that has ``position`` in the stage's list."""

    position: int
    touch: _Touch


_Insertion = tuple[Callable[..., Operation], Gather | Reduce | Update]
_Insertions = dict[int, list[_Insertion]]
"""Index of an operation in a body -> operations to insert before it."""
_Inserted = defaultdict[int, _Insertions]
"""Position of a stretch in its stage -> operations to insert into its body."""


@dataclass
class Sharing:
    """Inserts gradient sums, parameter gathers and releases into the code of stages; equal code is shared."""

    schedule: Schedule
    layout: ParallelLayout
    buckets: Buckets
    moves: tuple[Move, ...]
    """Stages into which gradient sums over ``dp`` are split; empty if they run whole."""
    _touches: dict[tuple[object, ...], _Touches] = field(default_factory=dict)
    _bodies: dict[tuple[object, ...], tuple[Operation, ...]] = field(default_factory=dict)
    _operations: dict[_Insertion, Operation] = field(default_factory=dict)
    _bases: list[tuple[Operation, ...]] = field(default_factory=list)
    """Operations whose ids are keys of the caches; the list keeps them alive, so that ids stay valid."""

    def stage(self, stage: int, stretches: Sequence[Stretch]) -> Iterator[Stretch]:
        """Yield a stage's stretches with the transfers inserted.

        Raises `LinkError` if the schedule does not gather parameters that a block needs.
        """
        inserted: _Inserted = defaultdict(lambda: defaultdict(list))
        if self.layout.zero:
            self._gathers(stage, stretches, inserted)
        self._sums(stretches, inserted)
        for position, stretch in enumerate(stretches):
            insertions = inserted.get(position, {})
            yield self._with(stretch, insertions) if any(insertions.values()) else stretch

    # -- parameters ----------------------------------------------------------------------------------------

    def _gathers(self, stage: int, stretches: Sequence[Stretch], inserted: _Inserted) -> None:
        """Insert a gather's start and wait before each use of a bucket that is not gathered at that time.

        With ZeRO 3 also insert the bucket's release behind its last use.
        """
        begin = next((n for n, s in enumerate(stretches) if isinstance(s.instruction, Prefetch)), None)
        uses = list(self._uses(stretches))
        following: dict[int, int] = {}
        seen: dict[BucketKey, int] = {}
        for number in reversed(range(len(uses))):
            key = uses[number].touch.key
            if key in seen:
                following[number] = seen[key]
            seen[key] = number
        ahead = self.schedule.prefetch if self.layout.zero > 2 else len(uses)
        keep = max(self.schedule.keep, ahead, 1)
        behind = begin is not None and begin > 0
        """Whether the stage's list ends with gathers for the beginning of the next step."""
        moves = self._gather_moves
        gathered: set[BucketKey] = set()
        for number, (position, touch) in enumerate(uses):
            block = stretches[position].instruction
            assert isinstance(block, Block)
            chunk, bucket = touch.key
            gathers = [Gather(chunk, axis, bucket) for axis in self._shared(touch.key)]
            if touch.key not in gathered:
                # A tied head reads the table of the first chunk, which need not be in the block.
                if begin is None or not block.gathers:
                    raise LinkError(stage, position, f"the parameters of chunk {chunk} are not gathered")
                early = number - ahead
                at, index = (uses[early].position, uses[early].touch.first) if early >= 0 else (begin, 0)
                if at == begin and behind:
                    inserted[at][index].append((Compute, Update(*touch.key)))
                ends = [self._ends(gather) for gather in gathers]  # empty for experts of a single rank
                inserted[at][index] += [(Start, first) for first, _ in ends]
                for nth in range(1, len(moves)):  # a stage per use; the last starts one use early
                    turn = uses[min(number, max(0, early + nth, number - len(moves) + nth))]
                    inserted[turn.position][turn.touch.first] += [
                        insertion
                        for gather in gathers
                        if gather.axis == "dp"
                        for insertion in (
                            (Wait, replace(gather, move=moves[nth - 1])),
                            (Start, replace(gather, move=moves[nth])),
                        )
                    ]
                inserted[position][touch.first] += [(Wait, last) for _, last in ends]
                gathered.add(touch.key)
            again = following.get(number)
            if self.layout.zero > 2 and (again is None or again - number > keep):
                inserted[position][touch.last + 1] += [(Release, gather) for gather in gathers]
                gathered.remove(touch.key)
        if behind:  # buckets that no operator reads are updated too
            assert begin is not None
            chunks = self.layout.chunks_of(stage)
            keys = [(chunk, number) for chunk in chunks for number in self._numbers(chunk)]
            trained = [key for key in keys if key not in gathered and self._spec(key).parameters.total]
            inserted[begin][0] += [(Compute, Update(*key)) for key in trained]

    def _uses(self, stretches: Sequence[Stretch]) -> Iterator[_PlacedTouch]:
        """Yield the uses of buckets in the order of the stage's list; without ZeRO 3, where buckets stay
        gathered, only the first use of each bucket."""
        again = self.layout.zero > 2
        seen: set[BucketKey] = set()
        for position, stretch in enumerate(stretches):
            if isinstance(stretch.instruction, Block):
                for touch in self._of(stretch).reads:
                    if again or touch.key not in seen:
                        seen.add(touch.key)
                        yield _PlacedTouch(position, touch)

    @cached_property
    def _gather_moves(self) -> tuple[Move, ...]:
        return moves_of(Kind.ALL_GATHER, self.schedule.partitions, "dp")

    def _ends(self, gather: Gather) -> tuple[Gather, Gather]:
        """Return the first and the last stage of a gather; the gather itself twice if it is not split."""
        moves = self._gather_moves if gather.axis == "dp" else ()
        return (
            (replace(gather, move=moves[0]), replace(gather, move=moves[-1])) if moves else (gather, gather)
        )

    # -- gradients -----------------------------------------------------------------------------------------

    def _sums(self, stretches: Sequence[Stretch], inserted: _Inserted) -> None:
        """Insert the start of each bucket's gradient sums behind the last operator that adds to its
        gradients, and the waits for sums that end inside the stage's list."""
        sums = _BucketSums(self.layout.zero > 1, self.schedule.prefetch, self.moves)
        for position, stretch in enumerate(stretches):
            block = stretch.instruction
            if isinstance(block, Wait) and isinstance(block.what, Reduce):
                sums.wait(inserted[position][0], block.what)
            if not isinstance(block, Block) or not (block.sums or sums.shared):
                continue
            into = inserted[position]
            adds = self._of(stretch).adds
            events: list[tuple[int, BucketKey | Reduce]] = [
                (adds[key].last + 1 if (key := _key(reduce)) in adds else 0, reduce)
                for reduce in self._by_bucket(block)
            ]
            events += [(touch.first, key) for key, touch in adds.items()]
            for index, event in sorted(events, key=lambda timed: timed[0]):  # sums before allocations
                if isinstance(event, Reduce):
                    sums.start(into[index], event)
                elif sums.shared:
                    chunk, number = event
                    axes = shard_axes(self.layout, self._spec(event).parameters)
                    sums.allocate(into[index], event, [Reduce(chunk, axis, number) for axis in axes])
            sums.end(map(_key, self._by_bucket(block)))

    def _spec(self, key: BucketKey) -> BucketSpec:
        chunk, number = key
        return self.buckets.of(chunk)[number]

    def _shared(self, key: BucketKey) -> list[str]:
        """Return the axes over which a bucket's parameters are gathered."""
        return shard_axes(self.layout, sum(self._spec(key).shared(self.layout), Parameters()))

    def _by_bucket(self, block: Block) -> Iterator[Reduce]:
        """Yield a block's gradient sums separately for each bucket, in the order of a backward pass."""
        for chunk in dict.fromkeys(reduce.chunk for reduce in block.sums):
            sums = [reduce for reduce in block.sums if reduce.chunk == chunk]
            for number in reversed(self._numbers(chunk)):
                if chunk is not None and self._spec((chunk, number)).parameters.total:
                    yield from (Reduce(chunk, reduce.axis, number) for reduce in sums)

    def _numbers(self, chunk: int | None) -> range:
        assert chunk is not None
        return range(len(self.buckets.of(chunk)))

    # -- bodies --------------------------------------------------------------------------------------------

    def _of(self, stretch: Stretch) -> _Touches:
        chunks = [pass_.chunk for pass_ in stretch.block_passes]
        key = (id(stretch.operations), *chunks)
        if key not in self._touches:
            self._bases.append(stretch.operations)
            self._touches[key] = self._find(stretch.operations, chunks)
        return self._touches[key]

    def _find(self, operations: Sequence[Operation], chunks: Sequence[int]) -> _Touches:
        reads: list[_Touch] = []
        adds: dict[BucketKey, _Touch] = {}
        for index, operation in enumerate(operations):
            if not isinstance(operation, Compute) or not isinstance(operation.what, Node):
                continue
            node = operation.what
            key = self.buckets.home(chunks[operation.turn], node.part, node.operator.module)
            if key is None:
                continue
            if node.operator.phase is not Phase.WEIGHT_GRADIENT or self.buckets.read_late:
                first = reads.pop().first if reads and reads[-1].key == key else index
                reads.append(_Touch(key, first, index))
            if node.operator.adds_gradients:
                adds[key] = _Touch(key, adds[key].first if key in adds else index, index)
        shared = {
            key for key, _, _ in reads if any(each.total for each in self._spec(key).shared(self.layout))
        }
        return _Touches(tuple(touch for touch in reads if touch.key in shared), adds)

    def _with(self, stretch: Stretch, inserted: _Insertions) -> Stretch:
        key = (id(stretch.operations), *((at, *inserted[at]) for at in sorted(inserted)))
        if key not in self._bodies:
            self._bases.append(stretch.operations)
            operations: list[Operation] = []
            for index, operation in enumerate((*stretch.operations, None)):
                ordered = sorted(inserted.get(index, ()), key=_turn)
                operations += [self._operation(kind, what) for kind, what in ordered]
                operations += [] if operation is None else [operation]
            self._bodies[key] = tuple(operations)
        return stretch._replace(operations=self._bodies[key])

    def _operation(self, kind: Callable[..., Operation], what: Gather | Reduce | Update) -> Operation:
        if (kind, what) not in self._operations:
            self._operations[kind, what] = kind(what)
        return self._operations[kind, what]


def _key(reduce: Reduce) -> BucketKey:
    assert reduce.chunk is not None
    assert reduce.bucket is not None
    return reduce.chunk, reduce.bucket


@dataclass
class _BucketSums:
    """State of a stage's bucket sums: which are under way, and which buckets have gradients not summed so
    far.

    If gradients are sharded (``shared``, ZeRO 2), whole gradients have memory from the first operator that
    adds to them until their sum is waited for, and at most ``most`` sums are under way.
    """

    shared: bool
    most: int
    moves: tuple[Move, ...]
    """Stages into which gradient sums over ``dp`` are split; empty if they run whole."""
    _unsummed: set[BucketKey] = field(default_factory=set)
    """Buckets to whose gradients operators have added since their last sum."""
    _under_way: list[Reduce] = field(default_factory=list)
    _next: dict[Reduce, Reduce] = field(default_factory=dict)
    """Sum -> sum that starts when the first is complete: its next stage, or (hybrid sharding) the sum of the
    shards over ``replica``."""

    def start(self, into: list[_Insertion], reduce: Reduce) -> None:
        """Insert the start of a bucket's sum into ``into``, after waits that must come first."""
        if reduce.axis == "replica":
            before = next((r for r in self._under_way if _key(r) == _key(reduce)), None)
            if before is not None:
                while before in self._next:
                    before = self._next[before]
                self._next[before] = reduce
            else:
                into.append((Start, reduce))
                self._under_way.append(reduce)
            return
        if self.shared and _key(reduce) not in self._unsummed:
            return
        if is_tensor(reduce.axis):
            into += [(Start, reduce), (Wait, reduce)]
            return
        while self.shared and self._under_way and len(self._under_way) >= max(1, self.most):
            self._finish(into, self._under_way[:1])
        first = [r for r in self._under_way if r in self._next]
        inside = [r for r in first if r.move is not None and r.move.factor.inside]
        others = [r for r in first if r not in inside]
        for unfinished in (*inside, *others[:-1]):  # between nodes, the last has hardly begun
            self._wait(into, unfinished)
        stages = [replace(reduce, move=move) for move in self.moves if reduce.axis == "dp"] or [reduce]
        self._next.update(pairwise(stages))
        into.append((Start, stages[0]))
        self._under_way.append(stages[0])
        if self.shared and not self.most:
            self._finish(into, [stages[0]])

    def _wait(self, into: list[_Insertion], reduce: Reduce) -> None:
        """Insert the wait for a sum, and the start of the sum that follows it (`_next`)."""
        self._under_way.remove(reduce)
        into.append((Wait, reduce))
        if (following := self._next.pop(reduce, None)) is not None:
            into.append((Start, following))
            self._under_way.append(following)

    def _finish(self, into: list[_Insertion], sums: list[Reduce]) -> None:
        """Insert the waits for sums and all their further stages; stages of different sums alternate."""
        while sums:
            reduce, *sums = sums
            last = reduce.move is None or reduce.move.last
            self._wait(into, reduce)
            if not last:
                sums.append(self._under_way[-1])

    def end(self, summed: Iterable[BucketKey]) -> None:
        """Record that a block has started the sums of these buckets."""
        self._unsummed.difference_update(summed)

    def wait(self, into: list[_Insertion], whole: Reduce) -> None:
        """Insert the waits for all sums under way that belong to the chunk and axis of ``whole``."""
        along = [r for r in self._under_way if (r.chunk, r.axis) == (whole.chunk, whole.axis)]
        self._finish(into, along)

    def allocate(self, into: list[_Insertion], key: BucketKey, sums: list[Reduce]) -> None:
        """Insert the allocation of a bucket's gradients, unless they have memory already.

        ``sums``: the bucket's sums over axes that shard it, one allocation for each.
        """
        if key in self._unsummed:
            return
        self._unsummed.add(key)
        self._finish(into, [r for r in self._under_way if _key(r) == key])
        into += [(Allocate, reduce) for reduce in sums]


def _turn(insertion: _Insertion) -> int:
    """Return the sort key of an insertion among all insertions at one index.

    The order is: releases, updates and starts of gathers, sums, stages of gathers, waits.
    """
    kind, what = insertion
    if isinstance(what, Reduce):
        return 2
    if isinstance(what, Gather) and what.move is not None:  # between two stages
        if kind is Wait and not what.move.last:
            return 3
        if kind is Start and what.move.number:
            return 3
    turns: dict[object, int] = {Release: 0, Compute: 1, Start: 1, Wait: 4}
    return turns[kind]
