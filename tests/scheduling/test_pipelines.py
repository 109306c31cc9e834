"""The order of blocks: every block once, what is in flight, deadlock-free and valid."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.scheduling.lowering.lower import (
    Choices,
    predecessor,
    successor,
    training_schedule,
    validation_schedule,
)
from braid.scheduling.lowering.named import EXECUTABLE, SCHEDULES
from braid.scheduling.lowering.pipelines import (
    bidirectional,
    eager_one_forward_one_backward,
    eager_paired_w,
    folded_w,
    interleaved,
    one_forward_one_backward,
    paired_w,
    twin_ended,
)
from braid.scheduling.lowering.zero_bubble import dual_pipe_v, zero_bubble_v
from braid.scheduling.schedule import COLUMNS, Block, Direction, Gradients, Pair, Schedule, Strand, blocks_in
from braid.scheduling.schedule_parser import parse
from braid.scheduling.spec import ParallelLayout, Placement
from braid.scheduling.timeline import in_flight, unit_timeline
from braid.scheduling.validate import validate
from tests.scheduling.cases import (
    HOPS,
    PAIRED,
    PAIRED_W,
    SIZES,
    SPLIT,
    STAGES,
    exists,
    layout_for,
    model_parts,
    named_schedule,
    sizes_of,
    valid_schedules,
)

NAMES = pytest.mark.parametrize("name", sorted(SCHEDULES))


def assert_complete(schedule: Schedule, layout: ParallelLayout, directions: list[Direction]) -> None:
    """Every pass runs once on the stage of its chunk: in one go, or input and then weight gradients.

    Of two copies of the model, a micro-batch goes through one.
    """
    chunks_of: dict[tuple[Direction, int], list[int]] = {
        (direction, m): [] for direction in directions for m in range(schedule.micro_batches)
    }
    for stage in range(layout.pp):
        order = schedule.blocks(stage)
        inputs = [block.whole for block in order if block.gradients is Gradients.INPUT]
        weights = [block.whole for block in order if block.gradients is Gradients.WEIGHT]
        assert Counter(inputs) == Counter(weights)
        for block in order:
            assert layout.stage_of(block.chunk) == stage
            if block.gradients is not Gradients.WEIGHT:
                chunks_of[block.direction, block.micro_batch].append(block.chunk)
    size = layout.chunks_per_copy
    for m in range(schedule.micro_batches):
        first = min(chunks_of[Direction.FORWARD, m]) // size * size
        for direction in directions:
            assert sorted(chunks_of[direction, m]) == list(range(first, first + size))


# -- all schedules -----------------------------------------------------------------------------------------


@NAMES
@STAGES
def test_training_schedules_are_complete_and_valid(name: str, p: int) -> None:
    for m in sizes_of(name, p):
        layout, schedule = layout_for(name, p), named_schedule(name, p, m)
        assert schedule.trains
        assert_complete(schedule, layout, list(Direction))
        validate(schedule, layout, model_parts())
        assert not unit_timeline(schedule).stuck


@NAMES
@pytest.mark.parametrize("p", [1, 2, 4])
def test_early_reduction_and_gathering_keep_schedules_valid(name: str, p: int) -> None:
    for m in sizes_of(name, p, 2 * p):
        schedule = named_schedule(name, p, m, 1, "none", True, True)
        validate(schedule, layout_for(name, p), model_parts())
        plain = named_schedule(name, p, m)
        assert [schedule.blocks(stage) for stage in range(p)] == [plain.blocks(stage) for stage in range(p)]
        assert parse(schedule.to_text()) == schedule


@NAMES
@pytest.mark.parametrize("p", [1, 3, 6])
def test_text_round_trips_in_short_lines(name: str, p: int) -> None:
    schedule = named_schedule(name, p, 12, 2)
    text = schedule.to_text()
    assert parse(text) == schedule
    assert max(map(len, text.splitlines())) <= COLUMNS


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
        turns = layout.chunks_per_copy // p
        assert unit_timeline(schedule).length >= turns * m + p - 1
        if layout.placement is Placement.LINEAR:
            assert unit_timeline(schedule).length == m + p - 1


@given(valid_schedules())
@settings(max_examples=60, deadline=None)
def test_random_variants_are_valid(case: tuple[Schedule, ParallelLayout]) -> None:
    """What the other tests damage is whole."""
    validate(*case, model_parts(tp=2))


@given(valid_schedules(min_stages=2))
@settings(max_examples=60, deadline=None)
def test_time_respects_data(case: tuple[Schedule, ParallelLayout]) -> None:
    schedule, layout = case
    timeline = unit_timeline(schedule)
    starts: dict[Block, int] = {}
    ends: dict[Block, int] = {}
    for stage in timeline.stages:
        for timed in stage:
            for block in blocks_in(timed.block):
                if block.travels:
                    starts[block.whole], ends[block.whole] = timed.start, timed.end
    for block in ends:
        before = predecessor(block, layout)
        if before is not None:
            assert starts[block] >= ends[before]
    for stage in timeline.stages:
        assert all(a.end <= b.start for a, b in pairwise(stage))


@pytest.mark.parametrize("name", PAIRED)
@STAGES
def test_paired_blocks_are_of_different_strands_and_directions(name: str, p: int) -> None:
    for m in sizes_of(name, p):
        for stage in named_schedule(name, p, m).stages:
            for pair in (i for i in stage if isinstance(i, Pair)):
                assert pair.forward.strand is not pair.backward.strand
                assert pair.forward.direction is Direction.FORWARD
                assert pair.backward.direction is Direction.BACKWARD
                assert pair.backward.gradients is Gradients.BOTH


@NAMES
def test_only_schedules_for_it_pair_or_split(name: str) -> None:
    schedule = named_schedule(name, 3, 12)
    instructions = [i for stage in schedule.stages for i in stage]
    assert any(isinstance(i, Pair) for i in instructions) == (name in PAIRED)
    split = {b.gradients for stage in range(3) for b in schedule.blocks(stage)} != {Gradients.BOTH}
    assert split == (name in SPLIT)
    assert schedule.strands == ((Strand.ALPHA, Strand.BETA) if name in PAIRED else (Strand.ALPHA,))
    assert bool(schedule.pairs) == (name in PAIRED)
    assert bool(schedule.splits) == (name in SPLIT)


# -- memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_1f1b_holds_at_most_what_is_ahead(p: int, m: int) -> None:
    for name in ("megatron", "intra_batch"):
        schedule = named_schedule(name, p, m)
        assert [in_flight(schedule, stage) for stage in range(p)] == [min(p - stage, m) for stage in range(p)]


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("name", ["folded", *PAIRED_W])
def test_the_w_pipeline_holds_at_most_2p_half_stages(name: str, p: int, m: int) -> None:
    """As much as the first stage of 1F1B, where blocks are twice as large; there on every stage."""
    schedule = named_schedule(name, p, m)
    assert [in_flight(schedule, i) for i in range(p)] == [min(2 * p, m + 1 + i, 2 * m) for i in range(p)]


@pytest.mark.parametrize(("p", "m"), SIZES)
@HOPS
def test_the_eager_w_holds_what_is_under_way(p: int, m: int, hop: int) -> None:
    """hop (p-1) + 1 journeys from a forward pass to its backward pass, two half-stages each."""
    schedule = named_schedule("braid_eager", p, m, hop=hop)
    most = [min(2 * (hop * (p - 1) + 1), m + 1 + hop * i, 2 * m) for i in range(p)]
    assert [in_flight(schedule, i) for i in range(p)] == most


@STAGES
def test_memory_of_the_other_pipelines(p: int) -> None:
    """Half-stages of activations; stages for the bidirectional pipeline, which holds a second copy instead.

    Interleaved 1F1B holds on its first stage what it runs ahead, 3p-2 half-stages, and the one it begins.
    """
    limits = {
        "zbv": 2 * p,
        "dualpipev": 2 * p + 1,
        "braid_v": 2 * p + 1,
        "interleaved": 3 * p - 1,
        "bidirectional": p,
    }
    for name, limit in limits.items():
        peaks = [
            in_flight(named_schedule(name, p, m), stage) for m in sizes_of(name, p, 18) for stage in range(p)
        ]
        assert max(peaks) <= limit, name
    steady = named_schedule("interleaved", p, 4 * p)
    assert [in_flight(steady, stage) for stage in range(p)] == [3 * p - 1 - 2 * stage for stage in range(p)]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_the_last_chunk_runs_backward_right_after_forward(p: int, m: int) -> None:
    for name, stage in (("megatron", p - 1), ("folded", 0)):
        last = layout_for(name, p).chunks - 1
        order = [block for block in named_schedule(name, p, m).blocks(stage) if block.chunk == last]
        assert [(b.direction.value, b.micro_batch) for b in order] == [(d, k) for k in range(m) for d in "FB"]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_journeys_carry_a_forward_and_a_backward_the_same_way(p: int, m: int) -> None:
    """DHelix section 4.1: micro-batch k goes forward together with the backward pass of k-p."""
    for blocks in folded_w(ParallelLayout(pp=p, placement=Placement.FOLDED), m):
        for place, block in enumerate(blocks):
            assert isinstance(block, Block)
            if block.direction is Direction.FORWARD and block.micro_batch >= p:
                partner = Block(Direction.BACKWARD, block.micro_batch - p, 2 * p - 1 - block.chunk)
                assert blocks[place - 1] == partner
    for stage in named_schedule("dhelix", p, m).stages:
        for pair in (i for i in stage if isinstance(i, Pair)):
            assert pair.backward.micro_batch == pair.forward.micro_batch - p
            assert pair.backward.chunk == 2 * p - 1 - pair.forward.chunk


# -- neighbours and refusals -------------------------------------------------------------------------------


@given(
    st.integers(1, 6),
    st.sampled_from(Placement),
    st.sampled_from(Direction),
    st.integers(0, 9),
    st.sampled_from(Strand),
)
def test_successor_and_predecessor_are_inverse(
    p: int, placement: Placement, direction: Direction, micro_batch: int, strand: Strand
) -> None:
    layout = ParallelLayout(pp=p, placement=placement)
    for copy in range(layout.copies):
        chunks = range(copy * layout.chunks_per_copy, (copy + 1) * layout.chunks_per_copy)
        first = chunks[0] if direction is Direction.FORWARD else chunks[-1]
        chain = [Block(direction, micro_batch, first, strand)]
        while (after := successor(chain[-1], layout)) is not None:
            assert predecessor(after, layout) == chain[-1]
            chain.append(after)
        assert predecessor(chain[0], layout) is None
        assert {block.chunk for block in chain} == set(chunks)
        assert len(chain) == len(chunks)
        assert {(b.direction, b.micro_batch, b.strand) for b in chain} == {(direction, micro_batch, strand)}


def refused(name: str, stages: int, micro_batches: int, choices: Choices | None = None) -> str:
    """The message with which a schedule is refused."""
    with pytest.raises(ValueError) as error:
        training_schedule(name, layout_for(name, stages), micro_batches, model_parts(), choices)
    return str(error.value)


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError) as error:
        training_schedule("gpipe", ParallelLayout(), 1, model_parts())
    known = ", ".join(sorted(SCHEDULES))
    assert str(error.value) == f"overlap.schedule='gpipe' is not known; use one of {known}"


def test_what_a_schedule_cannot_run_is_refused_with_key_value_and_remedy() -> None:
    assert refused("interleaved", 4, 6) == (
        "overlap.schedule=interleaved needs a multiple of parallel.pp=4 micro-batches a replica, "
        "train.global_batch and train.micro_batch give 6; make them give 8, or use overlap.schedule=megatron"
    )
    for name in ("dualpipev", "braid_v"):
        assert refused(name, 4, 7) == (
            "overlap.schedule=dualpipev and braid_v need 2 micro-batches a replica for each of parallel.pp=4 "
            "stages, train.global_batch and train.micro_batch give 7; make them give 8 or more, "
            "or use overlap.schedule=braid"
        )
    for p in range(1, 7):
        for m in range(1, 13):
            for name in ("interleaved", "dualpipev"):
                if not exists(name, p, m):
                    assert f"give {m}; make them give " in refused(name, p, m)


@pytest.mark.parametrize("name", ["dhelix", "braid", "braid_v", "bidirectional"])
def test_paired_blocks_need_a_decision(name: str) -> None:
    assert refused(name, 2, 8) == (
        f"overlap.schedule={name} needs a pairing: measure the run with `braid profile`, or make a plan "
        f"with `braid plan --output plan.yaml` and set overlap.plan"
    )


@pytest.mark.parametrize("name", ["dhelix", "braid", "bidirectional"])
def test_without_paired_blocks_no_decision_is_needed(name: str) -> None:
    """So few micro-batches that no two ever meet."""
    assert not training_schedule(name, layout_for(name, 3), 2, model_parts()).pairs


def test_generators_want_their_layout() -> None:
    generators = {
        one_forward_one_backward: Placement.LINEAR,
        eager_one_forward_one_backward: Placement.LINEAR,
        folded_w: Placement.FOLDED,
        paired_w: Placement.FOLDED,
        eager_paired_w: Placement.FOLDED,
        twin_ended: Placement.FOLDED,
        dual_pipe_v: Placement.FOLDED,
        zero_bubble_v: Placement.FOLDED,
        interleaved: Placement.INTERLEAVED,
        bidirectional: Placement.BIDIRECTIONAL,
    }
    assert {kind.generator: kind.placement for kind in SCHEDULES.values()} == generators
    for generator, wanted in generators.items():
        for placement in Placement:
            if placement is not wanted:
                with pytest.raises(AssertionError):
                    generator(ParallelLayout(pp=2, placement=placement), 4)


def test_what_the_runtime_does_not_execute_is_named() -> None:
    assert set(SCHEDULES) - set(EXECUTABLE) == {"bidirectional"}
