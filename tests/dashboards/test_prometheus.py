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
    """Series in promtool's notation, a value per 30 s, and minutes at which the alert fires or is silent."""

    alert: str
    series: dict[str, str]
    fires: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()
    labels: str = 'run="r"'


RUNS, OVER = {f"braid_running{RUN}": "1x400"}, {f"braid_running{RUN}": "0x400"}
HIDDEN, PREDICTED = f"braid_hidden_ratio{RUN}", {f"braid_predicted_hidden_ratio{RUN}": "0.8x400"}
FELL = {HIDDEN: "0.8x100 0.4x300"}
BELOW = {HIDDEN: "0.6x400"} | PREDICTED
STRAGGLERS, RESTARTS = f"braid_stragglers_total{RUN}", f"braid_restarts_total{RUN}"
STEP = f"braid_step_seconds{RUN}"
STOOD = {f"braid_last_progress_timestamp_seconds{RUN}": "0+30x20 600x400", STEP: "5x400"}
LOST, PEAK = f"braid_dropped_spans_total{RANK}", f"braid_peak_memory_bytes{RANK}"
GROWS = {PEAK: "1000000000+1000000x400"}
ENTROPY, DROPPED = f"braid_worst_expert_entropy_ratio{RUN}", f"braid_dropped_visits_ratio{RUN}"
FEW, DROPS = {ENTROPY: "0.9x20 0.6x400"}, {DROPPED: "0.02x20 0.2x400"}
RANK_LABELS = 'rank="3", run="r", stage="1"'

CASES = (
    Case("BraidHiddenFractionFell", FELL | RUNS, fires=(60,), silent=(54,)),
    Case("BraidHiddenFractionFell", {HIDDEN: "0.8x100 0.7x300"} | RUNS, silent=(60,)),
    Case("BraidHiddenFractionFell", {HIDDEN: "0.8x10 0.4x300"} | RUNS, silent=(15,)),
    Case("BraidHiddenFractionFell", FELL | OVER, silent=(60,)),
    Case("BraidHiddenFractionBelowPrediction", BELOW | RUNS, fires=(15,), silent=(5,)),
    Case("BraidHiddenFractionBelowPrediction", BELOW | OVER, silent=(15,)),
    Case("BraidHiddenFractionBelowPrediction", {HIDDEN: "0.1x400"} | RUNS, silent=(15,)),
    Case("BraidHiddenFractionBelowPrediction", {HIDDEN: "0.7x400"} | PREDICTED | RUNS, silent=(15,)),
    Case("BraidStraggler", {STRAGGLERS: "0x20 1x400"}, fires=(20,), silent=(60,)),
    Case("BraidStraggler", {STRAGGLERS: "_x20 1x400"}, fires=(20,), silent=(60,)),
    Case("BraidStraggler", {STRAGGLERS: "3x400"}, silent=(20,)),
    Case("BraidNoProgress", STOOD | RUNS, fires=(20,), silent=(10,)),
    Case("BraidNoProgress", STOOD | OVER, silent=(20,)),
    Case("BraidNoProgress", STOOD | {STEP: "120x400"} | RUNS, silent=(20,)),
    Case("BraidRestarts", {RESTARTS: "0x20 1x5 2x5 3x400"}, fires=(30,), silent=(12,)),
    Case("BraidRestarts", {RESTARTS: "0x20 1x5 2x400"}, silent=(30,)),
    Case("BraidRestarts", {RESTARTS: "0x20 1x60 2x60 3x400"}, silent=(120,)),
    Case("BraidRestarts", {RESTARTS: "_x20 1x5 2x5 3x400"}, fires=(20,)),
    Case("BraidRestarts", {RESTARTS: "_x20 2x400"}, silent=(20,)),
    Case("BraidTelemetryDropped", {LOST: "_x30 7x400"}, fires=(16,)),
    Case("BraidTelemetryDropped", {LOST: "0x30 7x400"}, fires=(20,)),
    Case("BraidTelemetryDropped", {LOST: "7x400"}, silent=(20,)),
    Case("BraidExpertsUnbalanced", FEW | RUNS, fires=(25,), silent=(15,)),
    Case("BraidExpertsUnbalanced", FEW | OVER, silent=(25,)),
    Case("BraidExpertsUnbalanced", {ENTROPY: "0.8x400"} | RUNS, silent=(25,)),
    Case("BraidVisitsDropped", DROPS | RUNS, fires=(25,), silent=(15,)),
    Case("BraidVisitsDropped", DROPS | OVER, silent=(25,)),
    Case("BraidVisitsDropped", {DROPPED: "0.05x400"} | RUNS, silent=(25,)),
    Case("BraidMemoryGrows", GROWS | RUNS, fires=(150,), labels=RANK_LABELS),
    Case("BraidMemoryGrows", GROWS | OVER, silent=(150,)),
    Case("BraidMemoryGrows", {PEAK: "1000000000x200 2000000000x200"} | RUNS, silent=(150,)),
)
SEVERITIES = {
    rule["alert"]: rule["labels"]["severity"]
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
    if "alert" in rule
}


