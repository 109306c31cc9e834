"""The order of blocks: every block once, what is in flight, deadlock-free and valid."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.scheduling.generate.lower import validation_schedule
from braid.scheduling.generate.pipelines import one_forward_one_backward, sub_batches
from braid.scheduling.mesh.layout import ParallelLayout, Placement
from braid.scheduling.schedule.operations import (
    Compute,
    Gather,
    Pass,
    PassKind,
    Reduce,
    Start,
    Step,
    Strand,
    Wait,
)
from braid.scheduling.schedule.schedule import Block, Prefetch, Schedule, passes_in
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
    model_for,
    model_parts,
    named_schedule,
    reduced_early,
    sizes_of,
    valid_schedules,
)

FORWARD, BACKWARD = PassKind.FORWARD, PassKind.BACKWARD
NAMES = pytest.mark.parametrize("name", sorted(ORDERS))


def assert_complete(schedule: Schedule, layout: ParallelLayout, kinds: list[PassKind]) -> None:
    """Every pass runs once on the stage of its chunk: in one go, or input and then weight gradients."""
    chunks_of: dict[tuple[PassKind, int], list[int]] = {
        (kind, m): [] for kind in kinds for m in range(schedule.micro_batches)
    }
    for stage in range(layout.pp):
        order = [one for one in schedule.passes[stage] if one.kind is not PassKind.END]
        inputs = [one.whole for one in order if one.kind is PassKind.INPUT]
        weights = [one.whole for one in order if one.kind is PassKind.WEIGHT]
        assert Counter(inputs) == Counter(weights)
        for one in order:
            assert layout.stage_of(one.chunk) == stage
            if one.kind is not PassKind.WEIGHT:
                chunks_of[one.whole.kind, one.micro_batch].append(one.chunk)
    for m in range(schedule.micro_batches):
        for kind in kinds:
            assert sorted(chunks_of[kind, m]) == list(range(layout.chunks))


# -- all schedules -----------------------------------------------------------------------------------------


@NAMES
@STAGES
def test_training_schedules_are_complete_and_valid(name: str, p: int) -> None:
    for m in sizes_of(name, p):
        layout, schedule = layout_for(name, p), linked_schedule(name, p, m).schedule
        assert schedule.trains
        assert_complete(schedule, layout, [FORWARD, BACKWARD])
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


@NAMES
@pytest.mark.parametrize("zero", [2, 3])
def test_gradients_in_shares_are_summed_in_every_block_that_ends_a_pass(name: str, zero: int) -> None:
    """Over tp, then over replicas; the waits for what is under way come behind all blocks."""
    schedule = named_schedule(name, 2, 4, 2, zero=zero)
    for number, stage in enumerate(schedule.stages):
        for instruction in stage:
            ended = dict.fromkeys(one.chunk for one in passes_in(instruction) if one.kind.value in "BWL")
            sums = instruction.sums if isinstance(instruction, Block) else ()
            assert sums == tuple(Reduce(chunk, axis) for chunk in ended for axis in ("tp", "dp"))
        last = max(n for n, i in enumerate(stage) if isinstance(i, Block))
        chunks = layout_for(name, 2, 2, 2, zero).chunks_of(number)
        waits = [n for n, i in enumerate(stage) for c in chunks if i == Wait(Reduce(c, "dp"))]
        assert len(waits) == len(chunks)
        assert min(waits) > last
        assert not [i for i in stage for c in chunks if i == Start(Reduce(c, "dp"))]


@NAMES
@pytest.mark.parametrize("zero", range(4))
def test_parameters_are_gathered_where_they_are_read(name: str, zero: int) -> None:
    """In the first block that reads a chunk's, with ZeRO 3 in every one; never for weight gradients.

    Where sums begin early, gathers do, too: in the step before, unless parameters are in shares.
    """
    schedule = named_schedule(name, 2, 4, 2, zero=zero, dp=2)
    for stage in schedule.stages:
        place = len(stage) - 1 if kind_of(name).early_sums and zero < 3 else 0
        assert [n for n, i in enumerate(stage) if isinstance(i, Prefetch)] == [place] * bool(zero)
        assert Compute(Step()) in stage[-2:]
        there: set[int] = set()
        for block in (i for i in stage if isinstance(i, Block)):
            read = dict.fromkeys(one.chunk for one in block.passes if one.kind is not PassKind.WEIGHT)
            wanted = [chunk for chunk in read if chunk not in there] if zero else []
            assert block.gathers == tuple(Gather(chunk, "dp") for chunk in wanted)
            there |= set(wanted) if zero < 3 else set()


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 5, 12])
def test_first_and_last_passes_go_together_and_1f1b_between(count: int, m: int) -> None:
    """On one stage; on several it is 1F1B."""
    (order,) = named_schedule(f"braid:together_{count}", 1, m).passes
    together = min(count, m)
    expected = [Pass(FORWARD, n, 0) for n in range(together)]
    for n in range(m - together):
        expected += [Pass(BACKWARD, n, 0), Pass(FORWARD, n + together, 0)]
    expected += [Pass(BACKWARD, n, 0) for n in range(m - together, m)]
    assert [*order] == expected
    sizes = [len(passes_in(i)) for i in named_schedule(f"braid:together_{count}", 1, m).stages[0]]
    assert [n for n in sizes if n] == [together, *[1] * (2 * (m - together)), together]
    several_stages = named_schedule(f"braid:together_{count}", 2, m), named_schedule("ddp", 2, m)
    assert several_stages[0].stages == several_stages[1].stages


@pytest.mark.parametrize("name", ["megatron", "megatron:folded", "interleaved"])
@STAGES
def test_forward_only_schedules_are_complete_and_valid(name: str, p: int) -> None:
    """One for each placement, from which alone they follow."""
    for m in range(1, 13):
        layout = layout_for(name, p)
        schedule = validation_schedule(model_for(layout), layout, m, model_parts())
        assert not schedule.trains
        assert_complete(schedule, layout, [FORWARD])
        code_of(schedule, layout)
        # A micro-batch passes p stages, or p stages twice; then one more follows in every turn.
        turns = layout.chunks // p
        assert unit_timeline(schedule).length >= turns * m + p - 1
        if layout.placement is Placement.LINEAR:
            assert unit_timeline(schedule).length == m + p - 1


@given(valid_schedules(min_stages=2))
@settings(max_examples=60, deadline=None)
def test_time_respects_data(case: tuple[Schedule, ParallelLayout]) -> None:
    schedule, layout = case
    timeline = unit_timeline(schedule)
    starts: dict[Pass, int] = {}
    ends: dict[Pass, int] = {}
    for stage in timeline.stages:
        for timed in stage:
            for one in timed.block.passes:
                if one.kind.travels:
                    starts[one.whole], ends[one.whole] = timed.start, timed.end
    for one in ends:
        before = one.before(layout)
        if before is not None:
            assert starts[one] >= ends[before]
    for stage in timeline.stages:
        assert all(a.end <= b.start for a, b in pairwise(stage))


@pytest.mark.parametrize("m", [1, 6, 7])
def test_sub_batches_go_side_by_side_in_every_pass(m: int) -> None:
    """The blocks are those of half as many micro-batches, one of which is a pair."""
    layout = ParallelLayout(pp=2)
    pairs = one_forward_one_backward(layout, -(-m // 2))
    for stage, single in zip(sub_batches(layout, m), pairs, strict=True):
        for block, (one,) in zip(stage, (block.passes for block in single), strict=True):
            assert {(other.kind, other.chunk) for other in block.passes} == {(one.kind, one.chunk)}
            first = 2 * one.micro_batch
            assert [o.micro_batch for o in block.passes] == [n for n in (first, first + 1) if n < m]
            assert len({other.strand for other in block.passes}) == len(block.passes)


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


# -- neighbours --------------------------------------------------------------------------------------------


@given(
    st.integers(1, 6),
    st.sampled_from(Placement),
    st.sampled_from([FORWARD, BACKWARD]),
    st.integers(0, 9),
    st.sampled_from(Strand),
)
def test_after_and_before_are_inverse(
    p: int, placement: Placement, kind: PassKind, micro_batch: int, strand: Strand
) -> None:
    layout = ParallelLayout(pp=p, placement=placement)
    chain = [Pass(kind, micro_batch, 0 if kind is FORWARD else layout.chunks - 1, strand)]
    while (after := chain[-1].after(layout)) is not None:
        assert after.before(layout) == chain[-1]
        chain.append(after)
    assert chain[0].before(layout) is None
    assert sorted(one.chunk for one in chain) == list(range(layout.chunks))
    assert {(one.kind, one.micro_batch, one.strand) for one in chain} == {(kind, micro_batch, strand)}
