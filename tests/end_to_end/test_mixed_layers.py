"""Operators of models whose layers are of several kinds are measured, and run beside each other.

That such models train as with nothing beside anything: `tests.cuda.test_special_runs`.
"""

from collections.abc import Iterable
from pathlib import Path

import pytest

from braid.actors.controller.planning import build_schedule, model_graphs, plan_run
from braid.actors.controller.profiling import measure
from braid.actors.stage.messages import RunPlan
from braid.scheduling.schedule import Sides
from braid.scheduling.schedule_text import write
from tests.end_to_end.command import ROOT
from tests.end_to_end.runs import BYTES_VOCABULARY, KeptRanks, small_config

MODEL = {
    "layer": {"parallel": f"{ROOT}/docs/examples/parallel_layer.py:ParallelLayer"},
    "pattern": "2*layer 2*parallel",
    "layers": 4,
    "hidden": 32,
    "sequence": 16,
}


def _assert_paired(programs: Iterable[Sides]) -> None:
    """Layers of both kinds run beside others."""
    units = {side.unit for sides in programs if len(sides) > 1 for side in sides}
    assert all(any(kind in unit for unit in units) for kind in ("layer", "parallel"))


@pytest.mark.parametrize("degrees", [{"pp": 2}, pytest.param({"tp": 2}, marks=pytest.mark.slow)])
def test_operators_of_all_kinds_are_measured(tmp_path: Path, degrees: dict[str, int]) -> None:
    """Also where one stage holds one kind and its neighbour another: they send each other messages."""
    config = small_config(tmp_path, model=MODEL, parallel=degrees)
    shape = config.check(BYTES_VOCABULARY)
    plan = RunPlan(config=config, shape=shape, schedule=write(build_schedule(config, shape)), data="")
    parts = model_graphs(config, shape)
    profile = measure(plan, KeptRanks(config), parts, rounds=2)
    graphs = (graph for part in parts.values() for graph in (part.forward, part.backward))
    operators = {op.key for graph in graphs for op in graph.operators}
    assert operators <= set(profile.solo_ns)
    assert {"layer/qkv", "parallel/qkv"} <= operators
    taken = plan_run(config.with_schedule("dhelix"), shape, profile).taken
    assert taken.step_ns > 0
    _assert_paired(taken.code.schedule.programs)
