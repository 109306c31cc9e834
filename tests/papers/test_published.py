"""Published figures beside simulated ones: how rows are judged, what the formulas say, what is reported."""

import json
import math
from dataclasses import replace

import pytest

from braid.scheduling.model.presets.library import cluster_preset, model_preset
from braid.scheduling.plan.decide import modelled
from braid.scheduling.plan.orders import layer_pair
from braid.scheduling.plan.pairing import pair
from braid.scheduling.plan.space import with_schedule
from tests.papers import dhelix, dhelix_parts
from tests.papers.dhelix import BATCH_TOKENS
from tests.papers.dhelix_parts import PARTS, restricted
from tests.papers.oases import PUBLISHED, strategy_row
from tests.papers.published import run, show
from tests.papers.rows import POINTS, percentages
from tests.papers.steps import chosen_setting

# -- judging -------------------------------------------------------------------------------------------------


def test_percentages_fit_where_both_ends_lie_within_points_of_the_range() -> None:
    for low, high, distance in ((20.0, 30.0, 0.0), (8.0, 30.0, 2.0), (20.0, 47.0, 7.0), (1.0, 41.0, 9.0)):
        row = percentages("P", "figure 1", "speed", (10, 40), [25.0, low, high])
        assert (row.simulated, row.fits) == ((low, high), distance <= POINTS)
        assert row.distance == pytest.approx(distance)


# -- DHelix --------------------------------------------------------------------------------------------------


def test_chosen_setting_uses_what_memory_there_is() -> None:
    model, cluster = model_preset("llama-8b"), cluster_preset("a40")
    roomy = replace(cluster, gpu=replace(cluster.gpu, memory_bytes=400 * 10**9))
    small = chosen_setting([model], cluster, global_batch=256)
    large = chosen_setting([model], roomy, global_batch=256)
    assert small.layout.tp > large.layout.tp == 1
    assert large.workload.micro_batch > 1


def test_parts_of_the_breakdown_give_the_search_more_and_more() -> None:
    model, cluster = replace(model_preset("llama-39b"), sequence=16384), cluster_preset("a40")
    setting = chosen_setting([model], cluster, global_batch=64, cp=2)
    bench = modelled(cluster)(with_schedule(setting, "dhelix"))
    problem = layer_pair(bench)
    times = [pair(restricted(problem, bench.members["layer"].backward, part)).ns for part in PARTS]
    assert times == sorted(times, reverse=True)
    assert times[0] < problem.serial_ns
    assert times[-1] == pytest.approx(pair(problem).ns)


# -- Oases ----------- --------------------------------------------------------------------------------------


BERT = PUBLISHED[0]


@pytest.mark.parametrize("ours_ns", [80, 90])
def test_oases_rows_judge_the_plan(ours_ns: int) -> None:
    plan = (2,) * 4 + (4,) * 20
    costs = {plan: ours_ns, BERT.strategy: 85, (4,) * 24: 100}
    found = strategy_row(BERT, plan, costs.__getitem__)
    assert found.fits is (ours_ns <= 85)
    assert found.simulated == pytest.approx(100 * (85 / ours_ns - 1))


@pytest.mark.slow
def test_whole_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an eighth of the paper's batches: pipelines are as deep, steps shorter."""
    for module in (dhelix, dhelix_parts):
        monkeypatch.setattr(module, "BATCH_TOKENS", BATCH_TOKENS // 8)
    monkeypatch.setattr(dhelix, "PHI_BATCH", 320)
    said: list[str] = []
    report = run(None, said.append)

    assert {row.paper for row in report.rows} == {"DHelix"}
    assert len(report.left_out) == 1
    assert "Oases" in report.left_out[0]
    assert len(said) == len(set(said)) >= 4
    for row in report.rows:
        values = row.simulated if isinstance(row.simulated, tuple) else (row.simulated,)
        assert all(map(math.isfinite, (*values, row.distance))), row
        assert row.note or row.fits, f"a misfit without a reason: {row}"
    ours = [row for row in report.rows if "not slower" in row.what]
    assert len(ours) >= 10
    assert all(row.fits for row in ours), [row for row in ours if not row.fits]
    # The formula's only misfit is the paper's own.
    table_1 = [row for row in report.rows if row.figure == "table 1"]
    assert [row.published for row in table_1 if not row.fits] == [0.3]
    assert report.summary in "\n".join(show(report))
    assert json.loads(json.dumps(report.as_json()))["of"] == len(report.judged)
