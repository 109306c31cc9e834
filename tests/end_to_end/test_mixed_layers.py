"""Operators of models whose layers are of several kinds are measured, and run beside each other.

That such models train as with nothing beside anything: `tests.cuda.test_special_runs`.
"""

from pathlib import Path

import pytest

from braid.actors.controller.planning import model_graphs, plan_run
from braid.actors.controller.profiling import measure
from tests.end_to_end.command import ROOT
from tests.end_to_end.runs import BYTES_VOCABULARY, KeptRanks, run_plan, small_config

MODEL = {
    "layer": {"parallel": f"{ROOT}/docs/examples/parallel_layer.py:ParallelLayer"},
    "pattern": "2*layer 2*parallel",
    "layers": 4,
    "hidden": 32,
    "sequence": 16,
}


@pytest.mark.parametrize("degrees", [{"pp": 2}, pytest.param({"tp": 2}, marks=pytest.mark.slow)])
def test_operators_of_all_kinds_are_measured(tmp_path: Path, degrees: dict[str, int]) -> None:
    """Also where one stage holds one kind and its neighbour another: they send each other messages."""
    config = small_config(tmp_path, model=MODEL, parallel=degrees)
    shape = config.check(BYTES_VOCABULARY)
    parts = model_graphs(config, shape)
    profile = measure(run_plan(config), KeptRanks(config), parts, rounds=2)
    graphs = (graph for part in parts.values() for graph in (part.forward, part.backward))
    operators = {op.key for graph in graphs for op in graph.operators}
    assert operators <= set(profile.solo_ns)
    assert {"layer/qkv", "parallel/qkv"} <= operators
    taken = plan_run(config.with_schedule("dhelix"), shape, profile).taken
    paired = {side.unit for sides in taken.code.schedule.programs if len(sides) > 1 for side in sides}
    assert all(any(kind in unit for unit in paired) for kind in ("layer", "parallel"))
