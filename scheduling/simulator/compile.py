"""From a schedule and a profile to what each rank does: tasks with solo times, waits, messages.

One rank stands for all ranks of its pipeline stage: they run the same list at the same time on the same
shapes, so their times are equal and collectives begin together. That is exact for meshes in which all nodes
are alike, which is what a `ClusterSpec` describes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import zip_longest

from braid.scheduling import fusion
from braid.scheduling.fusion import chunk_runs, pair_up, split_place
from braid.scheduling.memory import DTYPE_BYTES, chunk_parameters, message_bytes
from braid.scheduling.operators import Graph, Kind, Operator, Part, Stream
from braid.scheduling.profile import Profile, operator_key
from braid.scheduling.schedule import (
    Barrier,
    Block,
    Compute,
    Direction,
    Gather,
    Gradients,
    Instruction,
    Late,
    Pair,
    PairAction,
    Receive,
    Reduce,
    Schedule,
    Send,
    Side,
    Start,
    Step,
    Twin,
    Twins,
    Wait,
    WaitGather,
    WaitReceive,
    WaitReduce,
    WaitSend,
    is_late,
)
from braid.scheduling.spec import ModelShape, ParallelLayout

LAYER_LANES = ("intra", "inter")
"""Lanes of the collectives inside layers, one per stream."""


@dataclass(frozen=True)
class Task:
    """Something that takes time on a rank: an operator or a transfer."""

    key: str
    """Name in the profile, by which contention is looked up."""
    operator: str
    lane: str
    """``compute``, or the queue that a transfer waits in: its stream, ``data`` (gradients) or ``send``."""
    stream: Stream
    solo_ns: float
    bytes: int = 0
    flops: int = 0


@dataclass(frozen=True)
class Place:
    """Which pass of which layer a task belongs to, relative to its block: equal blocks share their tasks."""

    forward: bool
    position: int
    """Of the part within its chunk, in the order of the pass."""
    before: bool = False
    """Whether it belongs to the block before: a weight gradient that was put off."""
    second: bool = False
    """Whether it belongs to the second one of twins."""


@dataclass(frozen=True)
class Run:
    """Compute ``task`` on the calling rank."""

    task: Task
    place: Place | None = None


@dataclass(frozen=True)
class Issue:
    """Queue ``task`` on its lane; ``token`` names it for those who wait."""

    task: Task
    token: object
    place: Place | None = None
    busy_ns: float = 0.0
    """How long that keeps the rank from computing."""


@dataclass(frozen=True)
class Await:
    """Block until the task of that token, of this rank, has finished."""

    token: object
    busy_ns: float = 0.0
    """How long the rank then has to deal with it."""


@dataclass(frozen=True)
class AwaitMessage:
    """Block until another rank's message has arrived."""

    token: object


@dataclass(frozen=True)
class Synchronise:
    """Block until the lanes of the layers are empty, and pay for it."""

    ns: float


BlockCommand = Run | Issue | Await | Synchronise


@dataclass(frozen=True)
class Body:
    """What a kind of block does; blocks of one kind share it."""

    commands: tuple[BlockCommand, ...]


@dataclass(frozen=True)
class RunBlock:
    """Run a block, a paired block or twins (None where there is no such pass)."""

    body: Body
    forward: Block | None
    backward: Block | None
    second: Block | None = None
    """Of twins, whose first one stands in its pass's place."""


Command = RunBlock | BlockCommand | AwaitMessage


@dataclass(frozen=True)
class Job:
    """All that a simulation is made of."""

    schedule: Schedule
    layout: ParallelLayout
    shape: ModelShape
    parts: Mapping[str, Part]
    profile: Profile
    dtype: str = "bf16"
    zero: int = 0


