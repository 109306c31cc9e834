"""Damaged operator programs: `validate` finds what is broken and says where and why."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from braid.scheduling.operators import Pass, Stream
from braid.scheduling.schedule import (
    Barrier,
    Compute,
    Direction,
    Gradients,
    Late,
    Schedule,
    Start,
    Wait,
)
from braid.scheduling.validate import validate
from tests.scheduling.cases import PAIRED, SPLIT, layout_for, named_schedule
from tests.scheduling.damages import PARTS, message_of

OPERATORS = {
    op.name: op
    for part in PARTS.values()
    for graph in (part.forward, part.backward)
    for op in graph.operators
}
EVERYWHERE = ("F", "B", "I", "W", "layer|layer")
"""Kinds of programs: passes, split backward passes, pairs."""


class Place:
    """A program, with what a damage needs: its list of actions, and choices."""

    def __init__(self, data: st.DataObject, kind: str, actions: tuple[Any, ...]) -> None:
        self._data, self.kind, self.list = data, kind, [*actions]

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


@damage("is read before it is there|never finish|is not started")
def drop_an_action(at: Place) -> None:
    del at.list[at.some()]


@damage("is (done|started) already")
def repeat_an_action(at: Place) -> None:
    n = at.some()
    at.list.insert(at.number(n, len(at.list)), at.list[n])


@damage("the graph has no operator 'nothing'")
def run_an_unknown_operator(at: Place) -> None:
    n = at.some()
    at.list.insert(n, replace(at.list[n], operator="nothing"))


@damage("runs on intra", ("F", "B", "I", "layer|layer"))
def use_another_stream(at: Place) -> None:
    n = at.some(Start)
    at.list[n] = replace(at.list[n], stream=[Stream.INTER, Stream.COMPUTE][at.number(0, 1)])


@damage("is not started", ("F", "B", "I", "layer|layer"))
def wait_before_the_start(at: Place) -> None:
    wait = at.list.pop(at.some(Wait))
    start = next(
        n
        for n, i in enumerate(at.list)
        if isinstance(i, Start) and (i.operator, i.side) == (wait.operator, wait.side)
    )
    at.list.insert(at.number(0, start), wait)


@damage("is read before it is there|never finish", ("F", "B", "I", "layer|layer"))
def do_not_wait(at: Place) -> None:
    del at.list[at.some(Wait)]


@damage("is a collective", ("F", "B", "I", "layer|layer"))
def compute_a_collective(at: Place) -> None:
    n = at.some(Start)
    at.list[n] = Compute(at.list[n].operator, at.list[n].side)


@damage("is not a collective")
def start_a_compute_operator(at: Place) -> None:
    n = at.some(Compute)
    one = at.list[n]
    at.list[n : n + 1] = [Start(one.operator, Stream.COMPUTE, one.side), Wait(one.operator, one.side)]


@damage("is not a collective")
def wait_for_a_compute_operator(at: Place) -> None:
    n = at.some(Compute)
    at.list.insert(at.number(n, len(at.list)), Wait(at.list[n].operator, at.list[n].side))


@damage("is read before it is there", ("F", "B", "I", "layer|layer"))
def read_before_it_is_written(at: Place) -> None:
    """Move what makes a value behind the first action that reads it."""
    n = at.some(Compute)
    one = at.list[n]
    written = set(OPERATORS[one.operator].writes)
    readers = [
        m
        for m, action in enumerate(at.list)
        if isinstance(action, Compute | Start)
        and action.side is one.side
        and written & set(OPERATORS[action.operator].reads)
    ]
    assume(readers)
    at.list.insert(at.number(readers[0], len(at.list) - 1), at.list.pop(n))


@damage("only paired programs name a pass", ("F", "B", "I", "W"))
def name_a_pass_where_there_is_one(at: Place) -> None:
    n = at.some()
    at.list[n] = replace(at.list[n], side=[*Direction][at.number(0, 1)])


@damage("a paired program names the pass, F:.* or B:", ("layer|layer",))
def name_no_pass(at: Place) -> None:
    n = at.some()
    at.list[n] = replace(at.list[n], side=None)


@damage("the graph has no operator", ("layer|layer",))
def name_the_other_pass(at: Place) -> None:
    n = at.some()
    other = Direction.FORWARD if at.list[n].side is Direction.BACKWARD else Direction.BACKWARD
    at.list[n] = replace(at.list[n], side=other)


@damage("is read before it is there", ("layer|layer",))
def start_with_the_last_action_of_a_pass(at: Place) -> None:
    side = [*Direction][at.number(0, 1)]
    last = max(n for n, i in enumerate(at.list) if isinstance(i, Compute) and i.side is side)
    at.list.insert(0, at.list.pop(last))


@damage("is done already", ("layer|layer",))
def leave_weight_gradients_to_the_next_layer_and_compute_them(at: Place) -> None:
    n = at.some(Compute, where=lambda i: OPERATORS[i.operator].phase is Pass.WEIGHT_GRADIENT)
    at.list.insert(at.number(0, len(at.list)), replace(at.list[n], side=Late.BACKWARD))


@damage("is read before it is there|so it cannot be put off", ("layer|layer",))
def leave_something_else_to_the_next_layer(at: Place) -> None:
    """What the rest of the pass needs, or the layer before."""
    n = at.some(
        Compute,
        where=lambda i: (
            i.side is Direction.BACKWARD and OPERATORS[i.operator].phase is not Pass.WEIGHT_GRADIENT
        ),
    )
    at.list[n] = replace(at.list[n], side=Late.BACKWARD)


@damage("the graph has no operator", ("I",))
def compute_weight_gradients_with_those_of_the_input(at: Place) -> None:
    names = [op.name for op in OPERATORS.values() if op.phase is Pass.WEIGHT_GRADIENT]
    at.list.insert(at.number(0, len(at.list)), Compute(names[at.number(0, len(names) - 1)]))


@damage("the graph has no operator", ("W",))
def compute_input_gradients_with_those_of_the_weights(at: Place) -> None:
    names = [op.name for op in OPERATORS.values() if op.phase is Pass.INPUT_GRADIENT]
    at.list.insert(at.number(0, len(at.list)), Compute(names[at.number(0, len(names) - 1)]))


def with_program(schedule: Schedule, kind: str, part: str, actions: tuple[Any, ...]) -> Schedule:
    """The schedule with another program of a kind."""
    match kind:
        case "I" | "W":
            return replace(schedule, splits={**schedule.splits, (part, Gradients(kind)): actions})
        case "F" | "B":
            return replace(schedule, programs={**schedule.programs, (part, Direction(kind)): actions})
        case _:
            return replace(schedule, pairs={("layer", "layer"): actions})


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, wrong in PROGRAM_DAMAGES.items() for kind in wrong.kinds]
)
def test_a_damaged_program_is_refused(name: str, kind: str) -> None:
    wrong, tried = PROGRAM_DAMAGES[name], set()

    @given(data=st.data())
    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
    def find(data: st.DataObject) -> None:
        holders = {"I": SPLIT, "W": SPLIT, "layer|layer": PAIRED}.get(kind, ("folded", "braid_v"))
        schedule = named_schedule(data.draw(st.sampled_from(holders)), 2, 4, 2)
        part = "layer" if "|" in kind else data.draw(st.sampled_from(sorted(PARTS)))
        programs: dict[Any, tuple[Any, ...]] = {
            **{(p, d.value): actions for (p, d), actions in schedule.programs.items()},
            **{(p, g.value): actions for (p, g), actions in schedule.splits.items()},
            **{("layer", "|".join(pair)): actions for pair, actions in schedule.pairs.items()},
        }
        at = Place(data, kind, programs[part, kind])
        wrong.breaks(at)
        damaged = with_program(schedule, kind, part, tuple(at.list))
        message = message_of(damaged, layout_for(schedule.name, 2, 2))
        label = kind if "|" in kind else f"{part} {kind}"
        assert message.startswith(f"schedule {schedule.name}, program {label}: "), message
        assert re.search(wrong.cause, message), message
        tried.add(message)

    find()
    assert tried


@pytest.mark.parametrize("name", ["dhelix", "bidirectional"])
def test_barriers_may_stand_anywhere(name: str) -> None:
    """They make a paired program slower, never wrong."""
    schedule = named_schedule(name, 2, 4, 2)
    program = schedule.pairs["layer", "layer"]
    assert Barrier() in program
    spread = tuple(action for one in program for action in (Barrier(), one))
    for actions in (spread, tuple(a for a in program if a != Barrier())):
        changed = replace(schedule, pairs={("layer", "layer"): actions})
        validate(changed, layout_for(name, 2, 2), PARTS)


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("part", sorted(PARTS))
@pytest.mark.parametrize("gradients", [Gradients.INPUT, Gradients.WEIGHT])
def test_a_missing_split_program_is_refused(name: str, part: str, gradients: Gradients) -> None:
    schedule = named_schedule(name, 2, 4, 2)
    splits = {key: program for key, program in schedule.splits.items() if key != (part, gradients)}
    message = message_of(replace(schedule, splits=splits), layout_for(name, 2, 2))
    assert message == f"schedule {name}: program {part} {gradients} is missing"


@pytest.mark.parametrize("name", PAIRED)
def test_a_missing_paired_program_is_refused(name: str) -> None:
    schedule = named_schedule(name, 2, 4, 2)
    message = message_of(replace(schedule, pairs={}), layout_for(name, 2, 2))
    assert message == f"schedule {name}: program layer|layer is missing"


def test_programs_that_nothing_uses_are_refused() -> None:
    plain, full = named_schedule("megatron", 2, 4, 2), named_schedule("dualpipev", 2, 4, 2)
    layout = layout_for("megatron", 2, 2)
    assert message_of(replace(plain, pairs=full.pairs), layout) == (
        "schedule megatron: program layer|layer is used by no block"
    )
    assert message_of(replace(plain, splits=full.splits), layout) == (
        "schedule megatron: program embedding I is used by no block"
    )
    for pair, what in (
        (("layer", "head"), "is used by no block"),
        (("layer", "encoder"), "is for no part of the model"),
    ):
        pairs = {**full.pairs, pair: full.pairs["layer", "layer"]}
        message = message_of(replace(full, pairs=pairs), layout_for("dualpipev", 2, 2))
        assert message == f"schedule dualpipev: program {'|'.join(pair)} {what}"
    splits = {**full.splits, ("encoder", Gradients.WEIGHT): ()}
    message = message_of(replace(full, splits=splits), layout_for("dualpipev", 2, 2))
    assert message == "schedule dualpipev: program encoder W is for no part of the model"


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
