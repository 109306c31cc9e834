"""Schedules in sub-batches: what they hold, what they may never do, and how they compare."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.papers.block_profile import BlockCosts, BlockProfile, BlockSize
from tests.papers.sub_batch import (
    BlockTimes,
    Operation,
    Phase,
    SubBatching,
    layer_times,
    simulate_step,
    sub_batch_schedule,
    total_ns,
)

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
    return [BlockTimes(**{name: (sum(both),) for name, both in vars(block).items()}) for block in times]


def run(kind: SubBatching, times: list[BlockTimes]) -> dict[Operation, tuple[int, int]]:
    """Begin and end of the operations of the step in a schedule, in one batch where the schedule has one."""
    given = whole(times) if kind is SubBatching.MEGATRON else times
    return simulate_step(sub_batch_schedule(kind, len(times) // 2), given)


@pytest.mark.parametrize("kind", SubBatching)
@pytest.mark.parametrize("layers", [1, 5])
def test_every_operation_stands_once_with_its_collective_behind_it(kind: SubBatching, layers: int) -> None:
    """The fine schedule repeats no collective in its recomputation."""
    schedule = sub_batch_schedule(kind, layers)
    wanted = {Operation(*of) for of in product(Phase, range(2 * layers), range(kind.sub_batches))}
    assert Counter(schedule.compute) == Counter(wanted)
    reduced = {op.reduced for op in wanted if not (kind is SubBatching.FINE and op.phase is Phase.RECOMPUTE)}
    assert Counter(schedule.communication) == Counter(reduced)
    for collective in schedule.communication:
        assert schedule.after[collective] == (collective._replace(collective=False),)


@given(split_steps())
def test_megatron_overlaps_nothing(times: list[BlockTimes]) -> None:
    work = sum(2 * sum(block.forward_ns) + sum(block.backward_ns) for block in times)
    collectives = 3 * sum(sum(block.collective_ns) for block in times)
    assert total_ns(run(SubBatching.MEGATRON, times)) == work + collectives


@given(split_steps())
def test_each_schedule_is_at_least_as_fast_as_the_one_before(times: list[BlockTimes]) -> None:
    """Splitting is free here: the sub-batches take as long as the whole."""
    totals = [total_ns(run(kind, times)) for kind in SubBatching]
    assert totals == sorted(totals, reverse=True)


def equation_3(times: list[BlockTimes], *names: str) -> int:
    """The paper's estimate of a pass, which computes for the sum of some times of every block."""
    first, second = ([sum(getattr(one, name)[part] for name in names) for one in times] for part in (0, 1))
    collectives = [block.collective_ns for block in times]
    total = first[0] + collectives[-1][1]
    total += sum(max(compute, own) for compute, (own, _) in zip(second, collectives, strict=True))
    return total + sum(
        max(compute, other) for compute, (_, other) in zip(first[1:], collectives, strict=False)
    )


@given(split_steps())
def test_equation_3_is_the_forward_pass_exactly(times: list[BlockTimes]) -> None:
    found = run(SubBatching.CROSS_PASS, times)
    estimate = equation_3(times, "forward_ns")
    assert max(end for op, (_, end) in found.items() if op.phase is Phase.FORWARD) == estimate


@given(split_steps())
def test_equation_3_is_never_below_the_fine_schedule(times: list[BlockTimes]) -> None:
    """It is above it because recomputation need not wait for the gradient, nor for the last forward."""
    backward = equation_3(times[::-1], "forward_ns", "backward_ns")
    estimate = equation_3(times, "forward_ns") + backward
    assert total_ns(run(SubBatching.FINE, times)) <= estimate
    no_recomputation = [replace(block, forward_ns=(0, 0)) for block in times]
    estimate = equation_3(times) + equation_3(times[::-1], "backward_ns")
    last = times[-1].collective_ns
    # Without recomputation only the turn from forward to backward is left: the first sub-batch need not
    # wait for the collective of the second.
    assert estimate - last[1] <= total_ns(run(SubBatching.FINE, no_recomputation)) <= estimate


def test_times_come_from_the_sub_batch_sizes() -> None:
    def costs(scale: int) -> BlockCosts:
        forward, backward = (scale, 2 * scale), (3 * scale, 4 * scale)
        return BlockCosts(forward_ns=forward, backward_ns=backward, collective_ns=5 * scale, runtime_bytes=1)

    measured = {BlockSize(8, 2, batch): costs(batch) for batch in (1, 2, 3)}
    profile = BlockProfile("made up", 4, 4, measured)
    attention, mlp = layer_times(profile, hidden=8, degree=2, batch=3, sub_batches=2)
    assert attention == BlockTimes(forward_ns=(2, 1), backward_ns=(6, 3), collective_ns=(10, 5))
    assert mlp == BlockTimes(forward_ns=(4, 2), backward_ns=(8, 4), collective_ns=(10, 5))
    assert layer_times(profile, hidden=8, degree=2, batch=3, sub_batches=1)[0].forward_ns == (3,)
