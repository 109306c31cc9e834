"""Recording rules and alerts, judged by promtool: every alert fires where it should, and only there."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from braid.dashboards.grafana import RULES

pytestmark = pytest.mark.slow

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")

RUN, RANK = '{run="r"}', '{run="r",stage="1",rank="3"}'


@dataclass(frozen=True)
class Case:
    """Series in promtool's notation, a value per 30 s; does the alert fire ``minutes`` after the first?"""

    alert: str
    fires: bool
    minutes: int
    series: dict[str, str]
    labels: str = ""


RUNS = {f"braid_running{RUN}": "1x400"}
OVER = {f"braid_running{RUN}": "0x400"}
FELL = {f"braid_hidden_ratio{RUN}": "0.8x100 0.4x300"}
BELOW = {
    f"braid_hidden_ratio{RUN}": "0.6x400",
    f"braid_predicted_hidden_ratio{RUN}": "0.8x400",
}
STOOD = {
    f"braid_last_progress_timestamp_seconds{RUN}": "0+30x20 600x400",
    f"braid_step_seconds{RUN}": "5x400",
}
GROWS = {f"braid_peak_memory_bytes{RANK}": "1000000000+1000000x400"}
FEW = {f"braid_worst_expert_entropy_ratio{RUN}": "0.9x20 0.6x400"}
DROPS = {f"braid_dropped_visits_ratio{RUN}": "0.02x20 0.2x400"}
RANK_LABELS = 'rank="3", run="r", stage="1"'

CASES = (
    Case("BraidHiddenFractionFell", True, 60, FELL | RUNS),
    Case("BraidHiddenFractionFell", False, 60, {f"braid_hidden_ratio{RUN}": "0.8x100 0.7x300"} | RUNS),
    Case("BraidHiddenFractionFell", False, 60, FELL | OVER),
    Case("BraidHiddenFractionFell", False, 15, {f"braid_hidden_ratio{RUN}": "0.8x10 0.4x300"} | RUNS),
    Case("BraidHiddenFractionFell", False, 54, FELL | RUNS),
    Case("BraidHiddenFractionBelowPrediction", True, 15, BELOW | RUNS),
    Case("BraidHiddenFractionBelowPrediction", False, 5, BELOW | RUNS),
    Case("BraidHiddenFractionBelowPrediction", False, 15, BELOW | OVER),
    Case("BraidHiddenFractionBelowPrediction", False, 15, {f"braid_hidden_ratio{RUN}": "0.1x400"} | RUNS),
    Case(
        "BraidHiddenFractionBelowPrediction",
        False,
        15,
        {**BELOW, f"braid_hidden_ratio{RUN}": "0.7x400"} | RUNS,
    ),
    Case("BraidStraggler", True, 20, {f"braid_stragglers_total{RUN}": "0x20 1x400"}),
    Case("BraidStraggler", False, 20, {f"braid_stragglers_total{RUN}": "3x400"}),
    Case("BraidStraggler", False, 60, {f"braid_stragglers_total{RUN}": "0x20 1x400"}),
    Case("BraidStraggler", True, 20, {f"braid_stragglers_total{RUN}": "_x20 1x400"}),
    Case("BraidStraggler", False, 60, {f"braid_stragglers_total{RUN}": "_x20 1x400"}),
    Case("BraidNoProgress", True, 20, STOOD | RUNS),
    Case("BraidNoProgress", False, 10, STOOD | RUNS),
    Case("BraidNoProgress", False, 20, STOOD | OVER),
    Case("BraidNoProgress", False, 20, {**STOOD, f"braid_step_seconds{RUN}": "120x400"} | RUNS),
    Case("BraidRestarts", True, 30, {f"braid_restarts_total{RUN}": "0x20 1x5 2x5 3x400"}),
    Case("BraidRestarts", False, 30, {f"braid_restarts_total{RUN}": "0x20 1x5 2x400"}),
    Case("BraidRestarts", False, 30, {f"braid_restarts_total{RUN}": "0x20 1x400"}),
    Case("BraidRestarts", False, 120, {f"braid_restarts_total{RUN}": "0x20 1x60 2x60 3x400"}),
    Case("BraidRestarts", True, 20, {f"braid_restarts_total{RUN}": "_x20 1x5 2x5 3x400"}),
    Case("BraidRestarts", False, 20, {f"braid_restarts_total{RUN}": "_x20 2x400"}),
    Case("BraidTelemetryDropped", True, 16, {f"braid_dropped_spans_total{RANK}": "_x30 7x400"}),
    Case("BraidTelemetryDropped", True, 20, {f"braid_dropped_spans_total{RANK}": "0x30 7x400"}),
    Case("BraidTelemetryDropped", False, 20, {f"braid_dropped_spans_total{RANK}": "7x400"}),
    Case("BraidExpertsUnbalanced", True, 25, FEW | RUNS),
    Case("BraidExpertsUnbalanced", False, 15, FEW | RUNS),
    Case("BraidExpertsUnbalanced", False, 25, FEW | OVER),
    Case("BraidExpertsUnbalanced", False, 25, {f"braid_worst_expert_entropy_ratio{RUN}": "0.8x400"} | RUNS),
    Case("BraidVisitsDropped", True, 25, DROPS | RUNS),
    Case("BraidVisitsDropped", False, 15, DROPS | RUNS),
    Case("BraidVisitsDropped", False, 25, DROPS | OVER),
    Case("BraidVisitsDropped", False, 25, {f"braid_dropped_visits_ratio{RUN}": "0.05x400"} | RUNS),
    Case("BraidMemoryGrows", True, 150, GROWS | RUNS, RANK_LABELS),
    Case("BraidMemoryGrows", False, 150, GROWS | OVER),
    Case(
        "BraidMemoryGrows",
        False,
        150,
        {f"braid_peak_memory_bytes{RANK}": "1000000000x200 2000000000x200"} | RUNS,
    ),
)
SEVERITIES = {
    rule["alert"]: rule["labels"]["severity"]
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
    if "alert" in rule
}


