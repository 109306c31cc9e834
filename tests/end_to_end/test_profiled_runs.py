"""A user's way to two strands: profile on first use, `auto`, the report's numbers, traces, wrong profiles."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.command import braid, write_config, write_corpus

MODEL = {"hidden": 32, "layers": 2, "heads": 4, "sequence": 32}


pytestmark = pytest.mark.alone


def prepare(folder: Path, **sections: Any) -> None:
    write_corpus(folder)
    sections = {"parallel": {"tp": 2}, **sections}
    cluster = {"launcher": "processes", "cpus_per_rank": 0.25}
    write_config(folder, model=MODEL, cluster=cluster, **sections)


@pytest.mark.slow
def test_train_profiles_once_chooses_and_reports(tmp_path: Path) -> None:
    prepare(tmp_path, overlap={"schedule": "auto"})
    first = braid(tmp_path, "train", "run.yaml")
    assert first.code == 0, first.errors
    assert "measuring operators" in first.output
    assert "simulated with the measured profile" in first.output
    run = tmp_path / "runs" / "run"
    report = json.loads((run / "report.json").read_text())
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
    written, schedule = decisions.stat().st_ino, (run / "schedule.txt").read_text()
    again = braid(tmp_path, "train", "run.yaml", "--overwrite")
    assert again.code == 0, again.errors
    assert "measured before" in again.output
    assert "simulated with the measured profile" in again.output
    assert decisions.stat().st_ino == written, "decided anew"
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
    # One of another model: the operator or cost that is missing is named.
    wrong = braid(
        tmp_path, "train", "run.yaml", "--overwrite", "--set", "model.family=gpt", "--set",
        f"overlap.profile={tmp_path / 'other.json'}",
    )  # fmt: skip
    assert wrong.code == 2
    assert "Traceback" not in wrong.errors


@pytest.mark.slow
def test_profile_command_draws_and_keeps(tmp_path: Path) -> None:
    prepare(tmp_path)
    outcome = braid(tmp_path, "profile", "run.yaml", "--svg", "heat.svg", "--output", "profile.json")
    assert outcome.code == 0, outcome.errors
    assert "overlap effectiveness" in outcome.output
    assert (tmp_path / "heat.svg").read_text().startswith("<svg")
    again = braid(tmp_path, "profile", "run.yaml", "--json")
    assert again.code == 0, again.errors
    assert json.loads(again.output) == json.loads((tmp_path / "profile.json").read_text())
    assert "layer/qkv" in json.loads(again.output)["solo_ns"]
    trained = braid(
        tmp_path, "train", "run.yaml", "--set", "overlap.schedule=braid", "--set",
        "overlap.profile=profile.json", "--set", "telemetry.spans=false",
    )  # fmt: skip
    assert trained.code == 0, trained.errors
    report = json.loads((tmp_path / "runs" / "run" / "report.json").read_text())
    assert report["overlap"]["communication_seconds"] == 0, "no spans, no numbers"
