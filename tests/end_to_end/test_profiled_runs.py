"""A user's way to two strands: profile on first use, `auto`, the report's numbers, traces, wrong profiles."""

import json
from pathlib import Path

import pytest

from tests.end_to_end.command import braid, write_config, write_corpus

MODEL = {"hidden": 32, "layers": 2, "heads": 4, "sequence": 32}

pytestmark = [pytest.mark.alone, pytest.mark.slow]


def test_train_profiles_once_chooses_and_reports(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    cluster = {"launcher": "processes", "cpus_per_rank": 0.25}
    sections = {"model": MODEL, "cluster": cluster, "parallel": {"tp": 2}, "overlap": {"schedule": "auto"}}
    write_config(tmp_path, **sections)
    first = braid(tmp_path, "train", "run.yaml", "--report", "report.json")
    assert first.code == 0, first.errors
    assert "measuring operators" in first.output
    assert "simulated with the measured profile" in first.output
    run = tmp_path / "runs" / "run"
    report = json.loads((run / "report.json").read_text())
    assert json.loads((tmp_path / "report.json").read_text()) == report
    overlap = report["overlap"]
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    seconds = ("slowdown_seconds", "launch_gap_seconds", "bubble_seconds", "waiting_seconds")
    assert {"hidden_fraction", *seconds} <= {*line} & {*overlap}
    assert 0 < overlap["alpha"] < 1
    assert 1 < overlap["limit_speedup"] <= 2
    assert overlap["communication_seconds"] > 0
    assert {"hidden_seconds", "recovered"} <= {*overlap}
    assert 0 <= overlap["hidden_fraction"] <= 1
    assert overlap["slowdown_seconds"] is not None
    assert json.loads((run / "profile.json").read_text())["source"].startswith("measured: 2 x")
    compared = braid(tmp_path, "compare", str(run / "trace" / "predicted.arrows"), str(run), "--json")
    assert compared.code == 0, compared.errors
    operators = {row["operator"]: row for row in json.loads(compared.output)["operators"]}
    qkv = operators["qkv"]
    assert qkv["first_count"] == qkv["second_count"] == 4 * 2, "micro-batches x layers: no span is lost"
    odd = [row for row in operators.values() if row["first_count"] != row["second_count"]]
    assert not odd, "all that is predicted is measured, and the reverse"
    assert len(operators) > 20
    (decisions,) = (tmp_path / "runs" / "profiles").glob("decisions-*.json")
    inode, schedule = decisions.stat().st_ino, (run / "schedule.txt").read_text()
    again = braid(tmp_path, "train", "run.yaml", "--overwrite")
    assert again.code == 0, again.errors
    assert "measured before" in again.output
    assert "simulated with the measured profile" in again.output
    assert decisions.stat().st_ino == inode, "decided anew"
    assert (run / "schedule.txt").read_text() == schedule
    # A profile from elsewhere: one message, nothing lost.
    profile = json.loads((run / "profile.json").read_text())
    profile["source"] = "measured: 8 x GPU of another machine"
    (tmp_path / "other.json").write_text(json.dumps(profile))
    refused = braid(tmp_path, "train", "run.yaml", "--overwrite", "--set", "overlap.profile=other.json")
    assert refused.code == 2
    assert "was measured on '8 x GPU of another machine'" in refused.errors
    assert "profile anew with `braid profile`" in refused.errors
    assert "Traceback" not in refused.errors
    assert (run / "report.json").exists()
    # What a command writes is taken.
    written = braid(tmp_path, "profile", "run.yaml", "--svg", "heat.svg", "--output", "mine.json")
    assert written.code == 0, written.errors
    assert "overlap effectiveness" in written.output
    assert (tmp_path / "heat.svg").read_text().startswith("<svg")
    mine = ("--set", "overlap.profile=mine.json", "--set", "name=mine")
    trained = braid(tmp_path, "train", "run.yaml", *mine, "--set", "telemetry.spans=false")
    assert trained.code == 0, trained.errors
    report = json.loads((tmp_path / "runs" / "mine" / "report.json").read_text())
    assert report["overlap"]["communication_seconds"] == 0, "no spans, no numbers"
