"""The bubbles of the pipelines, and how long their messages may take.

Formulas count slots of `unit_timeline`: a forward takes f, a backward b, input gradients half of it (rounded
up), weight gradients the rest. Where a stage holds two chunks, a block is half of one of 1F1B's, so that
1F1B on the same layers takes 2f and 2b.
"""

from collections.abc import Callable

import pytest

from braid.scheduling.schedule.operations import Pass, Receive, Start, Wait
from braid.scheduling.schedule.schedule import Block
from braid.scheduling.schedule.timeline import Timeline, unit_timeline
from tests.scheduling.cases import HOPS, PAIRED_W, STAGES, code_of, layout_for, named_schedule, sizes_of

DURATIONS = pytest.mark.parametrize(("forward", "backward"), [(1, 2), (3, 5)])


def idle(timeline: Timeline) -> int:
    """Slots that every stage idles; the same on all."""
    slots = {timeline.idle(stage) for stage in range(len(timeline.stages))}
    assert len(slots) == 1
    return slots.pop()


def weights(b: int) -> int:
    """Of a backward pass, what weight gradients take."""
    return b - (b + 1) // 2


BUBBLES: dict[str, Callable[[int, int, int, int], int]] = {
    **dict.fromkeys(
        ("megatron", "intra_batch", "megatron:eager_1f1b", "interleaved"),
        lambda p, m, f, b: (p - 1) * (f + b),
    ),
    # Where blocks are paired (m > p) that of 1F1B; without, warm-up and cool-down meet.
    **dict.fromkeys(PAIRED_W, lambda p, m, f, b: 2 * (p - 1) * (f + b) - 2 * f * (m - 1) * (m <= p)),
    # Less by the forwards that move up beside those of others.
    "megatron:folded": lambda p, m, f, b: 2 * (p - 1) * (f + b) - 2 * f * (min(p, m) - 1),
    # The published (PP-1)(F&B + B - 3W) with F&B = f + b.
    **dict.fromkeys(("dualpipev", "braid:v"), lambda p, m, f, b: (p - 1) * (f + 2 * b - 3 * weights(b))),
}
"""Of p stages and m micro-batches. 1F1B of stages that hold two chunks has 2(p-1)(f+b)."""


@STAGES
@DURATIONS
@pytest.mark.parametrize("name", BUBBLES)
def test_bubbles_are_the_formulas(name: str, p: int, forward: int, backward: int) -> None:
    for m in sizes_of(name, p, 14):
        timeline = unit_timeline(named_schedule(name, p, m), forward, backward)
        slots = BUBBLES[name](p, m, forward, backward)
        assert idle(timeline) == slots
        assert timeline.length == slots + m * (forward + backward) * layout_for(name, p).chunks // p


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
                case Start(Receive(moved)):
                    asked[moved] = blocks
                case Wait(Receive(moved)):
                    assert blocks - asked.pop(moved) == min(hop - 1, blocks)
                case Block():
                    blocks += 1
        assert not asked


@STAGES
def test_bubble_of_zero_bubble_v(p: int) -> None:
    """On slots of equal length p-1 where full waves of p micro-batches run, always less than 1F1B's."""
    for m in sizes_of("zbv", p, 18):
        slots = idle(unit_timeline(named_schedule("zbv", p, m), 1, 2))
        assert slots < 6 * (p - 1) or p == 1
        if m % p == 0:
            assert slots == p - 1
