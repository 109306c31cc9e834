"""Makes operator programs: turns an order of operators into a list of issues and waits."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from braid.scheduling.model.operators import Graph, Kind, Operator, Part, Phase
from braid.scheduling.schedule.operations import Barrier, Compute, Operation, PassKind, Start, Wait
from braid.scheduling.schedule.order import Issue, Order, OrderSegment
from braid.scheduling.schedule.schedule import Program, Sides
from braid.scheduling.schedule.text import write_sides, write_step


def graph_of(part: Part, kind: PassKind, *, trains: bool = True) -> Graph:
    """Return the graph that a pass of some kind runs in a part; for an end, that of the whole backward pass.

    ``trains``: whether the forward pass also computes what gradients need.
    """
    match kind:
        case PassKind.FORWARD:
            return part.forward if trains else part.evaluation
        case PassKind.BACKWARD | PassKind.END:
            return part.backward
        case PassKind.INPUT | PassKind.WEIGHT:
            later = kind is PassKind.WEIGHT
            ops = part.backward.operators
            return Graph(operators=tuple(op for op in ops if (op.phase is Phase.WEIGHT_GRADIENT) == later))


def serial_program(graph: Graph) -> Program:
    """Return the program that runs operators in graph order and waits for every collective at once.

    There are two exceptions: ring shifts overlap the attention that does not need them yet, as in
    Megatron-LM's context parallelism, and pieces of partitions stay under way until an operator needs them.
    """
    lazy = {op.name for op in graph.operators if op.kind is Kind.SEND_RECEIVE or op.piece is not None}
    issuer = _Issuer([graph], lazy)
    return issuer.run([Issue(0, op.name) for op in graph.operators])


def program_of(sides: Sides, parts: Mapping[str, Part], order: Order) -> Program:
    """Return the program that follows a decided order and waits for a collective when its result is needed.

    Raises `ValueError` if the order names unknown operators, or lacks operators that no end runs.
    """
    label = f"order of {write_sides(sides)}"
    for side in sides:
        if side.unit not in parts:
            raise ValueError(f"{label}: {side.unit!r} is no part of this model and layout; plan anew")
    graphs = [graph_of(parts[side.unit], side.kind) for side in sides]
    lazy = {op.name for graph in graphs for op in graph.operators}
    issues = [i for step in order for i in (step.issues if isinstance(step, OrderSegment) else (step,))]
    _check(label, sides, graphs, [issue for issue in issues if isinstance(issue, Issue)])
    return _Issuer(graphs, lazy).run(order)


@dataclass
class _Issuer:
    """Builds a program: issues operators in order, and inserts waits where results are first needed."""

    graphs: Sequence[Graph]
    lazy: set[str]
    """Names of collectives whose wait comes only when their result is needed, instead of at once."""
    actions: list[Operation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._operators = {
            Issue(n, op.name): op for n, graph in enumerate(self.graphs) for op in graph.operators
        }
        self._writers = {
            (n, name): op
            for n, graph in enumerate(self.graphs)
            for op in graph.operators
            for name in op.writes
        }
        self._under_way: list[Issue] = []

    def run(self, steps: Iterable[Issue | OrderSegment | Barrier]) -> Program:
        """Issue all steps of an order, wait for all transfers at the end, and return the program."""
        for step in steps:
            match step:
                case Issue():
                    self.issue(step)
                case OrderSegment():
                    self._segment(step)
                case Barrier():
                    self.wait_for_all()
                    self.actions.append(step)
        self.wait_for_all()
        return tuple(self.actions)

    def _segment(self, segment: OrderSegment) -> None:
        """Issue a segment: its collectives, its compute operators, all waits, and a barrier if several passes
        have operators in it."""
        for issue in sorted(segment.issues, key=lambda i: not self._operators[i].kind.communicates):
            self.issue(issue)
        self.wait_for_all()
        if sum(map(bool, segment.operators)) > 1:
            self.actions.append(Barrier())

    def issue(self, step: Issue) -> None:
        """Add the waits for an operator's inputs, and then the operator, to the program."""
        turn, op = step[0], self._operators[step]
        for value in op.reads:
            writer = self._writers.get((turn, value))
            if writer is not None and (turn, writer.name) in self._under_way:
                self._wait(turn, writer)
        if not op.kind.communicates:
            self.actions.append(Compute(op.name, turn=turn))
            return
        self.actions.append(Start(op.name, op.stream, turn=turn))
        self._under_way.append(step)
        if op.name not in self.lazy:
            self._wait(turn, op)

    def wait_for_all(self) -> None:
        """Add waits for all transfers that are under way to the program."""
        for step in list(self._under_way):
            self._wait(step[0], self._operators[step])

    def _wait(self, turn: int, op: Operator) -> None:
        self._under_way.remove(Issue(turn, op.name))
        # The last piece completes the whole value: no other piece may still be under way.
        for step in list(self._under_way) if op.completes else ():
            if step[0] == turn and self._operators[step].completed_by(op):
                self._wait(turn, self._operators[step])
        self.actions.append(Wait(op.name, turn=turn))


def _check(label: str, sides: Sides, graphs: Sequence[Graph], steps: Sequence[Issue]) -> None:
    """Raise `ValueError` unless the steps contain every operator of the graphs exactly once and no others.

    Operators of a backward pass may be missing if the end of the unit runs them.
    """
    several = len(sides) > 1
    operators = {Issue(turn, op.name) for turn, graph in enumerate(graphs) for op in graph.operators}
    seen: set[Issue] = set()
    for turn, name in steps:
        text = write_step(turn, name, several=several)
        if Issue(turn, name) not in operators:
            raise ValueError(
                f"{label}: {text} is no operator of the unit; plan anew for this model and layout"
            )
        if Issue(turn, name) in seen:
            raise ValueError(f"{label}: {text} stands twice")
        seen.add(Issue(turn, name))
    ends = {side.unit: turn for turn, side in enumerate(sides) if side.kind is PassKind.END}
    missing = []
    for turn, name in sorted(operators - seen):
        side = sides[turn]
        if side.kind is PassKind.END or (
            side.kind is PassKind.BACKWARD and (ends.get(side.unit), name) in seen
        ):
            continue
        missing.append(write_step(turn, name, several=several))
    if missing:
        raise ValueError(f"{label}: {', '.join(missing[:4])} of the unit are missing")
    for turn, side in enumerate(sides):
        if side.kind is PassKind.BACKWARD and side.unit in ends:
            _check_left(label, graphs[turn], turn, {name for number, name in seen if number == turn})


def _check_left(label: str, graph: Graph, turn: int, done: set[str]) -> None:
    """Raise `ValueError` if an operator of the backward pass needs the result of one that is left to the end.

    ``done``: names of the operators that pass ``turn`` runs itself.
    """
    written = {name: op.name for op in graph.operators if op.name not in done for name in op.writes}
    for op in graph.operators:
        for name in op.reads:
            if name in written and op.name in done:
                raise ValueError(
                    f"{label}: {written[name]} is left to the end, but {turn}:{op.name} needs it"
                )
