"""Damaged operator programs: `validate` finds what is broken and says where and why."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from braid.scheduling.operators import Stream
from braid.scheduling.schedule import Action, Compute, Direction, Start, Wait
from tests.scheduling.cases import layout_for, named_schedule
from tests.scheduling.damages import PARTS, message_of

OPERATORS = {
    op.name: op
    for part in PARTS.values()
    for graph in (part.forward, part.backward)
    for op in graph.operators
}


Choose = Callable[[int, int], int]
ProgramDamage = Callable[[list[Action], Choose], None]
PROGRAM_DAMAGES: dict[str, tuple[ProgramDamage, str]] = {}


def program_damage(cause: str) -> Callable[[ProgramDamage], ProgramDamage]:
    """Register a damage of an operator program; ``choose`` gives a number between two, both included."""

    def register(function: ProgramDamage) -> ProgramDamage:
        PROGRAM_DAMAGES[function.__name__] = function, cause
        return function

    return register


def some(program: list[Action], choose: Choose, *kinds: type) -> int:
    """The position of some action of one of the kinds."""
    found = [n for n, action in enumerate(program) if isinstance(action, kinds)]
    assume(found)
    return found[choose(0, len(found) - 1)]


@program_damage("is read before it is there|never finish|is not started")
def drop_an_action(program: list[Action], choose: Choose) -> None:
    del program[choose(0, len(program) - 1)]


@program_damage("is (done|started) already")
def repeat_an_action(program: list[Action], choose: Choose) -> None:
    n = choose(0, len(program) - 1)
    program.insert(choose(n, len(program)), program[n])


@program_damage("the graph has no operator 'nothing'")
def run_an_unknown_operator(program: list[Action], choose: Choose) -> None:
    n = choose(0, len(program) - 1)
    program.insert(n, replace(program[n], operator="nothing"))


@program_damage("runs on intra")
def use_another_stream(program: list[Action], choose: Choose) -> None:
    n = some(program, choose, Start)
    program[n] = Start(program[n].operator, [Stream.INTER, Stream.COMPUTE][choose(0, 1)])


@program_damage("is not started")
def wait_before_the_start(program: list[Action], choose: Choose) -> None:
    n = some(program, choose, Wait)
    wait = program.pop(n)
    program.insert(choose(0, n - 1), wait)


@program_damage("is read before it is there|never finish")
def do_not_wait(program: list[Action], choose: Choose) -> None:
    del program[some(program, choose, Wait)]


@program_damage("is a collective")
def compute_a_collective(program: list[Action], choose: Choose) -> None:
    n = some(program, choose, Start)
    program[n : n + 2] = [Compute(program[n].operator)]


@program_damage("is not a collective")
def start_a_compute_operator(program: list[Action], choose: Choose) -> None:
    n = some(program, choose, Compute)
    program[n : n + 1] = [Start(program[n].operator, Stream.COMPUTE), Wait(program[n].operator)]


@program_damage("is not a collective")
def wait_for_a_compute_operator(program: list[Action], choose: Choose) -> None:
    n = some(program, choose, Compute)
    program.insert(choose(n, len(program)), Wait(program[n].operator))


@program_damage("is read before it is there")
def read_before_it_is_written(program: list[Action], choose: Choose) -> None:
    """Move what makes a value behind the first action that reads it."""
    n = some(program, choose, Compute)
    written = set(OPERATORS[program[n].operator].writes)
    readers = [
        m
        for m, action in enumerate(program)
        if not isinstance(action, Wait) and written & set(OPERATORS[action.operator].reads)
    ]
    assume(readers)
    program.insert(choose(readers[0], len(program) - 1), program.pop(n))


@pytest.mark.parametrize("name", PROGRAM_DAMAGES)
@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_a_damaged_program_is_refused(name: str, data: st.DataObject) -> None:
    function, cause = PROGRAM_DAMAGES[name]
    schedule = named_schedule("folded", 2, 2, 2)
    key = data.draw(st.sampled_from(sorted(schedule.programs)))
    program = [*schedule.programs[key]]
    function(program, lambda low, high: data.draw(st.integers(low, high)))
    damaged = replace(schedule, programs={**schedule.programs, key: tuple(program)})
    message = message_of(damaged, layout_for("folded", 2, 2))
    assert message.startswith(f"schedule folded, program {key[0]} {key[1].value}: ")
    assert re.search(cause, message), message


@pytest.mark.parametrize("key", sorted(named_schedule("megatron", 2, 2, 2).programs))
def test_a_missing_program_is_refused(key: tuple[str, Direction]) -> None:
    schedule = named_schedule("megatron", 2, 2, 2)
    programs = {k: program for k, program in schedule.programs.items() if k != key}
    message = message_of(replace(schedule, programs=programs), layout_for("megatron", 2, 2))
    assert message == f"schedule megatron: program {key[0]} {key[1].value} is missing"


def test_a_program_for_no_part_is_refused() -> None:
    schedule = named_schedule("megatron", 2, 2, 2)
    programs = {**schedule.programs, ("encoder", Direction.FORWARD): (Compute("norm"),)}
    message = message_of(replace(schedule, programs=programs), layout_for("megatron", 2, 2))
    assert message == "schedule megatron: program encoder F is for no part of the model"
