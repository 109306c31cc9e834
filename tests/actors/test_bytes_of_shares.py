"""Bytes that ranks hold under every ZeRO stage, against the model of memory: equal to the byte."""

from pathlib import Path

import pytest

from braid.actors.config import Config
from braid.actors.controller.planning import model_graphs, setting_of
from braid.actors.controller.ranks.processes import ProcessLauncher
from braid.actors.stage.rank.interface import Rank
from braid.actors.stage.rank.messages import RunPlan
from braid.scheduling.model.units import unit_parts
from braid.scheduling.schedule.code import Code
from braid.scheduling.schedule.memory import rank_memory
from braid.scheduling.schedule.text import parse
from braid.scheduling.schedule.validate import linked
from tests.actors.ranks import Probed, Ranks
from tests.cuda.training import state_bytes
from tests.end_to_end.runs import prepare_text, small_config


class Weighed(Probed):
    """A rank that tells what it holds."""

    def state_bytes(self) -> tuple[int, int, int]:
        """Of parameters, gradients and optimizer states, between steps."""
        return state_bytes(self._parts)


CASES: list[tuple[dict[str, int], str, bool, str | None]] = [
    ({"dp": 2, "pp": 2, "zero": 2}, "ddp", True, "bf16"),
    ({"dp": 4, "zero": 3, "shards": 2}, "megatron", False, "bf16"),
]
"""Layout, schedule, whether embedding and head are one table, to what gradients are rounded: beside what
`tests.cuda.test_combinations` weighs."""


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "schedule", "tied_head", "reduce_dtype"), CASES)
def test_ranks_hold_what_the_model_of_memory_says(
    tmp_path: Path, parallel: dict[str, int], schedule: str, tied_head: bool, reduce_dtype: str | None
) -> None:
    config = small_config(
        tmp_path,
        model={"layers": 4, "kv_heads": 4, "tied_head": tied_head},
        train={"global_batch": 16, "dtype": "fp32", "reduce_dtype": reduce_dtype},
        parallel=parallel,
        overlap={"schedule": schedule},
    )
    assert_bytes(config, tmp_path)


def assert_bytes(config: Config, folder: Path) -> list[int]:
    """What every rank holds in a step, in all; equal to the model of memory in each of its parts."""
    group = ProcessLauncher(config, serve=Weighed).start(config.layout().ranks)
    try:
        ranks = Ranks(config, prepare_text(folder, 3), group)
        ranks.meet(0)
        ranks.train([0])
        held = ranks.all(Weighed.state_bytes)
        peaks = ranks.all(Rank.activation_bytes, 1)
    finally:
        group.shutdown()
    code, sent = code_of(ranks.plan), config.train.reduce_dtype
    memories = [
        rank_memory(code, ranks.plan.shape, "fp32", stage, reduce_dtype=sent)
        for stage in range(ranks.layout.pp)
    ]
    for rank, (state, peak) in enumerate(zip(held, peaks, strict=True)):
        memory = memories[ranks.layout.mesh.position(rank)["pp"]]
        assert state == (memory.parameter_bytes, memory.gradient_bytes, memory.optimizer_bytes)
        assert peak == memory.activation_bytes
    return [sum(state) + peak for state, peak in zip(held, peaks, strict=True)]


def code_of(plan: RunPlan) -> Code:
    """What the ranks of a run link."""
    setting, schedule = setting_of(plan.config, plan.shape), parse(plan.schedule)
    units = unit_parts(
        model_graphs(plan.config, plan.shape), setting.layout, setting.kinds, schedule.unit_layers
    )
    return linked(schedule, setting.layout, setting.kinds, units)
