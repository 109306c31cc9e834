"""The bubbles of the pipelines, and how long their messages may take.

Formulas count slots of `unit_timeline`: a forward takes f, a backward b, input gradients half of it (rounded
up), weight gradients the rest. Where a stage holds two chunks, a block is half of one of 1F1B's, so that
1F1B on the same layers takes 2f and 2b.
"""

import pytest

from braid.scheduling.schedule import Await, Block, Pass, Receive
from braid.scheduling.timeline import Timeline, in_flight, unit_timeline
from tests.scheduling.cases import (
    HOPS,
    PAIRED_W,
    SIZES,
    STAGES,
    code_of,
    layout_for,
    named_schedule,
    sizes_of,
)

DURATIONS = pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (2, 4), (3, 5)])


def idle(timeline: Timeline) -> int:
    """Slots that every stage idles; the same on all."""
    slots = {timeline.idle(stage) for stage in range(len(timeline.stages))}
    assert len(slots) == 1
    return slots.pop()


@pytest.mark.parametrize(("p", "m"), SIZES)
@DURATIONS
def test_bubble_of_1f1b(p: int, m: int, forward: int, backward: int) -> None:
    """(p-1)(f+b), whatever m."""
    timeline = unit_timeline(named_schedule("megatron", p, m), forward, backward)
    assert timeline.length == (m + p - 1) * (forward + backward)
    assert idle(timeline) == (p - 1) * (forward + backward)
    assert unit_timeline(named_schedule("intra_batch", p, m), forward, backward).length == timeline.length


@STAGES
@DURATIONS
def test_running_further_ahead_costs_no_bubble_but_memory(p: int, forward: int, backward: int) -> None:
    for m in sizes_of("megatron:eager_1f1b", p):
        eager, plain = (named_schedule(name, p, m) for name in ("megatron:eager_1f1b", "megatron"))
        assert (
            unit_timeline(eager, forward, backward).length == unit_timeline(plain, forward, backward).length
        )
        assert [in_flight(eager, stage) for stage in range(p)] == [min(2 * (p - i) - 1, m) for i in range(p)]


@STAGES
@DURATIONS
def test_bubble_of_interleaved_1f1b_is_half(p: int, forward: int, backward: int) -> None:
    for m in sizes_of("interleaved", p):
        timeline = unit_timeline(named_schedule("interleaved", p, m), forward, backward)
        whole = unit_timeline(named_schedule("megatron", p, m), 2 * forward, 2 * backward)
        assert 2 * idle(timeline) == idle(whole)


@STAGES
@DURATIONS
@pytest.mark.parametrize("name", PAIRED_W)
def test_bubble_of_the_paired_w_is_that_of_1f1b(name: str, p: int, forward: int, backward: int) -> None:
    """2(p-1)(f+b) where blocks are paired (m > p); without, its warm-up and cool-down meet."""
    for m in sizes_of(name, p, 14):
        slots = idle(unit_timeline(named_schedule(name, p, m), forward, backward))
        if m > p:
            assert slots == 2 * (p - 1) * (forward + backward)
            whole = unit_timeline(named_schedule("megatron", p, m), 2 * forward, 2 * backward)
            assert slots == idle(whole)
        else:
            assert slots == 2 * (p - 1) * (forward + backward) - 2 * forward * (m - 1)


@STAGES
@DURATIONS
@HOPS
def test_bubble_of_the_eager_w_is_half_that_of_1f1b(p: int, forward: int, backward: int, hop: int) -> None:
    """(p-1)(f+b) once there are micro-batches for all journeys that are under way."""
    under_way = hop * (p - 1) + 1
    for m in range(under_way, under_way + 5):
        slots = idle(unit_timeline(named_schedule("braid:eager_w", p, m, hop=hop), forward, backward))
        assert slots == (p - 1) * (forward + backward)


