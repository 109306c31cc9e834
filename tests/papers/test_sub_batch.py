"""Schedules in sub-batches: what they hold, what they may never do, and how they compare."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.scheduling.block_profile import BlockCosts, BlockProfile, BlockSize
from braid.scheduling.operators import Stream
from braid.scheduling.planner.degree_problem import PassCosts
from tests.papers.sub_batch import (
    BlockTimes,
    Operation,
    Phase,
    StepTimeline,
    SubBatching,
    layer_times,
    simulate_step,
    sub_batch_schedule,
)
from tests.spans import communication_of

TIME = st.integers(0, 40)
HALVES = st.tuples(TIME, TIME)


@st.composite
def split_steps(draw: st.DrawFn) -> list[BlockTimes]:
    """Blocks of one to four layers in two sub-batches."""
    return [
        BlockTimes(forward_ns=draw(HALVES), backward_ns=draw(HALVES), collective_ns=draw(HALVES))
        for _ in range(2 * draw(st.integers(1, 4)))
    ]


def whole(times: list[BlockTimes]) -> list[BlockTimes]:
    """The same work in one batch, where splitting is free."""
    return [
        BlockTimes(
            forward_ns=(sum(block.forward_ns),),
            backward_ns=(sum(block.backward_ns),),
            collective_ns=(sum(block.collective_ns),),
        )
        for block in times
    ]


def run(kind: SubBatching, times: list[BlockTimes]) -> StepTimeline:
    """The step in a schedule, in one batch where the schedule has one."""
    return simulate_step(
        sub_batch_schedule(kind, len(times) // 2), whole(times) if kind is SubBatching.MEGATRON else times
    )


@pytest.mark.parametrize("kind", SubBatching)
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_every_operation_stands_once_with_its_collective_behind_it(kind: SubBatching, layers: int) -> None:
    schedule = sub_batch_schedule(kind, layers)
    wanted = {
        Operation(phase, block, part)
        for phase in Phase
        for block in range(2 * layers)
        for part in range(kind.sub_batches)
    }
    assert Counter(schedule.compute) == Counter(wanted)
    reduced = {op.reduced for op in wanted if not (kind is SubBatching.FINE and op.phase is Phase.RECOMPUTE)}
    assert Counter(schedule.communication) == Counter(reduced)
    for collective in schedule.communication:
        assert schedule.after[collective] == (collective._replace(collective=False),)


def test_fine_repeats_no_collective() -> None:
    layers = 3
    counts = {kind: len(sub_batch_schedule(kind, layers).communication) for kind in SubBatching}
    assert counts == {
        SubBatching.MEGATRON: 3 * 2 * layers,
        SubBatching.MERAK: 2 * 3 * 2 * layers,
        SubBatching.CROSS_PASS: 2 * 3 * 2 * layers,
        SubBatching.FINE: 2 * 2 * 2 * layers,
    }
    per_pass = Counter(op.phase for op in sub_batch_schedule(SubBatching.FINE, layers).communication)
    assert per_pass == {Phase.FORWARD: 2 * 2 * layers, Phase.BACKWARD: 2 * 2 * layers}


@pytest.mark.parametrize("kind", SubBatching)
def test_only_the_own_sub_batch_is_read(kind: SubBatching) -> None:
    """Waiting for the other sub-batch is a barrier; only the two schedules that have barriers do it."""
    schedule = sub_batch_schedule(kind, 3)
    across = [
        (op, src) for op, srcs in schedule.after.items() for src in srcs if src.sub_batch != op.sub_batch
    ]
    assert bool(across) is (kind is SubBatching.MERAK)


@pytest.mark.parametrize("kind", SubBatching)
def test_data_arrives_before_it_is_read(kind: SubBatching) -> None:
    """By hand: a backward needs the gradient from the block above and its own recomputed values."""
    after, blocks = sub_batch_schedule(kind, 2).after, 4
    for part in range(kind.sub_batches):
        for block in range(blocks):
            backward = after[Operation(Phase.BACKWARD, block, part)]
            above = Phase.FORWARD if block == blocks - 1 else Phase.BACKWARD
            assert Operation(above, min(block + 1, blocks - 1), part, collective=True) in backward
            again = Operation(Phase.RECOMPUTE, block, part)
            assert (again if kind is SubBatching.FINE else again.reduced) in backward
            if block:
                before = Operation(Phase.FORWARD, block - 1, part, collective=True)
                assert before in after[Operation(Phase.FORWARD, block, part)]
                within_layer = block % 2 == 1 and kind is not SubBatching.FINE
                source = before._replace(phase=Phase.RECOMPUTE) if within_layer else before
                assert source in after[Operation(Phase.RECOMPUTE, block, part)]


@given(split_steps(), st.sampled_from(list(SubBatching)))
def test_spans_keep_order_and_dependencies(times: list[BlockTimes], kind: SubBatching) -> None:
    schedule = sub_batch_schedule(kind, len(times) // 2)
    timeline = run(kind, times)
    names = {
        (span.layer, span.operator, span.micro_batch): (span.start_ns, span.end_ns) for span in timeline.spans
    }
    assert len(names) == len(timeline.spans) == len(schedule.compute) + len(schedule.communication)

    def span(op: Operation) -> tuple[int, int]:
        name = ("attention", "mlp")[op.block % 2]
        kind_of = ".all_reduce" if op.collective else ""
        return names[op.block // 2, f"{name}.{op.phase}{kind_of}", op.sub_batch]

    for operation, sources in schedule.after.items():
        assert all(span(source)[1] <= span(operation)[0] for source in sources)
    for order in (schedule.compute, schedule.communication):
        assert all(span(a)[1] <= span(b)[0] for a, b in pairwise(order))


@given(split_steps())
def test_megatron_overlaps_nothing(times: list[BlockTimes]) -> None:
    work = sum(2 * sum(block.forward_ns) + sum(block.backward_ns) for block in times)
    collectives = 3 * sum(sum(block.collective_ns) for block in times)
    timeline = run(SubBatching.MEGATRON, times)
    assert timeline.total_ns == work + collectives
    assert communication_of(timeline.spans)[1] == collectives


@given(split_steps(), st.sampled_from(list(SubBatching)), st.booleans())
def test_one_busy_stream_takes_the_sum(times: list[BlockTimes], kind: SubBatching, computing: bool) -> None:
    nothing = (0, 0)
    alone = [
        replace(block, collective_ns=nothing)
        if computing
        else replace(block, forward_ns=nothing, backward_ns=nothing)
        for block in times
    ]
    timeline = run(kind, alone)
    assert timeline.total_ns == timeline.busy_ns(Stream.COMPUTE if computing else Stream.INTRA)


@given(split_steps())
def test_each_schedule_is_at_least_as_fast_as_the_one_before(times: list[BlockTimes]) -> None:
    """Splitting is free here: the sub-batches take as long as the whole."""
    totals = [run(kind, times).total_ns for kind in SubBatching]
    assert totals == sorted(totals, reverse=True)
    fine = run(SubBatching.FINE, times)
    assert fine.total_ns >= max(fine.busy_ns(Stream.COMPUTE), fine.busy_ns(Stream.INTRA))


@pytest.mark.parametrize(("slower", "faster"), list(pairwise(SubBatching)))
def test_the_steps_of_the_ablation_are_real(slower: SubBatching, faster: SubBatching) -> None:
    times = [BlockTimes(forward_ns=(5, 5), backward_ns=(9, 9), collective_ns=(12, 12))] * 8
    assert run(faster, times).total_ns < run(slower, times).total_ns


def equation_3(nodes: list[PassCosts]) -> int:
    """The paper's estimate of a pass, term by term."""
    total = nodes[0].compute_ns[0] + nodes[-1].collective_ns[1]
    for i, node in enumerate(nodes):
        total += max(node.compute_ns[1], node.collective_ns[0])
        if i:
            total += max(node.compute_ns[0], nodes[i - 1].collective_ns[1])
    return total


