"""What the ranks of named schedules issue in a step, for small models and orders that need no profile."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from braid.scheduling.link import link
from braid.scheduling.lowering.lower import training_schedule, validation_schedule
from braid.scheduling.spec import ModelShape
from tests.cuda.actions import FirstUse, Programs
from tests.cuda.issued import issued
from tests.cuda.kernels_in_flight import Machine
from tests.scheduling.cases import (
    LLAMA,
    LOWERED,
    choices_for,
    exists,
    layout_for,
    parts_for,
    pipeline_of,
    setting_for,
)

SMALL = replace(LLAMA, layers=1)
"""A layer for every chunk."""
EXPERTS = replace(SMALL, family="moe", experts=8, top_k=2, balance_loss=0.1)
"""The host has to know how many rows go where, before it can go on."""
CASES = tuple(f"{name}/{hop}" if hop else name for name in LOWERED for hop in pipeline_of(name).hops)
"""Schedules with their pipelines, and slots that a message may take."""
EVERY_CASE = pytest.mark.parametrize("name", CASES)
EAGER, WARM, LAZY = Machine(first=FirstUse.EAGER), Machine(), Machine(first=FirstUse.LAZY)


def sizes(name: str, stages: Iterable[int]) -> list[tuple[int, int]]:
    """Stages with few, some and many micro-batches."""
    return [(p, m) for p in stages for m in sorted({1, min(p, 3), p, 2 * p + 2}) if exists(name, p, m)]


def programs(
    name: str,
    stages: int,
    micro_batches: int,
    tp: int = 1,
    *,
    dp: int = 1,
    cp: int = 1,
    ep: int = 1,
    zero: int = 0,
    model: ModelShape = SMALL,
    hosts: int = 1,
    barriers: bool = False,
    ends: bool = False,
    **more: object,
) -> Programs:
    """What all ranks issue. ``hosts``: so many. ``barriers``: see `issued`. ``ends``: see `choices_for`."""
    layout = replace(layout_for(name, stages, tp, dp, zero), cp=cp, ep=ep)
    setting = setting_for(name, layout, micro_batches, model=model, **more)
    parts = parts_for(setting)
    schedule = training_schedule(setting, parts, choices_for(setting, ends=ends))
    code = link(schedule, layout, setting.model.kinds, parts)
    places = [str(rank * hosts // layout.ranks) for rank in range(layout.ranks)]
    return issued(code, setting.model, places, barriers=barriers)


FORWARD = ("megatron", "interleaved", "megatron:folded")
"""A schedule for each placement: forward passes alone follow from that."""


def forward_passes(name: str, stages: int, micro_batches: int, *, dp: int = 1, zero: int = 0) -> Programs:
    """What all ranks issue in a validation."""
    layout = layout_for(name, stages, dp=dp, zero=zero)
    setting = setting_for(name, layout, 2 * stages, model=SMALL)
    parts = parts_for(setting)
    schedule = validation_schedule(SMALL, layout, micro_batches, parts)
    return issued(link(schedule, layout, setting.model.kinds, parts), setting.model)
