"""Programs of operators that are wrong, a fault for every rule: validation says where and why."""

import re
from dataclasses import replace
from typing import Any

import pytest

from braid.scheduling.lowering.fixed_orders import by_turns
from braid.scheduling.lowering.programs import program_of
from braid.scheduling.schedule import Barrier, Compute, Program, Schedule, Sides
from braid.scheduling.schedule_text import parse, parse_sides, write
from tests.scheduling.cases import code_of, layout_for, named_schedule
from tests.scheduling.test_validate import PARTS, message_of

BASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "plain": ("megatron", 2, 4, {}),
    "split": ("zbv", 2, 4, {}),
    "paired": ("braid", 2, 6, {}),
    "leaving": ("braid", 2, 6, {"ends": True}),
    "twins": ("braid:twins", 1, 4, {}),
}
"""Valid schedules of two tensor-parallel ranks: name, stages, micro-batches, what else."""

FAULTS = """
plain F:layer: compute qkv -> : attention needs qkv, which is not done yet
plain F:layer: compute mlp_residual -> : attention_norm needs mlp_residual, which is not done yet
plain F:layer: compute qkv -> compute qkv / compute qkv : F0.0 runs twice (qkv has run)
plain F:layer: wait mlp_gather -> wait mlp_gather / start mlp_gather on intra : F0.0 runs twice
plain F:layer: wait mlp_gather -> wait mlp_gather / wait mlp_gather : F0.0 runs twice (mlp_gather has run)
plain F:layer: compute qkv -> compute nothing : the graph has no operator 'nothing'
plain F:layer: start mlp_gather on intra -> start mlp_gather on compute : no collective runs on
plain F:layer: start mlp_gather on intra -> : mlp_gather is not started
plain F:layer: wait mlp_gather -> : mlp_in needs mlp_gather, which is not done yet
plain F:layer: wait mlp_scatter -> : mlp_residual needs mlp_scatter, which is not done yet
plain F:layer: start mlp_gather on intra -> compute mlp_gather : mlp_gather is a collective
plain F:layer: compute qkv -> start qkv on intra / wait qkv : qkv is not a collective
plain F:layer: compute qkv -> compute qkv / wait qkv : qkv is not a collective
plain B:layer: compute qkv.wgrad -> : qkv.wgrad of B0.0 never runs
plain B:layer: compute qkv.dgrad -> : attention_gather.grad needs qkv.dgrad, which is not done yet
split I:layer: compute qkv.dgrad -> compute qkv.dgrad / compute qkv.wgrad : runs twice
split W:layer: compute qkv.wgrad -> compute qkv.wgrad / compute qkv.dgrad : runs twice
paired F:layer|B:layer: compute 0:qkv -> compute 1:qkv : the graph has no operator 'qkv'
paired F:layer|B:layer: compute 1:qkv.wgrad -> : never runs
leaving F:layer|B:layer|L:layer: compute 2:qkv.wgrad -> : never runs
leaving F:layer|B:layer|L:layer: compute 0:qkv -> compute 0:qkv / compute 2:qkv.dgrad : runs twice
leaving F:layer|B:layer|L:layer: compute 1:qkv.dgrad -> compute 1:qkv.dgrad / compute 1:qkv.wgrad : runs twice
leaving F:layer|B:layer|L:layer: compute 1:qkv.dgrad -> compute 2:qkv.dgrad : which is not done yet
twins F:layer|F:layer: compute 1:qkv -> compute 0:qkv : F0.0 runs twice (qkv has run)
twins B:layer|B:layer: compute 0:qkv.wgrad -> & \
compute 1:qkv.wgrad -> compute 1:qkv.wgrad / compute 0:qkv.wgrad \
: gradients are added up in the order of micro-batches
"""
"""Base and program: the line that stands there -> lines in its place (& more of both) : the cause."""


@pytest.mark.parametrize("fault", FAULTS.replace("\\\n", "").strip().splitlines())
def test_a_faulty_program_is_refused(fault: str) -> None:
    where, _, rest = fault.partition(": ")
    base, sides = where.split()
    edits, _, cause = rest.rpartition(" : ")
    name, stages, micro_batches, more = BASES[base]
    before, header, text = write(named_schedule(name, stages, micro_batches, 2, **more)).partition(
        f"program {sides}\n"
    )
    for edit in edits.split(" & "):
        old, _, new = edit.partition(" ->")
        assert f"  {old}\n" in text
        lines = "".join(f"  {line.strip()}\n" for line in new.split(" / ") if line)
        text = text.replace(f"  {old}\n", lines, 1)
    message = message_of(parse(before + header + text), layout_for(name, stages, 2)).splitlines()[0]
    assert re.match(rf"schedule {name}, stage ., at |schedule {name}: program {re.escape(sides)}: ", message)
    assert cause in message


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


@pytest.mark.parametrize(
    ("name", "ends", "sides", "cause"),
    [
        ("megatron", False, "B:head", r"at B0\.1: program B:head is missing"),
        ("megatron", False, "F:layer", r"at F0\.0: program F:layer is missing"),
        ("zbv", False, "I:layer", r"at I\d\.\d: program I:layer is missing"),
        ("zbv", False, "W:embedding", r"at W\d\.0: program W:embedding is missing"),
        ("dualpipev", False, "F:layer|B:layer", r"at \[F.*B.*\]: no program is for F beside B"),
        ("braid", True, "F:layer|B:layer|L:layer", r"at \[F.*B.*\]: no program is for F beside B"),
    ],
)
def test_a_missing_program_is_refused(name: str, ends: bool, sides: str, cause: str) -> None:
    schedule = without(named_schedule(name, 2, 4, 2, ends=ends), parse_sides(sides))
    message = message_of(schedule, layout_for(name, 2, 2)).splitlines()[0]
    assert re.fullmatch(rf"schedule {name}, stage ., {cause}", message)
