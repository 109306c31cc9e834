"""Memory that a schedule needs at least and at most.

What ranks really hold is compared to the byte in `tests.cuda.training`, whenever a run is.
"""

import re

import pytest

from braid.scheduling.generate.lower import training_schedule
from braid.scheduling.model.units import members_of
from braid.scheduling.schedule.link import link
from braid.scheduling.schedule.memory import DTYPE_BYTES, held_during, least_bytes, rank_memory
from braid.scheduling.schedule.validate import ScheduleError, check_memory
from tests.scheduling.cases import (
    LLAMA,
    ORDERS,
    choices_for,
    layout_for,
    linked_schedule,
    model_parts,
    parts_for,
    setting_for,
)


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize(("recompute", "zero"), [("none", 0), ("selective", 1), ("full", 3)])
def test_what_a_rank_holds_at_least_is_no_more_than_it_holds(name: str, recompute: str, zero: int) -> None:
    layout = layout_for(name, 4, tp=2, dp=2, zero=zero)
    setting = setting_for(name, layout, 8, recompute=recompute, dtype="bf16")
    parts = parts_for(setting)
    code = link(training_schedule(setting, parts, choices_for(setting)), layout, setting.kinds, parts)
    held = max(rank_memory(code, setting.model, "bf16", stage).total_bytes for stage in range(4))
    parts = model_parts(recompute=recompute, tp=2)
    members = {c: members_of(parts, layout, setting.kinds, c) for c in range(layout.chunks)}
    least = least_bytes(setting.order.order(layout, 8, setting.hop), members, layout, "bf16")
    assert held / 4 < least <= held


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("zero", [0, 3])
def test_memory_over_the_limit_is_refused(name: str, zero: int) -> None:
    """A byte less than the fullest rank needs; the message names stage, instruction and what is missing."""
    code = linked_schedule(name, 2, 6, 2, zero=zero)
    needed = [rank_memory(code, LLAMA, "bf16", stage).total_bytes for stage in range(2)]
    most = max(needed)
    check_memory(code, LLAMA, "bf16", most)
    with pytest.raises(ScheduleError, match=rf"{most / 2**30:.2f} GiB over the limit of 0.00 GiB"):
        check_memory(code, LLAMA, "bf16", 0)
    with pytest.raises(ScheduleError) as error:
        check_memory(code, LLAMA, "bf16", most - 1)
    message = str(error.value)
    found = re.match(rf"schedule {name}, stage (\d), at (.+?): memory: a rank of this stage needs ", message)
    assert found, message
    stage = int(found[1])
    assert needed[stage] == most
    assert f"{most / 2**30:.2f} GiB here" in message
    assert f"* stage {stage}" in message
    during = held_during(code, stage, DTYPE_BYTES["bf16"])
    assert found[2] == str(code.schedule.stages[stage][during.index(max(during))])