@dataclass
class Compiler:
    """Compiles one stage after the other; tasks of equal operators and bodies of equal blocks are shared."""

    job: Job
    _tasks: dict[tuple[str, str], Task] = field(default_factory=dict)
    _bodies: dict[tuple[object, ...], Body] = field(default_factory=dict)

    def stage(self, stage: int) -> list[Command]:
        """What a rank of a stage does in one step."""
        instructions = self.job.schedule.stages[stage]
        carrying = set()
        if any(is_late(action) for program in self.job.schedule.pairs.values() for action in program):
            names = cache(lambda block: [part.name for part in held_parts(self.job, block)])
            ends = fusion.takes_up(self.job.schedule.programs)
            carrying = set(fusion.carrying(instructions, names, self.job.schedule.pairs, ends))
        commands: list[Command] = []
        carried = False
        for position, instruction in enumerate(instructions):
            if isinstance(instruction, Pair):
                keeps = position in carrying
                body = self._body(instruction.forward, instruction.backward, carried, keeps)
                commands.append(RunBlock(body, instruction.forward, instruction.backward))
                carried = keeps
            elif carried and isinstance(instruction, Block):
                commands.append(RunBlock(self._body(None, instruction, carried), None, instruction))
                carried = False
            else:
                commands += self._instruction(instruction)
        return commands

    def _twins(self, twins: Twins) -> RunBlock:
        """Run by run: both side by side where there is a program for it, else one after the other."""
        first, second = twins.blocks
        held = held_parts(self.job, first)
        key = ("twins", twins.direction, tuple(part.name for part in held))
        if key not in self._bodies:
            self._bodies[key] = Body(tuple(self._twin_commands(held, twins.direction)))
        forward = twins.direction is Direction.FORWARD
        return RunBlock(self._bodies[key], first if forward else None, None if forward else first, second)

    def _twin_commands(self, held: list[Part], direction: Direction) -> Iterator[BlockCommand]:
        schedule, forward = self.job.schedule, direction is Direction.FORWARD
        for position, part in enumerate(held):
            places = Place(forward, position), Place(forward, position, second=True)
            graph = part.forward if forward else part.backward
            program = schedule.twins.get((part.name, direction))
            if program is not None:
                yield from self._program(
                    program,
                    {side: (place, part, graph) for side, place in zip(Twin, places, strict=True)},
                )
                continue
            for place in places:
                yield from self._program(
                    schedule.programs[part.name, direction], {None: (place, part, graph)}
                )

    def _instruction(self, instruction: Instruction) -> Iterator[Command]:
        match instruction:
            case Block():
                forward = instruction.direction is Direction.FORWARD
                body = self._body(instruction if forward else None, None if forward else instruction)
                yield RunBlock(body, instruction if forward else None, None if forward else instruction)
            case Send(block):
                yield Issue(self._message(), ("message", block))
            case WaitReceive(block):
                yield AwaitMessage(("message", block))
            case WaitSend(block):
                yield Await(("message", block))
            case Reduce(chunk):
                for number, task in enumerate(self._gradients(chunk)):
                    yield Issue(task, ("reduce", chunk, number))
            case WaitReduce(chunk):
                for number in range(len(self._gradients(chunk))):
                    yield Await(("reduce", chunk, number))
            case Gather(chunk):
                for number, task in enumerate(self._parameters(chunk)):
                    yield Issue(task, ("gather", chunk, number))
            case WaitGather(chunk):
                for number in range(len(self._parameters(chunk))):
                    yield Await(("gather", chunk, number))
            case Step():
                yield Run(self._update())
            case Twins():
                yield self._twins(instruction)
            case Receive():
                pass  # a message arrives when it was sent: receives are asked for in time

    # -- blocks --------------------------------------------------------------------------------------------

    def _body(
        self, forward: Block | None, backward: Block | None, carried: bool = False, keeps: bool = False
    ) -> Body:
        """``carried``: the block before has left late operators; ``keeps``: this one leaves its own."""
        ahead = held_parts(self.job, forward) if forward else []
        behind = held_parts(self.job, backward) if backward else []
        gradients = backward.gradients if backward else None
        key = (gradients, tuple(p.name for p in ahead), tuple(p.name for p in behind), carried, keeps)
        if key not in self._bodies:
            self._bodies[key] = Body(tuple(self._commands(ahead, behind, gradients, carried, keeps)))
        return self._bodies[key]

    def _commands(
        self,
        forward: list[Part],
        backward: list[Part],
        gradients: Gradients | None,
        carried: bool,
        keeps: bool,
    ) -> Iterator[BlockCommand]:
        """One pass alone, or both: what `pair_up` pairs together, the rest by itself."""
        pairs = self.job.schedule.pairs if gradients is Gradients.BOTH else {}
        names = [part.name for part in forward], [part.name for part in backward]
        previous: tuple[Place, Part] | None = None
        order = pair_up(*names, pairs)
        last: tuple[str, str] | None = None
        if carried:
            i, j = order[0]
            assert j is not None
            last = names[0][i] if i is not None else "", names[1][j]
            previous = Place(False, len(backward) - 1, before=True), backward[j]
        for i, j in order:
            if i is not None and j is not None:
                key = names[0][i], names[1][j]
                if previous is not None and last != key:
                    yield from self._left(last, previous)
                    previous = None
                last = key
                front, back = (Place(True, i), forward[i]), (Place(False, j), backward[j])
                sides: dict[Side | None, tuple[Place, Part, Graph]] = {
                    Direction.FORWARD: (*front, front[1].forward),
                    Direction.BACKWARD: (*back, back[1].backward),
                }
                if previous is not None:
                    sides[Late.BACKWARD] = (*previous, previous[1].backward)
                yield from self._program(pairs[key], sides)
                previous = back
                continue
            late = previous if not forward else None  # which this pass takes up (`fusion.carrying`)
            if previous is not None and late is None:
                yield from self._left(last, previous)
            previous = None
            if i is not None:
                yield from self._pass(Place(True, i), forward[i], gradients)
            if j is not None:
                yield from self._pass(Place(False, j), backward[j], gradients, late)
        if previous is not None and not keeps:
            yield from self._left(last, previous)

    def _left(self, key: tuple[str, str] | None, previous: tuple[Place, Part]) -> Iterator[BlockCommand]:
        """What a paired program has put off and nothing that follows takes up."""
        assert key is not None
        late = [action for action in self.job.schedule.pairs[key] if is_late(action)]
        yield from self._program(late, {Late.BACKWARD: (*previous, previous[1].backward)})

    def _pass(
        self, place: Place, part: Part, gradients: Gradients | None, late: tuple[Place, Part] | None = None
    ) -> Iterator[BlockCommand]:
        schedule = self.job.schedule
        direction = Direction.FORWARD if place.forward else Direction.BACKWARD
        program: Sequence[PairAction] = schedule.programs[part.name, direction]
        if not place.forward and gradients in (Gradients.INPUT, Gradients.WEIGHT):
            program = schedule.splits[part.name, gradients]
        graph = part.forward if place.forward else part.backward
        sides: dict[Side | None, tuple[Place, Part, Graph]] = {None: (place, part, graph)}
        if late is not None:
            sides[Late.BACKWARD] = (*late, late[1].backward)
        yield from self._program(program, sides)

    def _program(
        self,
        program: Sequence[PairAction],
        sides: Mapping[Side | None, tuple[Place, Part, Graph]],
    ) -> Iterator[BlockCommand]:
        """``sides``: whose operators run; late ones only where the program before has left them."""
        alone: set[object] = set()
        for action, following in zip_longest(program, program[1:]):
            if isinstance(action, Barrier):
                yield Synchronise(self.job.profile.barrier_ns)
                continue
            if is_late(action) and action.side not in sides:
                continue
            place, part, graph = sides[action.side]
            token = (place, action.operator)
            match action:
                case Compute(operator):
                    yield Run(self._operator(part, graph, operator), place)
                case Start(operator):
                    if following == Wait(operator, action.side):
                        alone.add(token)
                        yield Issue(self._operator(part, graph, operator), token, place)
                    else:
                        yield self._beside(part, graph, operator, token, place)
                case Wait(operator):
                    yield Await(token, 0.0 if token in alone else self._taking(part, graph, operator))

    def _beside(self, part: Part, graph: Graph, name: str, token: object, place: Place) -> Issue:
        """A collective that something runs beside: what the rank itself does for it is no part of it."""
        task = self._operator(part, graph, name)
        key = (part.name, f"{name} beside")
        if key not in self._tasks:
            own = max(0.0, task.solo_ns - self._taking(part, graph, name))
            self._tasks[key] = replace(task, solo_ns=own)
        return Issue(self._tasks[key], token, place, float(self.job.profile.issue_ns.get(task.key, 0)))

    def _taking(self, part: Part, graph: Graph, name: str) -> float:
        return float(self.job.profile.take_ns.get(operator_key(part.name, graph.named(name)), 0))

    def _operator(self, part: Part, graph: Graph, name: str) -> Task:
        key = (part.name, name)
        if key not in self._tasks:
            op: Operator = graph.named(name)
            lane = op.stream.value
            width = DTYPE_BYTES[self.job.dtype]
            self._tasks[key] = Task(
                operator_key(part.name, op),
                name,
                lane,
                op.stream,
                float(self.job.profile.operator_ns(part.name, op)),
                op.bytes * width // 2,
                op.flops,
            )
        return self._tasks[key]

    # -- transfers between stages and replicas -------------------------------------------------------------

    def _message(self) -> Task:
        payload = message_bytes(self.job.parts, DTYPE_BYTES[self.job.dtype])
        key = ("", "message")
        if key not in self._tasks:
            self._tasks[key] = self._transfer("pp", Kind.SEND_RECEIVE, payload, payload, "send")
        return self._tasks[key]

    def _gradients(self, chunk: int) -> list[Task]:
        kind = Kind.REDUCE_SCATTER if self.job.zero else Kind.ALL_REDUCE
        width = max(4, DTYPE_BYTES[self.job.dtype])
        return self._sharing(chunk, kind, width)

    def _parameters(self, chunk: int) -> list[Task]:
        return self._sharing(chunk, Kind.ALL_GATHER, DTYPE_BYTES[self.job.dtype])

    def _sharing(self, chunk: int, kind: Kind, width: int) -> list[Task]:
        """One transfer over the ranks that share the chunk's dense parameters, one for its experts."""
        layout = self.job.layout
        held = chunk_parameters(self.job.shape, layout, chunk)
        tasks = []
        copies = layout.copies
        for axis, count, ranks in (
            ("dp", held.dense, layout.dp * layout.cp * copies),
            ("edp", held.experts, layout.dp // layout.ep * copies),
        ):
            if count and ranks > 1:
                share = (ranks - 1) / ranks * (2 if kind is Kind.ALL_REDUCE else 1)
                sent = round(count * width * share)
                tasks.append(self._transfer(axis, kind, count * width, sent, "data"))
        return tasks

    def _transfer(self, axis: str, kind: Kind, payload: int, sent: int, lane: str) -> Task:
        fit = self.job.profile.transfer(axis, kind)
        name = f"{axis}/{kind.value}"
        return Task(name, f"{axis} {kind.value}", lane, fit.stream, float(fit.ns(payload)), sent)

    def _update(self) -> Task:
        """The optimizer, over a rank's share of the parameters; all stages' longest."""
        layout = self.job.layout
        shares = layout.dp * layout.cp if self.job.zero else 1
        count = max(
            sum(chunk_parameters(self.job.shape, layout, c).total for c in layout.chunks_of(stage))
            for stage in range(layout.pp)
        )
        ns = self.job.profile.optimizer_ns_per_parameter * count / shares
        return Task("optimizer", "optimizer", "compute", Stream.COMPUTE, ns)


def held_parts(job: Job, block: Block) -> list[Part]:
    """The parts or runs of a block's chunk in the order of its pass."""
    held = [job.parts[run.name] for run in _runs(job, block)]
    return held if block.direction is Direction.FORWARD else held[::-1]


def layer_of(job: Job, block: Block, place: Place, operator: str) -> tuple[int, str]:
    """The layer that an operator of a block belongs to, and its name there (embedding: -1)."""
    runs = _runs(job, block)
    run = (runs if place.forward else runs[::-1])[place.position]
    split = split_place(operator)
    return (run.layers[0], operator) if split is None else (run.layers[split[0]], split[2])


def _runs(job: Job, block: Block) -> list[fusion.Run]:
    return chunk_runs(job.layout, job.shape.layers, block.chunk, job.schedule.fused)
