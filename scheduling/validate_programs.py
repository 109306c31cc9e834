"""Checks the operator programs of a schedule: every operator once, after what it reads, on its stream."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from braid.scheduling.fusion import takes_up
from braid.scheduling.lowering.split import chunk_of
from braid.scheduling.operators import Graph, Operator, Part, Pass
from braid.scheduling.schedule import (
    Action,
    Barrier,
    Compute,
    Direction,
    Gradients,
    Late,
    Pair,
    PairProgram,
    Program,
    Schedule,
    Start,
    Twin,
    Twins,
    Wait,
    is_late,
)


def program_fault(schedule: Schedule, parts: Mapping[str, Part]) -> str | None:
    """What is wrong with a schedule's programs, to be put behind its name; None if nothing is."""
    for (name, letter), what in _missing(schedule, parts):
        return f": program {f'{name} {letter}'.strip()} {what}"
    for label, program, graph, given in _single_programs(schedule, parts):
        if cause := _fault(program, graph, given):
            return f", program {label}: {cause}"
    for name in sorted(takes_up(schedule.programs) - {second for _, second in schedule.pairs}):
        return f", program {name} B: no paired program puts off what it takes up"
    for (first, second), pair in schedule.pairs.items():
        if cause := _pair_fault(pair, parts[first], parts[second]):
            return f", program {first}|{second}: {cause}"
        if cause := _end_fault(schedule.programs[second, Direction.BACKWARD], pair, parts[second]):
            return f", program {second} B: {cause}"
    for (name, direction), both in schedule.twins.items():
        if cause := _twin_fault(both, parts[name], direction):
            return f", program {name} {direction.value * 2}: {cause}"
    return None


def split_graph(part: Part, gradients: Gradients) -> Graph:
    """The operators of a backward pass that a split one runs first (``INPUT``) or later (``WEIGHT``)."""
    return Graph(
        operators=tuple(
            op
            for op in part.backward.operators
            if (op.phase is Pass.WEIGHT_GRADIENT) == (gradients is Gradients.WEIGHT)
        )
    )


def _missing(schedule: Schedule, parts: Mapping[str, Part]) -> Iterator[tuple[tuple[str, str], str]]:
    directions = tuple(Direction) if schedule.trains else (Direction.FORWARD,)
    needed = {(name, direction.value) for name in parts for direction in directions}
    present = {(name, direction.value) for name, direction in schedule.programs}
    instructions = [i for stage in schedule.stages for i in stage]
    if any(
        b.gradients is not Gradients.BOTH for s in range(len(schedule.stages)) for b in schedule.blocks(s)
    ):
        needed |= {(name, letter.value) for name in parts for letter in (Gradients.INPUT, Gradients.WEIGHT)}
    present |= {(name, gradients.value) for name, gradients in schedule.splits}
    pairs = {(f"{first}|{second}", "") for first, second in schedule.pairs}
    present |= pairs
    twins = {(name, direction.value * 2) for name, direction in schedule.twins}
    present |= twins
    letters = {i.direction.value * 2 for i in instructions if isinstance(i, Twins)}
    needed |= {key for key in twins if key[0] in parts and key[1] in letters}  # none has to be
    if any(isinstance(i, Pair) for i in instructions):
        runs = {key for key in pairs if schedule.fused and all(n in parts for n in key[0].split("|"))}
        needed |= runs or {("layer|layer", "")}
    for key in sorted(needed - present):
        yield key, "is missing"
    for key in sorted(present - needed):
        used = all(name in parts for name in key[0].split("|"))
        yield (
            key,
            "is used by no block"
            if used and key[1] in ("I", "W", "FF", "BB", "")
            else "is for no part of the model",
        )


def _single_programs(
    schedule: Schedule, parts: Mapping[str, Part]
) -> Iterator[tuple[str, Program, Graph, tuple[str, ...]]]:
    """Programs of one pass with the graph they run and the values that are there before."""
    for (name, direction), program in schedule.programs.items():
        part = parts[name]
        if direction is Direction.FORWARD:
            graph = part.forward if schedule.trains else part.evaluation
            yield f"{name} F", program, graph, part.inputs
        else:
            yield f"{name} B", program, part.backward, _given_backward(part)
    for (name, gradients), program in schedule.splits.items():
        part = parts[name]
        given = _given_backward(part)
        if gradients is Gradients.WEIGHT:
            given += tuple(n for op in split_graph(part, Gradients.INPUT).operators for n in op.writes)
        yield f"{name} {gradients.value}", program, split_graph(part, gradients), given


def _given_backward(part: Part) -> tuple[str, ...]:
    return (*part.constants, *part.saved(), f"d.{part.output}")