def promtool(*arguments: str) -> str:
    """Run promtool; its output, with an error shown as the test's failure."""
    assert PROMTOOL is not None
    result = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def written(path: Path, tests: list[dict[str, Any]]) -> str:
    """A file of promtool's unit tests over the rules."""
    content = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "30s",
        "group_eval_order": ["braid-recorded", "braid-alerts"],  # any order, unless it is said
        "tests": tests,
    }
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return str(path)


def as_test(case: Case, prefix: str, fires: bool) -> dict[str, Any]:
    """A case as one of promtool's tests."""
    labels = case.labels or 'run="r"'
    series = f'alertname="{case.alert}", alertstate="firing", {labels}, severity="{SEVERITIES[case.alert]}"'
    return {
        "interval": "30s",
        "input_series": [
            {"series": f"{prefix}{name}", "values": values} for name, values in case.series.items()
        ],
        "promql_expr_test": [
            {
                "expr": f'ALERTS{{alertname="{case.alert}",alertstate="firing"}}',
                "eval_time": f"{case.minutes}m",
                "exp_samples": [{"labels": f"ALERTS{{{series}}}", "value": 1}] if fires else [],
            }
        ],
    }


@needs_promtool
def test_rules_are_valid() -> None:
    assert "SUCCESS" in promtool("check", "rules", str(RULES))


def test_every_alert_is_tested_both_ways() -> None:
    for alert in SEVERITIES:
        assert {case.fires for case in CASES if case.alert == alert} == {True, False}
    assert {case.alert for case in CASES} == SEVERITIES.keys()


@needs_promtool
@pytest.mark.parametrize("prefix", ["", "ray_"])
def test_alerts_fire_where_they_should_and_only_there(tmp_path: Path, prefix: str) -> None:
    promtool("test", "rules", written(tmp_path / "t.yaml", [as_test(c, prefix, c.fires) for c in CASES]))


@needs_promtool
def test_the_opposite_is_noticed(tmp_path: Path) -> None:
    """The cases above could pass because promtool compared nothing."""
    with pytest.raises(AssertionError, match="FAILED") as error:
        promtool("test", "rules", written(tmp_path / "t.yaml", [as_test(c, "", not c.fires) for c in CASES]))
    assert str(error.value).count("ALERTS{alertname=") >= len(CASES)


@needs_promtool
def test_recorded_series(tmp_path: Path) -> None:
    name = "braid_exposed_seconds_total"
    series = {
        f'{name}{{run="r",stage="0",rank="0"}}': "0+3x20",
        f'{name}{{run="r",stage="0",rank="1"}}': "0+6x20",
        'braid_communication_seconds_total{run="r",stage="0",rank="0"}': "0+12x20",
        'braid_communication_seconds_total{run="r",stage="0",rank="1"}': "0+6x20",
        'braid_hidden_ratio{run="r",instance="i",job="j"}': "0.5x20",
    }
    expected = {
        'braid:exposed_ratio:rate5m{run="r",stage="0"}': 0.5,
        'braid:hidden_ratio{run="r"}': 0.5,
        'braid:hidden_ratio:avg1h{run="r"}': 0.5,
    }
    test = {
        "interval": "30s",
        "input_series": [{"series": key, "values": values} for key, values in series.items()],
        "promql_expr_test": [
            {
                "expr": key.partition("{")[0],
                "eval_time": "10m",
                "exp_samples": [{"labels": key, "value": number}],
            }
            for key, number in expected.items()
        ],
    }
    promtool("test", "rules", written(tmp_path / "t.yaml", [test]))


@needs_promtool
def test_annotations_speak_to_people(tmp_path: Path) -> None:
    (case,) = [case for case in CASES if case.alert == "BraidNoProgress" and case.fires]
    test = as_test(case, "", True)
    del test["promql_expr_test"]
    test["alert_rule_test"] = [
        {
            "alertname": case.alert,
            "eval_time": "20m",
            "exp_alerts": [
                {
                    "exp_labels": {"run": "r", "severity": "critical"},
                    "exp_annotations": {
                        "summary": "r makes no progress",
                        "description": "The last step ended 10m 0s ago, and the run is not over.",
                    },
                }
            ],
        }
    ]
    promtool("test", "rules", written(tmp_path / "t.yaml", [test]))
