"""What validation accepts runs, and what it refuses does not: compared with a model of the executor."""

from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from braid.scheduling.mesh.layout import ParallelLayout
from braid.scheduling.schedule.operations import Gather, Pass, PassKind, Reduce, Strand
from braid.scheduling.schedule.schedule import Block, Instruction, Program, Schedule, Sides, passes_in
from braid.scheduling.schedule.text import write
from braid.scheduling.schedule.validate import ScheduleError
from tests.scheduling.cases import (
    ORDERS,
    SEARCHED,
    code_of,
    exists,
    layout_for,
    named_schedule,
    reduced_early,
    valid_schedules,
    with_stage,
)
from tests.scheduling.executor_on_names import runs

pytestmark = pytest.mark.slow


def refusal(schedule: Schedule, layout: ParallelLayout) -> str | None:
    """Why validation refuses a schedule, or None."""
    try:
        code_of(schedule, layout)
    except ScheduleError as error:
        return str(error)
    return None


def changed(block: Block, data: st.DataObject) -> list[Block]:
    """Other blocks in the place of one: taken apart or mixed up, split otherwise, with another end."""
    other = {Strand.ALPHA: Strand.BETA, Strand.BETA: Strand.ALPHA}
    passes = block.passes
    first = passes[0]
    options = [
        [with_passes(block, first._replace(strand=other[first.strand]), *passes[1:])],
        [with_passes(block, *passes, end) for end in [data.draw(ends_of(first.micro_batch, first.chunk))]],
    ]
    if len(passes) > 1:
        options += [
            [with_passes(block, one) for one in passes],
            [with_passes(block, one) for one in reversed(passes)],
            [with_passes(block, *passes[::-1])],
            [with_passes(block, *passes[:-1])],
            [with_passes(block, *passes[1:])],
        ]
    elif first.forward:
        options += [[block, block]]
    else:
        kinds = st.sampled_from([PassKind.BACKWARD, PassKind.INPUT, PassKind.WEIGHT])
        split = data.draw(st.lists(kinds, min_size=1, max_size=2))
        options += [[with_passes(block, first._replace(kind=kind)) for kind in split]]
    return data.draw(st.sampled_from(options))


def with_passes(block: Block, *passes: Pass) -> Block:
    """A block of these passes instead, with what the other one gathers and sums of their chunks."""
    reading = {one.chunk for one in passes if one.kind is not PassKind.WEIGHT}
    adding = {one.chunk for one in passes if not one.forward}
    return Block(
        passes,
        tuple(one for one in block.sums if one.chunk in adding),
        tuple(one for one in block.gathers if one.chunk in reading),
    )


def shared_otherwise(block: Block, chunks: int, data: st.DataObject) -> Block:
    """The block with a sum or a gather left out, repeated or of something else, or with sums mixed up."""
    chunk, axis = data.draw(st.integers(0, chunks - 1)), data.draw(st.sampled_from(["tp", "dp"]))
    sums, gathers = block.sums, block.gathers
    options = [
        (sums, (*gathers, Gather(chunk, axis))),
        ((*sums, Reduce(chunk, axis)), gathers),
        (sums[::-1], gathers),
        (sums[1:], gathers),
        (sums[:-1], gathers),
        (sums, gathers[1:]),
        (sums, gathers[::-1]),
    ]
    return Block(block.passes, *data.draw(st.sampled_from(options)))


def ends_of(micro_batch: int, chunk: int) -> st.SearchStrategy[Pass]:
    """An end of a micro-batch that is a little ahead."""
    return st.builds(
        Pass,
        st.just(PassKind.END),
        st.integers(max(0, micro_batch - 3), micro_batch),
        st.just(chunk),
        st.sampled_from(Strand),
    )


def edited(schedule: Schedule, data: st.DataObject) -> Schedule:
    """The schedule after a random change of one stage's list."""
    stage = data.draw(st.integers(0, len(schedule.stages) - 1))
    instructions = [*schedule.stages[stage]]
    place = st.integers(0, len(instructions) - 1)
    n, m = data.draw(place), data.draw(place)
    kinds = ["move", "move near", "swap", "delete", "repeat", "change", "share", "join", "name an end"]
    match data.draw(st.sampled_from(kinds)):
        case "move":
            instructions.insert(m, instructions.pop(n))
        case "move near":
            instructions.insert(max(0, n + data.draw(st.integers(-3, 3))), instructions.pop(n))
        case "swap":
            instructions[n], instructions[m] = instructions[m], instructions[n]
        case "delete":
            del instructions[n]
        case "repeat":
            instructions.insert(m, instructions[n])
        case "change":
            k = data.draw(st.sampled_from(blocks_of(instructions) or [n]))
            if isinstance(block := instructions[k], Block):
                instructions[k : k + 1] = changed(block, data)
        case "share":
            k = data.draw(st.sampled_from(blocks_of(instructions) or [n]))
            if isinstance(block := instructions[k], Block):
                instructions[k] = shared_otherwise(block, schedule.chunks, data)
        case "name an end":
            name_an_end(instructions, data)
        case _:
            together = blocks_of(instructions[:-1])
            k = data.draw(st.sampled_from(together)) if together else len(instructions)
            match instructions[k : k + 2]:
                case [Block() as one, Block() as two]:
                    passes = one.passes + two.passes, two.passes + one.passes
                    sums = tuple(dict.fromkeys((*one.sums, *two.sums)))
                    gathers = tuple(dict.fromkeys((*one.gathers, *two.gathers)))
                    instructions[k : k + 2] = [Block(data.draw(st.sampled_from(passes)), sums, gathers)]
    return with_stage(schedule, stage, instructions)


