"""The order of blocks: what is in flight, deadlock-free and valid."""

from itertools import pairwise

import pytest

from braid.scheduling.mesh.layout import Placement
from braid.scheduling.schedule.operations import (
    PassKind,
    Reduce,
    Start,
)
from braid.scheduling.schedule.schedule import Block, passes_in
from braid.scheduling.schedule.timeline import in_flight, unit_timeline
from tests.scheduling.cases import (
    HOPS,
    ORDERS,
    PAIRED,
    PAIRED_W,
    SEARCHED,
    SIZES,
    STAGES,
    code_of,
    kind_of,
    layout_for,
    linked_schedule,
    named_schedule,
    reduced_early,
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


@NAMES
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_schedules_of_shares_are_valid_and_so_are_early_sums(name: str, zero: int) -> None:
    for p in (1, 2, 3):
        layout = layout_for(name, p, 2, 2, zero)
        for m in sizes_of(name, p, 2 * p + 2):
            schedule = named_schedule(name, p, m, 2, zero=zero, dp=2)
            for one in (schedule, reduced_early(schedule, layout)):
                code_of(one, layout)


@pytest.mark.parametrize("name", SEARCHED)
@pytest.mark.parametrize("p", [1, 2, 4])
def test_ends_are_taken_up_by_the_next_block_that_can(name: str, p: int) -> None:
    """Nothing else of the schedule changes; every end is of a pass of the block before."""
    found = 0
    for m in sizes_of(name, p, 2 * p + 2):
        schedule = linked_schedule(name, p, m, 2, ends=True).schedule
        plain = named_schedule(name, p, m, 2)
        for stage, other in zip(schedule.stages, plain.stages, strict=True):
            blocks = [i.passes for i in stage if isinstance(i, Block)]
            for before, passes in pairwise(blocks):
                for end in (one for one in passes if one.kind is PassKind.END):
                    found += 1
                    assert end.whole in before
                    assert len(before) > 1
            movers = [tuple(o for o in passes if o.kind is not PassKind.END) for passes in blocks]
            assert movers == [i.passes for i in other if isinstance(i, Block)]
            assert [i for i in stage if not isinstance(i, Block)] == [
                i for i in other if not isinstance(i, Block)
            ]
    # On one straight chunk every block of two passes ends with the embedding's backward pass alone.
    assert found or name not in PAIRED or layout_for(name, p).placement is Placement.LINEAR


def test_gradients_are_summed_as_early_as_a_schedule_says() -> None:
    """Ours begin in the last block of a chunk, the others after all."""
    for name in ORDERS:
        stage = named_schedule(name, 2, 4, 2, dp=2).stages[0]
        last = {one.chunk: n for n, i in enumerate(stage) for one in passes_in(i)}
        begun = {one: n for n, i in enumerate(stage) if isinstance(i, Block) for one in i.sums}
        if kind_of(name).early_sums:
            assert begun == {Reduce(chunk, axis): n for chunk, n in last.items() for axis in ("tp", "dp")}
        else:
            assert not begun
            first = next(
                n for n, i in enumerate(stage) if isinstance(i, Start) and isinstance(i.what, Reduce)
            )
            assert first > max(last.values()), name


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