@dataclass
class _Pass:
    """How far a program has come with one graph."""

    operators: Mapping[str, Operator]
    available: set[str]
    started: set[str] = field(default_factory=set)
    done: set[str] = field(default_factory=set)

    def next(self, action: Action) -> str | None:
        """What is wrong with an action after those before it; None: nothing, and it has happened."""
        op = self.operators.get(action.operator)
        if op is None:
            return f"'{action}': the graph has no operator {action.operator!r}"
        if cause := self._action_fault(action, op):
            return f"'{action}': {cause}"
        if isinstance(action, Start):
            self.started.add(op.name)
        else:
            self.available |= set(op.writes)
            self.done.add(op.name)
        return None

    def left(self) -> str | None:
        """What has not finished at the end."""
        left = [name for name in self.operators if name not in self.done]
        return f"operators {', '.join(left[:4])} never finish" if left else None

    def _action_fault(self, action: Action, op: Operator) -> str | None:
        if op.kind.communicates == isinstance(action, Compute):
            return f"{op.name} is {'a' if op.kind.communicates else 'not a'} collective"
        if isinstance(action, Start) and action.stream is not op.stream:
            return f"{op.name} runs on {op.stream}"
        if op.name in self.done:
            return f"{op.name} is done already"
        if not isinstance(action, Start) and (cause := self._incomplete(op)):
            return cause
        if isinstance(action, Wait):
            return None if op.name in self.started else f"{op.name} is not started"
        if op.name in self.started:
            return f"{op.name} is started already"
        missing = [name for name in op.reads if name not in self.available]
        return f"{missing[0]} is read before it is there" if missing else None

    def _incomplete(self, op: Operator) -> str | None:
        """The last chunk completes the whole value, so all others must be there before it."""
        chunk = chunk_of(op.name)
        if chunk is None or chunk.number < chunk.ways:
            return None
        others = (f"{chunk.whole}.{number}of{chunk.ways}" for number in range(1, chunk.ways))
        late = next((name for name in others if name not in self.done), None)
        return f"{late} has to be done before the last chunk" if late else None


def _begin(graph: Graph, given: tuple[str, ...]) -> _Pass:
    return _Pass(operators={op.name: op for op in graph.operators}, available=set(given))


def _fault(program: Program, graph: Graph, given: tuple[str, ...]) -> str | None:
    state = _begin(graph, given)
    for action in program:
        if is_late(action):
            continue
        if action.side is not None:
            return f"'{action}': only paired programs name a pass"
        if cause := state.next(action):
            return cause
    return state.left()


def _end_fault(program: Program, before: PairProgram, part: Part) -> str | None:
    """What a backward pass by itself takes up has to be what the paired program before has put off.

    Its own operators stand behind the same of the pass before, so that gradients are added up in the order of
    micro-batches.
    """
    late = [action for action in program if is_late(action)]
    if not late:
        return None
    state = _begin(part.backward, _given_backward(part))
    for action in before:
        if not isinstance(action, Barrier) and action.side is Direction.BACKWARD:
            state.next(action)
    for action in late:
        if cause := state.next(action):
            return cause
    if cause := state.left():
        return f"{cause}, of those that the paired program before has put off"
    waiting = {action.operator for action in late if isinstance(action, Compute)}
    for action in program:
        if isinstance(action, Compute) and is_late(action):
            waiting.remove(action.operator)
        elif isinstance(action, Compute) and action.operator in waiting:
            return f"'{action}': P:{action.operator} has to come before"
    return None


def _twin_fault(program: PairProgram, part: Part, direction: Direction) -> str | None:
    """Both micro-batches' operators, each of the second one's behind the same of the first one.

    So gradients are added up in the order of micro-batches, as they are where passes run one after the other.
    """
    if direction is Direction.FORWARD:
        sides = {side: _begin(part.forward, part.inputs) for side in Twin}
    else:
        sides = {side: _begin(part.backward, _given_backward(part)) for side in Twin}
    for action in program:
        if isinstance(action, Barrier) or not isinstance(action.side, Twin):
            return f"'{action}': twins' operators are written 1:NAME and 2:NAME"
        ahead = action.side is Twin.SECOND and action.operator not in sides[Twin.FIRST].done
        if ahead and isinstance(action, Compute):
            return f"'{action}': 1:{action.operator} has to come before"
        if cause := sides[action.side].next(action):
            return cause
    return next((cause for side in sides.values() if (cause := side.left())), None)


def _pair_fault(program: PairProgram, forward: Part, backward: Part) -> str | None:
    sides = {
        Direction.FORWARD: _begin(forward.forward, forward.inputs),
        Direction.BACKWARD: _begin(backward.backward, _given_backward(backward)),
    }
    put_off: list[Action] = []
    for action in program:
        if isinstance(action, Barrier):
            continue
        if action.side is Late.BACKWARD:
            put_off.append(action)
            continue
        if not isinstance(action.side, Direction):
            return f"'{action}': a paired program names the pass, F:{action.operator} or B:{action.operator}"
        if cause := sides[action.side].next(action):
            return cause
    ends = {f"d.{name}" for name in backward.inputs if name not in backward.constants}
    for action in put_off:  # by the program that follows, when all that is not put off is done
        if cause := sides[Direction.BACKWARD].next(action):
            return cause
        if ends & set(backward.backward.named(action.operator).writes):
            return f"'{action}': what follows in the same pass needs it, so it cannot be put off"
    return next((cause for side in sides.values() if (cause := side.left())), None)