def blocks_of(instructions: list[Instruction]) -> list[int]:
    """The positions of blocks."""
    return [n for n, i in enumerate(instructions) if isinstance(i, Block)]


def name_an_end(instructions: list[Instruction], data: st.DataObject) -> None:
    """Take the end of some paired backward pass up in another block, as a rule a later one."""
    pairs = [n for n, i in enumerate(instructions) if [o.kind.value for o in passes_in(i)][:2] == ["F", "B"]]
    if not pairs:
        return
    n = data.draw(st.sampled_from(pairs))
    end = passes_in(instructions[n])[1]._replace(kind=PassKind.END)
    for k in blocks_of(instructions):
        block = instructions[k]
        assert isinstance(block, Block)
        rest = tuple(one for one in block.passes if one != end)
        if rest:
            instructions[k] = with_passes(block, *rest)
    takers = [
        k
        for k in blocks_of(instructions)
        if k >= n - 1 and PassKind.END not in {one.kind for one in passes_in(instructions[k])}
    ]
    if takers:
        k = data.draw(st.sampled_from(takers))
        taker, left = instructions[k], instructions[n]
        assert isinstance(taker, Block)
        assert isinstance(left, Block)
        sums = tuple(dict.fromkeys((*taker.sums, *(one for one in left.sums if one.chunk == end.chunk))))
        gathers = [one for one in left.gathers if one.chunk == end.chunk]
        instructions[k] = Block((*taker.passes, end), sums, tuple(dict.fromkeys((*taker.gathers, *gathers))))


CASES = st.one_of(valid_schedules(max_stages=3), valid_schedules(max_stages=3, names=SEARCHED, ends=True))


@given(CASES, st.data())
@settings(max_examples=200, deadline=None)
def test_accepted_is_what_runs(case: tuple[Schedule, ParallelLayout], data: st.DataObject) -> None:
    schedule, layout = case
    for _ in range(data.draw(st.integers(0, 3))):
        schedule = edited(schedule, data)
    schedule = with_needed_programs(schedule)
    refused, cause = refusal(schedule, layout), runs(schedule, layout)
    ends = any(one.kind is PassKind.END for n in range(layout.pp) for one in schedule.passes[n])
    event(f"{'refused' if refused else 'accepted'}{', with ends' if ends else ''}")
    assert bool(refused) == bool(cause), f"validation: {refused}\nthe model: {cause}\n{write(schedule)}"


ALL_PROGRAMS: dict[Sides, Program] = {
    **named_schedule("dualpipev", 1, 2, 2).programs,
    **named_schedule("braid:twins", 1, 4, 2).programs,
    **named_schedule("braid", 2, 4, 2, ends=True).programs,
}


def with_needed_programs(schedule: Schedule) -> Schedule:
    """The schedule with programs of what its blocks bring together, and only of that.

    Where units are longer than one part, of its own: their names are of this model's chunks.
    """
    blocks = [i for stage in schedule.stages for i in stage if isinstance(i, Block)]
    kinds = {kinds_of(block.passes) for block in blocks}
    kinds |= {(kind,) for together in kinds for kind in together}
    ends = any(one.kind is PassKind.END for block in blocks for one in block.passes)
    paired = (PassKind.FORWARD, PassKind.BACKWARD)
    return replace(
        schedule,
        programs={
            sides: program
            for sides, program in (schedule.programs if schedule.unit_layers else ALL_PROGRAMS).items()
            if kinds_of(sides) in kinds and (kinds_of(sides) != paired or (len(sides) == 3) is ends)
        },
    )


def kinds_of(passes: tuple[Pass, ...] | Sides) -> tuple[PassKind, ...]:
    """The kinds of passes, ends left out."""
    return tuple(one.kind for one in passes if one.kind is not PassKind.END)


@pytest.mark.parametrize(("name", "ends"), [*((name, False) for name in ORDERS), ("braid", True)])
@pytest.mark.parametrize("zero", range(4))
def test_every_named_schedule_runs(name: str, zero: int, ends: bool) -> None:
    for p in range(1, 5):
        for m in range(1, 2 * p + 3):
            if exists(name, p, m):
                schedule = named_schedule(name, p, m, 2, zero=zero, ends=ends)
                layout = layout_for(name, p, 2, 1 + bool(zero), zero)
                for one in (schedule, reduced_early(schedule, layout)):
                    assert (runs(one, layout), refusal(one, layout)) == (None, None)
