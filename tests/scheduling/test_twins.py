"""Twins: the same pass of two micro-batches side by side, begin and end of a step of ``braid:twins``."""

import pytest

from braid.scheduling.schedule.operations import Direction, PassKind
from braid.scheduling.schedule.schedule import Block
from braid.scheduling.schedule.text import parse, write
from braid.scheduling.schedule.timeline import in_flight, unit_timeline
from tests.scheduling.cases import linked_schedule

F, B = PassKind.FORWARD, PassKind.BACKWARD


@pytest.mark.parametrize("m", range(3, 14))
def test_no_pass_is_alone_where_there_is_another(m: int) -> None:
    schedule = linked_schedule("braid:twins", 1, m, 2).schedule
    blocks = [i for i in schedule.stages[0] if isinstance(i, Block)]
    kinds = [tuple(one.kind for one in block.passes) for block in blocks]
    assert kinds == [(F, F), *([(F, B)] * (m - 2)), *([(B,), (B,)] if m % 2 else [(B, B)])]
    ran = [str(one.whole).rstrip("b") for one in schedule.passes[0]]
    assert sorted(ran) == sorted(f"{letter}{n}.0" for letter in "FB" for n in range(m))
    gradients = [one.micro_batch for one in schedule.passes[0] if one.direction is Direction.BACKWARD]
    assert gradients == sorted(gradients), "gradients are added up in the order of micro-batches"
    assert all(len({one.strand for one in block.passes}) == len(block.passes) for block in blocks)
    assert in_flight(schedule, 0) == 2
    assert parse(write(schedule)) == schedule
    assert unit_timeline(schedule).length == 3 * m
