"""One name for an operation, in the simulator and on the ranks; and as many of it."""

from pathlib import Path

import pytest

from braid.actors.controller.decisions import decide
from braid.actors.controller.planning import model_graphs
from braid.actors.controller.profiling import measure
from braid.actors.stage.messages import RunPlan
from braid.scheduling.compare_traces import compare_traces
from braid.scheduling.span_batches import read_batches
from tests.end_to_end.runs import BYTES_VOCABULARY, KeptRanks, run_plan, small_config, trained
from tests.spans import read_folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel", [{"tp": 2}, {"pp": 2}, {"dp": 2}, {"tp": 2, "pp": 2}], ids=["tp2", "pp2", "dp2", "tp2pp2"]
)
def test_everything_predicted_is_measured_and_the_reverse(
    tmp_path: Path, data: Path, parallel: dict[str, int]
) -> None:
    config = small_config(tmp_path, parallel=parallel, overlap={"schedule": "braid"}, train={"steps": 3})
    shape, launcher = config.check(BYTES_VOCABULARY), KeptRanks(config)
    serial = config.with_schedule("megatron")
    profile = measure(run_plan(serial), launcher, model_graphs(serial, shape), rounds=2)
    decided = decide(config, shape, profile)
    plan = RunPlan(config=config, shape=shape, schedule=decided.schedule, data=str(data), files=decided.files)
    trained(plan)
    predicted = read_batches(config.run_directory / "trace" / "predicted.arrows")
    measured = read_folder(config.run_directory)
    rows = compare_traces(predicted, measured.step(2)).operators
    assert len(rows) > 20
    alone = [row.operator for row in rows if not row.first_count or not row.second_count]
    assert not alone, "rows without a partner"
    assert not {row.operator for row in rows if row.first_count != row.second_count}
