"""Damaged operator programs: validation finds what is broken and says where and why."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from braid.scheduling.lowering.fixed_orders import by_turns
from braid.scheduling.lowering.named import PairMethod
from braid.scheduling.lowering.programs import program_of
from braid.scheduling.operators import Pass as Phase
from braid.scheduling.operators import Stream
from braid.scheduling.schedule import Barrier, Compute, PassKind, Program, Schedule, Side, Sides, Start, Wait
from braid.scheduling.schedule_text import parse_sides, write_sides
from braid.scheduling.spec import ParallelLayout
from tests.scheduling.cases import PAIRED, SPLIT, code_of, layout_for, named_schedule, pairs_of
from tests.scheduling.damages import PARTS, message_of

OPERATORS = {
    op.name: op
    for part in PARTS.values()
    for graph in (part.forward, part.backward)
    for op in graph.operators
}
COLLECTIVE = ("F", "B", "I", "F|B", "F|B|L", "F|F", "B|B")
"""Kinds of programs that have collectives: passes, input gradients, pairs, pairs that leave ends, twins."""
EVERYWHERE = (*COLLECTIVE, "W")
SEVERAL = ("F|B", "F|B|L", "F|F", "B|B")
ORDERED = tuple(name for name in PAIRED if pairs_of(name) is PairMethod.ORDER)


class Place:
    """A program, with what a damage needs: its list of actions, and choices."""

    def __init__(self, data: st.DataObject, sides: Sides, actions: Program) -> None:
        self._data, self.sides = data, sides
        self.list: list[Any] = [*actions]
        part = PARTS[sides[0].unit]
        self.graph = (part.forward if sides[0].kind is PassKind.FORWARD else part.backward).operators

    def number(self, low: int, high: int) -> int:
        """A number between two, both included."""
        return self._data.draw(st.integers(low, high))

    def some(self, *kinds: type, where: Callable[[Any], bool] = lambda _: True) -> int:
        """The position of some action of one of the kinds (default: all that name an operator)."""
        kinds = kinds or (Compute, Start, Wait)
        found = [n for n, action in enumerate(self.list) if isinstance(action, kinds) and where(action)]
        assume(found)
        return found[self.number(0, len(found) - 1)]


@dataclass(frozen=True)
class ProgramDamage:
    """A way to break a program, the cause (a pattern) that the message must give, and where it can be."""

    breaks: Callable[[Place], None]
    cause: str
    kinds: tuple[str, ...]


PROGRAM_DAMAGES: dict[str, ProgramDamage] = {}


def damage(
    cause: str, kinds: tuple[str, ...] = EVERYWHERE
) -> Callable[[Callable[[Place], None]], Callable[[Place], None]]:
    """Register a damage."""

    def register(function: Callable[[Place], None]) -> Callable[[Place], None]:
        PROGRAM_DAMAGES[function.__name__] = ProgramDamage(function, cause, kinds)
        return function

    return register


UNDONE = "not done yet|never runs|never waited for|is not started|has not run"


@damage(UNDONE)
def drop_an_action(at: Place) -> None:
    del at.list[at.some()]


@damage("runs twice|is started twice|is waited for twice")
def repeat_an_action(at: Place) -> None:
    n = at.some()
    at.list.insert(at.number(n, len(at.list)), at.list[n])


@damage("the graph has no operator 'nothing'")
def run_an_unknown_operator(at: Place) -> None:
    n = at.some()
    at.list.insert(n, replace(at.list[n], operator="nothing"))


@damage("no collective runs on the compute stream", COLLECTIVE)
def use_the_compute_stream(at: Place) -> None:
    n = at.some(Start)
    at.list[n] = replace(at.list[n], stream=Stream.COMPUTE)


@damage("is not started", COLLECTIVE)
def wait_before_the_start(at: Place) -> None:
    wait = at.list.pop(at.some(Wait))
    start = next(
        n
        for n, i in enumerate(at.list)
        if isinstance(i, Start) and (i.operator, i.turn) == (wait.operator, wait.turn)
    )
    at.list.insert(at.number(0, start), wait)


@damage("not done yet|never waited for|has not run", COLLECTIVE)
def do_not_wait(at: Place) -> None:
    del at.list[at.some(Wait)]


@damage("is a collective", COLLECTIVE)
def compute_a_collective(at: Place) -> None:
    n = at.some(Start)
    at.list[n] = Compute(at.list[n].operator, at.list[n].turn)


@damage("is not a collective")
def start_a_compute_operator(at: Place) -> None:
    n = at.some(Compute)
    one = at.list[n]
    at.list[n : n + 1] = [Start(one.operator, Stream.COMPUTE, one.turn), Wait(one.operator, one.turn)]


@damage("is not a collective")
def wait_for_a_compute_operator(at: Place) -> None:
    n = at.some(Compute)
    at.list.insert(at.number(n, len(at.list)), Wait(at.list[n].operator, at.list[n].turn))


@damage("not done yet", COLLECTIVE)
def read_before_it_is_written(at: Place) -> None:
    """Move what makes a value behind the first action that reads it."""
    n = at.some(Compute)
    one = at.list[n]
    written = set(OPERATORS[one.operator].writes)
    readers = [
        m
        for m, action in enumerate(at.list)
        if isinstance(action, Compute | Start)
        and action.turn == one.turn
        and written & set(OPERATORS[action.operator].reads)
    ]
    assume(readers)
    at.list.insert(at.number(readers[0], len(at.list) - 1), at.list.pop(n))


@damage("is of none of its . passes")
def name_a_pass_that_is_none(at: Place) -> None:
    n = at.some()
    at.list[n] = replace(at.list[n], turn=[len(at.sides), len(at.sides) + 1, -1][at.number(0, 2)])


@damage("the graph has no operator", ("F|B", "F|B|L"))
def name_the_other_pass(at: Place) -> None:
    n = at.some(where=lambda i: i.turn < 2)
    at.list[n] = replace(at.list[n], turn=1 - at.list[n].turn)


@damage("runs twice|is (started|waited for) twice|not done yet|is not started", ("F|F", "B|B"))
def name_the_other_twin(at: Place) -> None:
    n = at.some()
    at.list[n] = replace(at.list[n], turn=1 - at.list[n].turn)


@damage("not done yet", SEVERAL)
def start_with_the_last_action_of_a_pass(at: Place) -> None:
    turn = at.number(0, 1)
    last = max(n for n, i in enumerate(at.list) if isinstance(i, Compute) and i.turn == turn)
    at.list.insert(0, at.list.pop(last))


@damage("gradients are added up in the order of micro-batches", ("B|B",))
def turn_the_weight_gradients_of_twins_round(at: Place) -> None:
    """The second's before the first's: another sum, in bits."""
    n = at.some(Compute, where=lambda i: i.turn == 1 and gives_weights(i.operator))
    first = next(
        m
        for m, i in enumerate(at.list)
        if isinstance(i, Compute) and (i.operator, i.turn) == (at.list[n].operator, 0)
    )
    at.list.insert(n, at.list.pop(first))


@damage("of B.* never runs", ("F|B",))
def leave_weight_gradients_that_nothing_takes_up(at: Place) -> None:
    del at.list[at.some(Compute, where=lambda i: i.turn == 1 and gives_weights(i.operator))]


@damage("of B.* never runs", ("F|B|L",))
def take_up_less_than_is_left(at: Place) -> None:
    del at.list[at.some(where=lambda i: i.turn == 2)]


@damage("runs twice", ("F|B|L",))
def take_up_what_has_run(at: Place) -> None:
    n = at.some(Compute, where=lambda i: i.turn == 1)
    at.list.insert(at.number(0, len(at.list)), replace(at.list[n], turn=2))


@damage("runs twice", ("F|B|L",))
def run_what_is_left_as_well(at: Place) -> None:
    n = at.some(Compute, where=lambda i: i.turn == 2)
    at.list.append(replace(at.list[n], turn=1))


@damage("not done yet|its output cannot be handed on", ("F|B|L",))
def leave_what_the_rest_of_the_pass_needs(at: Place) -> None:
    """Or the layer before."""
    n = at.some(Compute, where=lambda i: i.turn == 1 and not gives_weights(i.operator))
    at.list[n] = replace(at.list[n], turn=2)


@damage("runs twice", ("I",))
def compute_weight_gradients_with_those_of_the_input(at: Place) -> None:
    names = [op.name for op in at.graph if gives_weights(op.name)]
    assume(names)
    at.list.append(Compute(names[at.number(0, len(names) - 1)]))


@damage("runs twice|not done yet", ("W",))
def compute_input_gradients_with_those_of_the_weights(at: Place) -> None:
    names = [op.name for op in at.graph if not (gives_weights(op.name) or op.kind.communicates)]
    assume(names)
    at.list.insert(at.number(0, len(at.list)), Compute(names[at.number(0, len(names) - 1)]))


def gives_weights(operator: str) -> bool:
    """Whether an operator computes weight gradients."""
    return OPERATORS[operator].phase is Phase.WEIGHT_GRADIENT


def held_by(draw: st.DataObject, kinds: str) -> tuple[Schedule, ParallelLayout, Sides]:
    """A schedule that has a program of some kinds of passes, its layout, and what for."""
    ends, stages = kinds == "F|B|L", 1 if kinds in ("F|F", "B|B") else 2
    holders = {
        "I": SPLIT,
        "W": SPLIT,
        "F|B": PAIRED,
        "F|B|L": ORDERED,
        "F|F": ("braid:twins",),
        "B|B": ("braid:twins",),
    }.get(kinds, ("megatron:folded", "braid:v"))
    name = draw.draw(st.sampled_from(holders))
    schedule = named_schedule(name, stages, 4, 2, ends=ends)
    part = "layer" if "|" in kinds else draw.draw(st.sampled_from(sorted(PARTS)))
    sides = parse_sides("|".join(f"{kind}:{part}" for kind in kinds.split("|")))
    return schedule, layout_for(name, stages, 2), sides


@pytest.mark.parametrize(
    ("name", "kinds"), [(name, kinds) for name, wrong in PROGRAM_DAMAGES.items() for kinds in wrong.kinds]
)
@pytest.mark.slow
def test_a_damaged_program_is_refused(name: str, kinds: str) -> None:
    wrong, tried = PROGRAM_DAMAGES[name], set()

    @given(data=st.data())
    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
    def find(data: st.DataObject) -> None:
        schedule, layout, sides = held_by(data, kinds)
        at = Place(data, sides, schedule.programs[sides])
        wrong.breaks(at)
        damaged = with_program(schedule, sides, tuple(at.list))
        message = message_of(damaged, layout).splitlines()[0]
        label = rf"program {re.escape(write_sides(sides))}: |stage ., at .*: "
        assert re.match(rf"schedule {schedule.name}[:,] ({label})", message), message
        assert re.search(wrong.cause, message), message
        tried.add(message)

    find()
    assert tried


def with_program(schedule: Schedule, sides: Sides, actions: Program) -> Schedule:
    """The schedule with another program."""
    return replace(schedule, programs={**schedule.programs, sides: actions})


def without(schedule: Schedule, *unwanted: Sides) -> Schedule:
    """The schedule without some programs."""
    programs = {sides: program for sides, program in schedule.programs.items() if sides not in unwanted}
    return replace(schedule, programs=programs)


def test_barriers_may_stand_anywhere() -> None:
    """They make a paired program slower, never wrong."""
    schedule, pair = named_schedule("dhelix", 2, 4, 2), parse_sides("F:layer|B:layer")
    program = schedule.programs[pair]
    assert Barrier() in program
    spread = tuple(action for one in program for action in (Barrier(), one))
    for actions in (spread, tuple(a for a in program if a != Barrier())):
        code_of(with_program(schedule, pair, actions), layout_for("dhelix", 2, 2))


def test_an_operator_that_is_left_may_run_anywhere_in_the_next_program() -> None:
    """What is left needs nothing of the program that takes it up."""
    schedule, sides = named_schedule("braid", 2, 6, 2, ends=True), parse_sides("F:layer|B:layer|L:layer")
    program = schedule.programs[sides]
    taken = [action for action in program if isinstance(action, Compute) and action.turn == 2]
    rest = [action for action in program if action not in taken]
    assert taken
    for actions in ((*taken, *rest), (*rest, *taken), (*rest[:9], *taken[::-1], *rest[9:])):
        code_of(with_program(schedule, sides, actions), layout_for("braid", 2, 2))


def missing(schedule: Schedule, sides: str) -> str:
    """The first line of the message with which a schedule without a program is refused."""
    layout = layout_for(schedule.name, 2, 2)
    return message_of(without(schedule, parse_sides(sides)), layout).splitlines()[0]


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("part", sorted(PARTS))
@pytest.mark.parametrize("kind", ["I", "W"])
def test_a_missing_split_program_is_refused(name: str, part: str, kind: str) -> None:
    message = missing(named_schedule(name, 2, 4, 2), f"{kind}:{part}")
    found = rf"schedule {name}, stage ., at {kind}\d\.\d(b|): program {kind}:{part} is missing"
    assert re.fullmatch(found, message)


@pytest.mark.parametrize("name", PAIRED)
@pytest.mark.parametrize("ends", [False, True])
def test_a_missing_paired_program_is_refused(name: str, ends: bool) -> None:
    ends = ends and name in ORDERED
    message = missing(
        named_schedule(name, 2, 4, 2, ends=ends), "F:layer|B:layer|L:layer" if ends else "F:layer|B:layer"
    )
    assert re.fullmatch(rf"schedule {name}, stage ., at \[F.*B.*\]: no program is for F beside B", message)


def test_twins_without_a_program_run_one_behind_the_other() -> None:
    schedule = named_schedule("braid:twins", 1, 4, 2)
    twins = [parse_sides(text) for text in ("F:layer|F:layer", "B:layer|B:layer")]
    code_of(without(schedule, *twins), layout_for("braid:twins", 1, 2))


def test_programs_that_nothing_uses_are_refused() -> None:
    plain, full = named_schedule("megatron", 2, 4, 2), named_schedule("dualpipev", 2, 4, 2)
    pair = full.programs[parse_sides("F:layer|B:layer")]
    for schedule, sides, what in (
        (plain, "F:layer|B:layer", "is used by no block"),
        (plain, "I:embedding", "is used by no block"),
        (full, "B:layer|F:layer", "is used by no block"),
        (full, "F:layer|F:layer", "is used by no block"),
        (full, "L:layer", "takes up L:layer, but has no B:layer"),
        (full, "F:layer|L:layer", "takes up L:layer, but has no B:layer"),
        (full, "F:layer|B:layer|L:head", "takes up L:head, but has no B:head"),
        (full, "I:layer|L:layer", "takes up L:layer, but has no B:layer"),
        (full, "F:layer|B:encoder", "is for no part of the model"),
        (full, "W:encoder", "is for no part of the model"),
        (plain, "F:encoder", "is for no part of the model"),
    ):
        message = message_of(
            with_program(schedule, parse_sides(sides), pair), layout_for(schedule.name, 2, 2)
        )
        assert message == f"schedule {schedule.name}: program {sides} {what}"


def test_a_program_of_other_runs_is_used_where_they_meet() -> None:
    """Head and embedding come last, both: a program for them is taken, and so it is checked."""
    schedule, layout = named_schedule("dualpipev", 2, 4, 2), layout_for("dualpipev", 2, 2)
    sides = parse_sides("F:head|B:embedding")
    program = program_of(sides, PARTS, by_turns(sides, PARTS))
    assert {action.turn for action in program if not isinstance(action, Barrier)} == {0, 1}
    turns = [
        [[op.turn for op in stretch.operations] for stretch in code_of(one, layout).stages[0]]
        for one in (schedule, with_program(schedule, sides, program))
    ]
    assert turns[0] != turns[1]
    for turn, cause in ((0, r"B.\.3b?: .* of its forward pass has not run"), (1, "of B.*0 never runs")):
        last = max(n for n, a in enumerate(program) if not isinstance(a, Barrier) and a.turn == turn)
        message = message_of(with_program(schedule, sides, program[:last] + program[last + 1 :]), layout)
        assert re.search(cause, message)


@pytest.mark.parametrize("sides", sorted(named_schedule("megatron", 2, 2, 2).programs))
def test_a_missing_program_is_refused(sides: tuple[Side]) -> None:
    message = missing(named_schedule("megatron", 2, 2, 2), write_sides(sides))
    direction, part = sides[0].kind.value, sides[0].unit
    stage = 1 if part == "head" else 0
    block = f"{direction}0.{stage}"
    assert message == f"schedule megatron, stage {stage}, at {block}: program {direction}:{part} is missing"