@given(split_steps())
def test_equation_3_is_the_forward_pass_exactly(times: list[BlockTimes]) -> None:
    forward = [PassCosts(compute_ns=block.forward_ns, collective_ns=block.collective_ns) for block in times]
    spans = [span for span in run(SubBatching.CROSS_PASS, times).spans if ".forward" in span.operator]
    assert max(span.end_ns for span in spans) == equation_3(forward)


@given(split_steps())
def test_equation_3_is_never_below_the_fine_schedule(times: list[BlockTimes]) -> None:
    """It is above it because recomputation need not wait for the gradient, nor for the last forward."""
    forward = [PassCosts(compute_ns=block.forward_ns, collective_ns=block.collective_ns) for block in times]
    backward = [
        PassCosts(
            compute_ns=(
                block.forward_ns[0] + block.backward_ns[0],
                block.forward_ns[1] + block.backward_ns[1],
            ),
            collective_ns=block.collective_ns,
        )
        for block in reversed(times)
    ]
    estimate = equation_3(forward) + equation_3(backward)
    assert run(SubBatching.FINE, times).total_ns <= estimate
    no_recomputation = [replace(block, forward_ns=(0, 0)) for block in times]
    forward = [replace(node, compute_ns=(0, 0)) for node in forward]
    backward = [
        PassCosts(compute_ns=block.backward_ns, collective_ns=block.collective_ns)
        for block in reversed(times)
    ]
    estimate = equation_3(forward) + equation_3(backward)
    last = times[-1].collective_ns
    # Without recomputation only the turn from forward to backward is left: the first sub-batch need not
    # wait for the collective of the second.
    assert estimate - last[1] <= run(SubBatching.FINE, no_recomputation).total_ns <= estimate


def test_streams_that_wait_for_each_other_are_named() -> None:
    schedule = sub_batch_schedule(SubBatching.FINE, 1)
    wrong = replace(schedule, communication=schedule.communication[::-1])
    times = [BlockTimes(forward_ns=(1, 1), backward_ns=(1, 1), collective_ns=(1, 1))] * 2
    with pytest.raises(ValueError, match="waits for ever at: forward of block 1, sub-batch 0; backward coll"):
        simulate_step(wrong, times)


def test_no_layers() -> None:
    with pytest.raises(ValueError, match="layers=0 must be at least 1"):
        sub_batch_schedule(SubBatching.FINE, 0)


def test_times_come_from_the_sub_batch_sizes() -> None:
    def costs(scale: int) -> BlockCosts:
        return BlockCosts(
            forward_ns=(scale, 2 * scale),
            backward_ns=(3 * scale, 4 * scale),
            collective_ns=5 * scale,
            runtime_bytes=1,
        )

    measured = {BlockSize(8, 2, batch): costs(batch) for batch in (1, 2, 3)}
    profile = BlockProfile(source="made up", sequence=4, activation_bytes=4, measured=measured)
    attention, mlp = layer_times(profile, hidden=8, degree=2, batch=3, sub_batches=2)
    assert attention == BlockTimes(forward_ns=(2, 1), backward_ns=(6, 3), collective_ns=(10, 5))
    assert mlp == BlockTimes(forward_ns=(4, 2), backward_ns=(8, 4), collective_ns=(10, 5))
    assert layer_times(profile, hidden=8, degree=2, batch=3, sub_batches=1)[0].forward_ns == (3,)
    with pytest.raises(ValueError, match="batch=1 cannot be split in 2"):
        layer_times(profile, hidden=8, degree=2, batch=1, sub_batches=2)