def promtool(*arguments: str) -> str:
    assert PROMTOOL is not None
    result = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def unit_test(path: Path, tests: list[tuple[dict[str, str], dict[str, Any]]]) -> str:
    """Have promtool check, of series a value per 30 s, what rules make of them."""
    content = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "30s",
        "group_eval_order": ["braid-recorded", "braid-alerts"],  # any order, unless it is said
        "tests": [
            {
                "interval": "30s",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                **wanted,
            }
            for series, wanted in tests
        ],
    }
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return promtool("test", "rules", str(path))


def wanted(expr: str, when: str, samples: dict[str, float]) -> dict[str, Any]:
    found = [{"labels": labels, "value": value} for labels, value in samples.items()]
    return {"expr": expr, "eval_time": when, "exp_samples": found}


def as_test(case: Case, prefix: str) -> tuple[dict[str, str], dict[str, Any]]:
    """A case as one of promtool's tests."""
    about = f'alertname="{case.alert}", alertstate="firing"'
    firing = f'ALERTS{{{about}, {case.labels}, severity="{SEVERITIES[case.alert]}"}}'
    asked = [
        wanted(f"ALERTS{{{about}}}", f"{minute}m", {firing: 1} if minute in case.fires else {})
        for minute in (*case.fires, *case.silent)
    ]
    series = {f"{prefix}{name}": values for name, values in case.series.items()}
    return series, {"promql_expr_test": asked}


@needs_promtool
def test_every_alert_fires_where_it_should_and_only_there(tmp_path: Path) -> None:
    assert "SUCCESS" in promtool("check", "rules", str(RULES))
    for alert in SEVERITIES:
        assert any(case.fires for case in CASES if case.alert == alert)
        assert any(case.silent for case in CASES if case.alert == alert)
    for prefix in ("", "ray_"):
        unit_test(tmp_path / "t.yaml", [as_test(case, prefix) for case in CASES])


@needs_promtool
def test_recorded_series(tmp_path: Path) -> None:
    series = {
        f'braid_{name}_seconds_total{{run="r",stage="0",rank="{rank}"}}': f"0+{seconds}x20"
        for name, by_rank in (("exposed", (3, 6)), ("communication", (12, 6)))
        for rank, seconds in enumerate(by_rank)
    }
    expected = {
        'braid:exposed_ratio:rate5m{run="r",stage="0"}': 0.5,
        'braid:hidden_ratio{run="r"}': 0.5,
        'braid:hidden_ratio:avg1h{run="r"}': 0.5,
    }
    asked = [wanted(key.partition("{")[0], "10m", {key: number}) for key, number in expected.items()]
    series['braid_hidden_ratio{run="r",instance="i",job="j"}'] = "0.5x20"
    unit_test(tmp_path / "t.yaml", [(series, {"promql_expr_test": asked})])


@needs_promtool
def test_annotations_speak_to_people(tmp_path: Path) -> None:
    (case,) = [case for case in CASES if case.alert == "BraidNoProgress" and case.fires]
    description = "The last step ended 10m 0s ago, and the run is not over."
    told = {
        "exp_labels": {"run": "r", "severity": "critical"},
        "exp_annotations": {"summary": "r makes no progress", "description": description},
    }
    alert = {"alertname": case.alert, "eval_time": "20m", "exp_alerts": [told]}
    unit_test(tmp_path / "t.yaml", [(case.series, {"alert_rule_test": [alert]})])
