"""Schedules in sub-batches: what they hold, what they may never do, and how they compare."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.papers.sub_batch import Operation, Phase, SubBatching, Times, step_times, total_ns

HALVES = st.tuples(st.integers(0, 40), st.integers(0, 40))
Block = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
"""Times of a forward pass, a backward pass and a collective, of each of two sub-batches."""
STEPS = st.integers(1, 4).flatmap(
    lambda layers: st.lists(st.tuples(HALVES, HALVES, HALVES), min_size=2 * layers, max_size=2 * layers)
)
FORWARD, BACKWARD, COLLECTIVE = range(3)


def run(kind: SubBatching, blocks: list[Block]) -> Times:
    """A step in a schedule; in one batch, where the schedule has one, as splitting is free here."""

    def ns(operation: Operation) -> int:
        what = BACKWARD if operation.phase is Phase.BACKWARD else FORWARD
        both = blocks[operation.block][COLLECTIVE if operation.collective else what]
        return sum(both) if kind is SubBatching.MEGATRON else both[operation.sub_batch]

    return step_times(kind, len(blocks) // 2, ns)


@pytest.mark.parametrize("kind", SubBatching)
@pytest.mark.parametrize("layers", [1, 5])
def test_every_operation_stands_once_with_its_collective_behind_it(kind: SubBatching, layers: int) -> None:
    """The fine schedule repeats no collective in its recomputation."""
    found = step_times(kind, layers, lambda operation: 1)
    wanted = {Operation(*of) for of in product(Phase, range(2 * layers), range(kind.sub_batches))}
    reduced = {op.reduced for op in wanted if not (kind is SubBatching.FINE and op.phase is Phase.RECOMPUTE)}
    assert found.keys() == wanted | reduced
    assert all(found[op][0] >= found[op._replace(collective=False)][1] for op in reduced)


@given(STEPS)
def test_megatron_overlaps_nothing(blocks: list[Block]) -> None:
    work = sum(
        2 * sum(forward) + sum(backward) + 3 * sum(collective) for forward, backward, collective in blocks
    )
    assert total_ns(run(SubBatching.MEGATRON, blocks)) == work


@given(STEPS)
def test_each_schedule_is_at_least_as_fast_as_the_one_before(blocks: list[Block]) -> None:
    """Splitting is free here: the sub-batches take as long as the whole."""
    totals = [total_ns(run(kind, blocks)) for kind in SubBatching]
    assert totals == sorted(totals, reverse=True)


def equation_3(blocks: list[Block], *passes: int) -> int:
    """The paper's estimate of a pass, which computes for the sum of some times of every block."""
    first, second = ([sum(one[what][part] for what in passes) for one in blocks] for part in (0, 1))
    collectives = [block[COLLECTIVE] for block in blocks]
    total = first[0] + collectives[-1][1]
    total += sum(max(compute, own) for compute, (own, _) in zip(second, collectives, strict=True))
    return total + sum(
        max(compute, other) for compute, (_, other) in zip(first[1:], collectives, strict=False)
    )


@given(STEPS)
def test_equation_3_is_the_forward_pass_exactly(blocks: list[Block]) -> None:
    found = run(SubBatching.CROSS_PASS, blocks)
    ends = [end for op, (_, end) in found.items() if op.phase is Phase.FORWARD]
    assert max(ends) == equation_3(blocks, FORWARD)


@given(STEPS)
def test_equation_3_is_never_below_the_fine_schedule(blocks: list[Block]) -> None:
    """It is above it because recomputation need not wait for the gradient, nor for the last forward."""
    estimate = equation_3(blocks, FORWARD) + equation_3(blocks[::-1], FORWARD, BACKWARD)
    assert total_ns(run(SubBatching.FINE, blocks)) <= estimate
    no_recomputation = [((0, 0), backward, collective) for _, backward, collective in blocks]
    estimate = equation_3(blocks) + equation_3(blocks[::-1], BACKWARD)
    # Without recomputation only the turn from forward to backward is left: the first sub-batch need not
    # wait for the collective of the second.
    last = blocks[-1][COLLECTIVE][1]
    assert estimate - last <= total_ns(run(SubBatching.FINE, no_recomputation)) <= estimate
