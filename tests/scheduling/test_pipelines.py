"""The order of blocks: every block once, the bubble, what is in flight, deadlock-free and valid."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.scheduling.lowering.lower import predecessor, successor, training_schedule, validation_schedule
from braid.scheduling.lowering.named import SCHEDULES
from braid.scheduling.lowering.pipelines import folded_w, one_forward_one_backward
from braid.scheduling.schedule import Block, Direction, Schedule, Strand
from braid.scheduling.spec import ParallelLayout, Placement
from braid.scheduling.timeline import in_flight, unit_timeline
from braid.scheduling.validate import validate
from tests.scheduling.cases import layout_for, model_parts, named_schedule, valid_schedules

NAMES = pytest.mark.parametrize("name", sorted(SCHEDULES))
STAGES = pytest.mark.parametrize("p", range(1, 7))
SIZES = [(p, m) for p in range(1, 7) for m in range(1, 13)]


def assert_complete(schedule: Schedule, layout: ParallelLayout, directions: list[Direction]) -> None:
    """Every stage runs each block of its chunks once."""
    for stage in range(layout.pp):
        assert Counter(schedule.blocks(stage)) == {
            Block(direction, m, chunk): 1
            for direction in directions
            for m in range(schedule.micro_batches)
            for chunk in layout.chunks_of(stage)
        }


@NAMES
@STAGES
def test_training_schedules_are_complete_and_valid(name: str, p: int) -> None:
    for m in range(1, 13):
        layout = layout_for(name, p)
        schedule = named_schedule(name, p, m)
        assert schedule.trains
        assert_complete(schedule, layout, list(Direction))
        validate(schedule, layout, model_parts())


@NAMES
@STAGES
def test_forward_only_schedules_are_complete_and_valid(name: str, p: int) -> None:
    for m in range(1, 13):
        layout = layout_for(name, p)
        schedule = validation_schedule(layout, m, model_parts())
        assert not schedule.trains
        assert_complete(schedule, layout, [Direction.FORWARD])
        validate(schedule, layout, model_parts())
        # A micro-batch passes p stages, or p stages twice; then one more follows in every turn.
        turns = 2 if layout.folded else 1
        assert unit_timeline(schedule).length >= turns * m + p - 1


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (2, 4), (3, 5)])
def test_bubble_of_1f1b(p: int, m: int, forward: int, backward: int) -> None:
    timeline = unit_timeline(named_schedule("megatron", p, m), forward, backward)
    assert timeline.length == (m + p - 1) * (forward + backward)
    assert {timeline.idle(stage) for stage in range(p)} == {(p - 1) * (forward + backward)}


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_1f1b_holds_at_most_what_is_ahead(p: int, m: int) -> None:
    schedule = named_schedule("megatron", p, m)
    assert [in_flight(schedule, stage) for stage in range(p)] == [min(p - stage, m) for stage in range(p)]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_the_folded_pipeline_holds_at_most_2p_half_stages(p: int, m: int) -> None:
    """As much as the first stage of 1F1B, where blocks are twice as large; there on every stage."""
    schedule = named_schedule("folded", p, m)
    assert [in_flight(schedule, i) for i in range(p)] == [min(2 * p, m + 1 + i, 2 * m) for i in range(p)]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_the_folded_pipeline_idles_less_than_1f1b(p: int, m: int) -> None:
    """On the same work per stage: a chunk of the folded model is half of an unfolded one."""
    folded = unit_timeline(named_schedule("folded", p, m), 1, 2)
    unfolded = unit_timeline(named_schedule("megatron", p, m), 2, 4)
    saved = 2 * (min(p, m) - 1)
    assert unfolded.length - folded.length == saved
    for stage in range(p):
        work = sum(timed.end - timed.start for timed in folded.stages[stage])
        assert work == sum(timed.end - timed.start for timed in unfolded.stages[stage])
        assert unfolded.idle(stage) - folded.idle(stage) == saved


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_the_head_runs_backward_right_after_forward(p: int, m: int) -> None:
    """Its logits are the largest value there is, so no two micro-batches may hold theirs."""
    for name, stage in (("megatron", p - 1), ("folded", 0)):
        last = layout_for(name, p).chunks - 1
        order = [block for block in named_schedule(name, p, m).blocks(stage) if block.chunk == last]
        assert [(b.direction.value, b.micro_batch) for b in order] == [(d, k) for k in range(m) for d in "FB"]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_journeys_carry_a_forward_and_a_backward_the_same_way(p: int, m: int) -> None:
    """DHelix section 4.1: micro-batch k goes forward together with the backward pass of k-p."""
    for blocks in folded_w(ParallelLayout(pp=p, placement=Placement.FOLDED), m):
        for place, block in enumerate(blocks):
            if block.direction is Direction.FORWARD and block.micro_batch >= p:
                partner = Block(Direction.BACKWARD, block.micro_batch - p, 2 * p - 1 - block.chunk)
                assert blocks[place - 1] == partner


@given(valid_schedules())
@settings(max_examples=50, deadline=None)
def test_random_variants_are_valid(case: tuple[Schedule, ParallelLayout]) -> None:
    """What the other tests damage is whole."""
    validate(*case, model_parts(tp=2))


@given(valid_schedules(min_stages=2))
@settings(max_examples=50, deadline=None)
def test_time_respects_data(case: tuple[Schedule, ParallelLayout]) -> None:
    schedule, layout = case
    timeline = unit_timeline(schedule)
    ends = {timed.block: timed.end for stage in timeline.stages for timed in stage}
    starts = {timed.block: timed.start for stage in timeline.stages for timed in stage}
    for block in ends:
        before = predecessor(block, layout)
        if before is not None:
            assert starts[block] >= ends[before]
    for stage in timeline.stages:
        assert all(a.end <= b.start for a, b in pairwise(stage))


@given(
    st.integers(1, 6), st.booleans(), st.sampled_from(Direction), st.integers(0, 9), st.sampled_from(Strand)
)
def test_successor_and_predecessor_are_inverse(
    p: int, folded: bool, direction: Direction, micro_batch: int, strand: Strand
) -> None:
    layout = ParallelLayout(pp=p, placement=Placement.FOLDED if folded else Placement.LINEAR)
    chain = [
        Block(direction, micro_batch, 0 if direction is Direction.FORWARD else layout.chunks - 1, strand)
    ]
    while (after := successor(chain[-1], layout)) is not None:
        assert predecessor(after, layout) == chain[-1]
        chain.append(after)
    assert predecessor(chain[0], layout) is None
    assert len(chain) == layout.chunks
    assert {(b.direction, b.micro_batch, b.strand) for b in chain} == {(direction, micro_batch, strand)}


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"overlap.schedule='gpipe' is not known; use one of folded, megatron"
    ):
        training_schedule("gpipe", ParallelLayout(), 1, model_parts())


def test_generators_want_their_layout() -> None:
    assert [name for name in SCHEDULES if SCHEDULES[name].placement is Placement.FOLDED] == ["folded"]
    with pytest.raises(AssertionError):
        one_forward_one_backward(ParallelLayout(pp=2, placement=Placement.FOLDED), 1)
    with pytest.raises(AssertionError):
        folded_w(ParallelLayout(pp=2), 1)
