"""Operator programs: from an order of operators to what a rank issues and where it waits."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from braid.scheduling.lowering.named import PairMethod
from braid.scheduling.lowering.split import chunk_of
from braid.scheduling.operators import Graph, Kind, Operator, Part, Pass
from braid.scheduling.schedule import (
    Barrier,
    Compute,
    Direction,
    Gradients,
    Late,
    PairAction,
    PairProgram,
    Program,
    Side,
    Start,
    Twin,
    Wait,
)


@dataclass(frozen=True, kw_only=True)
class PairingDecision:
    """How a forward and a backward layer share a rank, as names.

    ``order``: every step is an operator, ``F:qkv`` or ``B:qkv.wgrad``, in the order of issue; ``P:qkv.wgrad``
    is the weight gradient of the backward layer before, put off to where it hides a collective. A backward
    pass over all of a model's front may leave its whole end so, collectives too.
    ``barriers``: every step is a segment, ``qkv attention | mlp_scatter.grad``; one side may be empty.
    ``turns``: no steps; the graphs' own orders, one operator of each strand after the other.
    """

    method: PairMethod
    steps: tuple[str, ...] = ()


def serial_program(graph: Graph) -> Program:
    """Operators one after the other, every collective waited for at once.

    Ring shifts alone run beside the attention that does not need them yet: that is what a ring is for, and
    what the field's frameworks do (Megatron-LM's context parallelism).
    """
    lazy = {op.name for op in graph.operators if op.kind is Kind.SEND_RECEIVE}
    return _plain(_Issuer({None: graph}, lazy).run([(None, op.name) for op in graph.operators]))


def chunked_program(graph: Graph) -> Program:
    """As `serial_program`, but chunks of a collective stay under way until a chunk of the GEMM needs them."""
    lazy = {op.name for op in graph.operators if op.kind is Kind.SEND_RECEIVE or chunk_of(op.name)}
    return _plain(_Issuer({None: graph}, lazy).run([(None, op.name) for op in graph.operators]))


def ordered_program(graph: Graph, order: Sequence[str] = ()) -> Program:
    """Operators in an order (default: the graph's); whoever needs a collective's result waits for it.

    ``P:qkv.wgrad``: of the pass before, if the paired program that it was part of has put that off.
    """
    mark = f"{Late.BACKWARD}:"
    steps: list[Step] = [
        (Late.BACKWARD, name.removeprefix(mark)) if name.startswith(mark) else (None, name)
        for name in order or [op.name for op in graph.operators]
    ]
    put_off = Graph(operators=tuple(op for op in graph.operators if (Late.BACKWARD, op.name) in steps))
    _check_names("order", {None: graph, Direction.BACKWARD: put_off}, steps)
    lazy = {op.name for op in graph.operators}
    return _plain(_Issuer({None: graph, Late.BACKWARD: put_off}, lazy).run(steps))


def split_programs(part: Part) -> dict[tuple[str, Gradients], Program]:
    """Serial programs of a backward pass whose weight gradients come later."""
    programs = {}
    for gradients in (Gradients.INPUT, Gradients.WEIGHT):
        chosen = tuple(
            op
            for op in part.backward.operators
            if (op.phase is Pass.WEIGHT_GRADIENT) == (gradients is Gradients.WEIGHT)
        )
        programs[part.name, gradients] = serial_program(Graph(operators=chosen))
    return programs


def twin_program(graph: Graph, order: Sequence[str]) -> PairProgram:
    """A pass of two micro-batches in an order of issue: ``1:qkv`` is the first one's operator."""
    graphs: dict[Side | None, Graph] = dict.fromkeys(Twin, graph)
    steps: list[Step] = []
    for step in order:
        side, separator, name = step.partition(":")
        if not separator or side not in set(Twin):
            raise ValueError(f"order of two micro-batches: {step!r} must be written 1:OPERATOR or 2:OPERATOR")
        steps.append((Twin(side), name))
    _check_names("order of two micro-batches", graphs, steps)
    return tuple(_Issuer(graphs, {op.name for op in graph.operators}).run(steps))


def pair_program(forward: Graph, backward: Graph, decision: PairingDecision) -> PairProgram:
    """The paired program of a decision; `ValueError` for steps that name what the graphs do not have."""
    graphs: dict[Side | None, Graph] = {Direction.FORWARD: forward, Direction.BACKWARD: backward}
    if decision.method is PairMethod.BARRIERS:
        return _segments_program(graphs, decision.steps)
    if decision.method is PairMethod.TURNS:
        steps = _taking_turns(graphs)
    else:
        steps = [_parse_step(step) for step in decision.steps]
    _check_names("pairing", graphs, steps)
    lazy = {op.name for graph in graphs.values() for op in graph.operators}
    _check_late(backward, {name for side, name in steps if side is Late.BACKWARD})
    return tuple(_Issuer({**graphs, Late.BACKWARD: backward}, lazy).run(steps))


def _check_late(backward: Graph, late: Collection[str]) -> None:
    """`ValueError` if an operator that is put off writes what one that is not reads."""
    written = {name: op.name for op in backward.operators if op.name in late for name in op.writes}
    for op in backward.operators:
        for name in op.reads:
            if name in written and op.name not in late:
                raise ValueError(f"pairing: P:{written[name]} is put off, but B:{op.name} needs it")


Step = tuple[Side | None, str]
"""An operator to issue: the pass that it belongs to (None in programs of one pass) and its name."""


@dataclass
class _Issuer:
    """Issues operators in order and puts waits before the first need."""

    graphs: Mapping[Side | None, Graph]
    lazy: set[str]
    """Collectives that are not waited for at once."""
    actions: list[PairAction] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._operators = {
            (side, op.name): op for side, graph in self.graphs.items() for op in graph.operators
        }
        self._writers = {
            (side, name): op
            for side, graph in self.graphs.items()
            for op in graph.operators
            for name in op.writes
        }
        self._under_way: list[Step] = []

    def run(self, steps: Iterable[Step]) -> list[PairAction]:
        """All steps, and a wait for everything that is left at the end."""
        for side, name in steps:
            self.issue(side, self._operators[side, name])
        self.wait_for_all()
        return self.actions

    def issue(self, side: Side | None, op: Operator) -> None:
        """One operator, after waiting for what it reads."""
        for value in op.reads:
            writer = self._writers.get((side, value))
            if writer is not None and (side, writer.name) in self._under_way:
                self._wait(side, writer.name)
        if not op.kind.communicates:
            self.actions.append(Compute(op.name, side))
            return
        self.actions.append(Start(op.name, op.stream, side))
        self._under_way.append((side, op.name))
        if op.name not in self.lazy:
            self._wait(side, op.name)

    def wait_for_all(self) -> None:
        """Wait for everything that is under way."""
        for side, name in list(self._under_way):
            self._wait(side, name)

    def _wait(self, side: Side | None, name: str) -> None:
        self._under_way.remove((side, name))
        chunk = chunk_of(name)
        if chunk is not None and chunk.number == chunk.ways:
            # The last chunk completes the whole value: none of the others may still be under way.
            for other in [step for step in self._under_way if step[0] is side]:
                if (found := chunk_of(other[1])) is not None and found.whole == chunk.whole:
                    self._wait(*other)
        self.actions.append(Wait(name, side))


def _segments_program(graphs: Mapping[Side | None, Graph], segments: Sequence[str]) -> PairProgram:
    """Segment after segment: its collectives, then its compute, then waits; a barrier after paired ones."""
    issuer = _Issuer(graphs, {op.name for graph in graphs.values() for op in graph.operators})
    operators = {(side, op.name): op for side, graph in graphs.items() for op in graph.operators}
    parsed = []
    for text in segments:
        first, separator, second = text.partition("|")
        if not separator:
            raise ValueError(
                f"pairing step {text!r} must be written 'FORWARD OPERATORS | BACKWARD OPERATORS'"
            )
        steps: list[Step] = [(Direction.BACKWARD, name) for name in second.split()]
        steps += [(Direction.FORWARD, name) for name in first.split()]
        parsed.append((steps, bool(first.split() and second.split())))
    _check_names("pairing", graphs, [step for steps, _ in parsed for step in steps])
    for steps, paired in parsed:
        for side, name in sorted(steps, key=lambda step: not operators[step].kind.communicates):
            issuer.issue(side, operators[side, name])
        issuer.wait_for_all()
        if paired:
            issuer.actions.append(Barrier())
    return tuple(issuer.actions)


def _taking_turns(graphs: Mapping[Side | None, Graph]) -> list[Step]:
    """One operator of the backward strand, one of the forward strand, and so on."""
    sides = [(side, graphs[side].operators) for side in (Direction.BACKWARD, Direction.FORWARD)]
    longest = max(len(operators) for _, operators in sides)
    return [
        (side, operators[n].name) for n in range(longest) for side, operators in sides if n < len(operators)
    ]


def _parse_step(step: str) -> Step:
    side, separator, name = step.partition(":")
    sides: dict[str, Side] = {known.value: known for known in (*Direction, *Late)}
    if not separator or side not in sides:
        raise ValueError(f"pairing step {step!r} must be written F:OPERATOR, B:OPERATOR or P:OPERATOR")
    return sides[side], name


def _check_names(what: str, graphs: Mapping[Side | None, Graph], steps: Sequence[Step]) -> None:
    """Every operator once, put off or not, and no others."""
    known = {(side, op.name) for side, graph in graphs.items() for op in graph.operators}
    seen: set[Step] = set()
    for given, name in steps:
        step = (Direction.BACKWARD if given is Late.BACKWARD else given), name
        label = name if given is None else f"{given.value}:{name}"
        if step not in known:
            raise ValueError(
                f"{what}: {label} is no operator of the layer; plan anew for this model and layout"
            )
        if step in seen:
            raise ValueError(f"{what}: {label} stands twice")
        seen.add(step)
    if missing := sorted(f"{side.value}:{name}" if side else name for side, name in known - seen):
        raise ValueError(f"{what}: {', '.join(missing[:4])} of the layer are missing")


def _plain(actions: Iterable[PairAction]) -> Program:
    return tuple(action for action in actions if not isinstance(action, Barrier))
