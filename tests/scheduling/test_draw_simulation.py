"""Pictures of a paired block: what a layer has put off is marked where the next one takes it up."""

from dataclasses import replace

import pytest

from braid.scheduling.draw_simulation import COLOURS, pair_bars, pair_svg, pair_text, paired_run
from braid.scheduling.fusion import split_place
from braid.scheduling.plan import Setting
from braid.scheduling.planner.compose import evaluate, with_schedule
from braid.scheduling.presets.library import cluster_preset
from braid.scheduling.schedule import Barrier, is_late
from braid.scheduling.spec import ParallelLayout, Workload
from tests.dashboards.made_up_runs import SHAPE


@pytest.mark.parametrize("fused", [0, 2])
def test_what_was_put_off_is_marked(fused: int) -> None:
    workload = Workload(global_batch=8, micro_batch=1)
    serial = Setting(model=SHAPE, layout=ParallelLayout(tp=2), workload=workload)
    setting = replace(with_schedule(serial, "braid"), fused=fused)
    found = evaluate(setting, replace(cluster_preset("a40", 1), gpus_per_node=2)).simulation
    program = max(found.job.schedule.pairs.values(), key=lambda one: sum(map(is_late, one)))
    names = [
        action.operator if (place := split_place(action.operator)) is None else place[2]
        for action in program
        if not isinstance(action, Barrier) and is_late(action)
    ]
    run = paired_run(found)
    assert names
    assert run is not None
    bars = pair_bars(found, run)
    marked = sorted(bar.label for bar in bars if bar.kind == "P")
    assert marked == sorted(f"P:{name}" for name in names)
    assert all(not bar.label.startswith("P:") for bar in bars if bar.kind != "P")
    assert pair_svg(found, run, "a pair").count(f'fill="{COLOURS["P"]}"') == len(marked)
    assert {kind for _, pieces in pair_text(found, run) for _, kind in pieces} == {"F", "B", "P", ""}