@HOPS
@pytest.mark.parametrize("p", range(2, 6))
def test_receives_are_started_when_their_message_may_come(p: int, hop: int) -> None:
    """As many blocks ahead as the message has slots: it travels once both sides have asked for it."""
    m = 4 * hop * p
    schedule = named_schedule("braid:eager_w", p, m, hop=hop)
    code_of(schedule, layout_for("braid:eager_w", p))
    for stage in schedule.stages:
        asked: dict[Pass, int] = {}
        blocks = 0
        for instruction in stage:
            match instruction:
                case Receive(moved):
                    asked[moved] = blocks
                case Await(Receive(moved)):
                    assert blocks - asked.pop(moved) == min(hop - 1, blocks)
                case Block():
                    blocks += 1
        assert not asked


@pytest.mark.parametrize("p", range(2, 6))
@pytest.mark.parametrize(
    ("name", "hop", "visits"),
    [("braid", 0, 0), ("braid:eager_w", 0, 1), ("braid:eager_w", 3, 2), ("braid:eager_w", 4, 3)],
)
def test_how_long_a_message_of_the_w_may_take(name: str, hop: int, visits: int, p: int) -> None:
    """From the pair that ends with it to the one that begins with it: nothing, or pairs' times (mean)."""
    m, pair = 24 * p, 3
    steady = range(8 * p, m - 8 * p)
    layout, schedule = layout_for(name, p), named_schedule(name, p, m, hop=hop)
    stages = unit_timeline(schedule, 1, 2).stages
    when = {one.whole: timed for stage in stages for timed in stage for one in timed.block.passes}
    waits = []
    for one, timed in when.items():
        after = one.after(layout)
        if after is None or layout.stage_of(after.chunk) == layout.stage_of(one.chunk):
            continue
        if one.forward and one.micro_batch in steady:
            waits.append(when[after].start - timed.end)
    assert len(waits) == len(steady) * 2 * (p - 1)
    assert sum(waits) == len(waits) * visits * pair
    assert min(waits) >= visits * (pair - 1)


@pytest.mark.parametrize(("p", "m"), SIZES)
@DURATIONS
def test_the_folded_pipeline_idles_less_than_1f1b(p: int, m: int, forward: int, backward: int) -> None:
    """By the forwards that move up beside those of others: 2f(min(p, m) - 1)."""
    folded = unit_timeline(named_schedule("megatron:folded", p, m), forward, backward)
    unfolded = unit_timeline(named_schedule("megatron", p, m), 2 * forward, 2 * backward)
    saved = 2 * forward * (min(p, m) - 1)
    assert unfolded.length - folded.length == saved
    for stage in range(p):
        work = sum(timed.end - timed.start for timed in folded.stages[stage])
        assert work == sum(timed.end - timed.start for timed in unfolded.stages[stage])
        assert unfolded.idle(stage) - folded.idle(stage) == saved


@STAGES
@DURATIONS
@pytest.mark.parametrize("name", ["dualpipev", "braid:v"])
def test_bubble_of_dual_pipe_v(name: str, p: int, forward: int, backward: int) -> None:
    """(p-1)(f + 2b - 3w), the published (PP-1)(F&B + B - 3W) with F&B = f + b; less than 1F1B's."""
    weights = backward - (backward + 1) // 2
    for m in sizes_of(name, p, 14):
        slots = idle(unit_timeline(named_schedule(name, p, m), forward, backward))
        assert slots == (p - 1) * (forward + 2 * backward - 3 * weights)
        assert slots < 2 * (p - 1) * (forward + backward) or p == 1


@STAGES
def test_bubble_of_zero_bubble_v(p: int) -> None:
    """On slots of equal length p-1 where full waves of p micro-batches run, always less than 1F1B's."""
    for m in sizes_of("zbv", p, 18):
        slots = idle(unit_timeline(named_schedule("zbv", p, m), 1, 2))
        assert slots < 6 * (p - 1) or p == 1
        if m % p == 0:
            assert slots == p - 1
