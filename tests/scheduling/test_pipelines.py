"""The order of blocks: what is in flight, deadlock-free and valid."""

import pytest

from braid.scheduling.schedule.operations import (
    Direction,
)
from braid.scheduling.schedule.schedule import Block
from braid.scheduling.schedule.text import parse, write
from braid.scheduling.schedule.timeline import in_flight, unit_timeline
from tests.scheduling.cases import (
    HOPS,
    ORDERS,
    PAIRED_W,
    SIZES,
    STAGES,
    linked_schedule,
    named_schedule,
    sizes_of,
)

NAMES = pytest.mark.parametrize("name", sorted(ORDERS))


# -- all schedules -----------------------------------------------------------------------------------------


@NAMES
@STAGES
def test_training_schedules_are_valid(name: str, p: int) -> None:
    for m in sizes_of(name, p):
        schedule = linked_schedule(name, p, m).schedule
        assert schedule.trains
        assert not unit_timeline(schedule).stuck


# -- memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "m"), SIZES)
@HOPS
def test_what_pipelines_hold(p: int, m: int, hop: int) -> None:
    """1F1B what is ahead, in stages; the W in half-stages as much as its first stage, there on every stage;
    the eager W hop (p-1) + 1 journeys from a forward pass to its backward pass, two half-stages each."""
    wanted = {name: [min(p - i, m) for i in range(p)] for name in ("megatron", "intra_batch")}
    wanted["megatron:eager_1f1b"] = [min(2 * (p - i) - 1, m) for i in range(p)]
    for name in ("megatron:folded", *PAIRED_W):
        wanted[name] = [min(2 * p, m + 1 + i, 2 * m) for i in range(p)]
    eager = f"braid:eager_w/{hop}"
    wanted[eager] = [min(2 * (hop * (p - 1) + 1), m + 1 + hop * i, 2 * m) for i in range(p)]
    for name, held in wanted.items():
        schedule = (
            named_schedule("braid:eager_w", p, m, hop=hop) if name == eager else named_schedule(name, p, m)
        )
        assert [in_flight(schedule, i) for i in range(p)] == held, name


@STAGES
def test_memory_of_the_other_pipelines(p: int) -> None:
    """Half-stages of activations.

    Interleaved 1F1B holds on its first stage what it runs ahead, 3p-2 half-stages, and the one it begins.
    """
    limits = {"zbv": 2 * p, "dualpipev": 2 * p + 1, "braid:v": 2 * p + 1, "interleaved": 3 * p - 1}
    for name, limit in limits.items():
        peaks = [
            in_flight(named_schedule(name, p, m), stage) for m in sizes_of(name, p, 18) for stage in range(p)
        ]
        assert max(peaks) <= limit, name
    steady = named_schedule("interleaved", p, 4 * p)
    assert [in_flight(steady, stage) for stage in range(p)] == [3 * p - 1 - 2 * stage for stage in range(p)]


# -- twins -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [3, 4, 9])
def test_no_pass_is_alone_where_there_is_another(m: int) -> None:
    schedule = linked_schedule("braid:twins", 1, m, 2).schedule
    blocks = [i for i in schedule.stages[0] if isinstance(i, Block)]
    kinds = ["".join(one.kind.value for one in block.passes) for block in blocks]
    assert kinds == ["FF", *["FB"] * (m - 2), *(["B", "B"] if m % 2 else ["BB"])]
    ran = [str(one.whole).rstrip("b") for one in schedule.passes[0]]
    assert sorted(ran) == sorted(f"{letter}{n}.0" for letter in "FB" for n in range(m))
    gradients = [one.micro_batch for one in schedule.passes[0] if one.direction is Direction.BACKWARD]
    assert gradients == sorted(gradients), "gradients are added up in the order of micro-batches"
    assert all(len({one.strand for one in block.passes}) == len(block.passes) for block in blocks)
    assert in_flight(schedule, 0) == 2
    assert parse(write(schedule)) == schedule
    assert unit_timeline(schedule).length == 3 * m
