"""Fault drills as a user runs them: faults of every sort, and a run that comes out as if nothing had been."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.command import braid, write_config, write_corpus
from tests.end_to_end.test_two_hosts import require_hosts


def drill(folder: Path, faults: str, *options: str) -> dict[str, Any]:
    """The report of a drill with tensor parallelism 2."""
    write_corpus(folder)
    write_config(folder, parallel={"tp": 2}, cluster={"cpus_per_rank": 0.5})
    outcome = braid(folder, "drill", "run.yaml", "--faults", faults, "--json", *options, timeout=400)
    assert outcome.code == 0, outcome.errors + outcome.output
    report: dict[str, Any] = json.loads(outcome.output)
    return report


def check(report: dict[str, Any], harmless: set[str]) -> None:
    """All faults fired; what had to be noticed was, and nothing differs."""
    assert report["passed"]
    assert report["largest_difference"] == 0
    for outcome in report["outcomes"]:
        kind = outcome["fault"]["kind"]
        assert outcome["fired"] > 0
        assert (outcome["detected_after"] is None) == (kind in harmless), kind


@pytest.mark.slow
@pytest.mark.timeout(450)
def test_ranks_and_controller(tmp_path: Path) -> None:
    kinds = "kill-forward,kill-optimizer,kill-save,stop,nan,kill-controller,flipped-byte,sigterm"
    report = drill(tmp_path, kinds, "--seed", "3")
    check(report, {"nan", "sigterm"})
    by_kind = {outcome["fault"]["kind"]: outcome for outcome in report["outcomes"]}
    for kind in ("kill-forward", "kill-optimizer", "stop"):
        assert by_kind[kind]["restored_from"] == "copies in memory"
        assert by_kind[kind]["steps_lost"] <= 1
        assert list(by_kind[kind]["parts"]) == ["interrupt", "replace", "rendezvous", "restore", "first step"]
    assert by_kind["flipped-byte"]["restored_from"].startswith("checkpoint")
    assert report["held"][0]["processes"] == report["held"][1]["processes"]
    assert report["held"][0]["sockets"] == report["held"][1]["sockets"]


@pytest.mark.slow
@pytest.mark.timeout(450)
def test_hosts_links_and_disks(tmp_path: Path) -> None:
    require_hosts()
    report = drill(tmp_path, "kill-host,cut-short,cut-long,slow-link,disk-full", "--seed", "4")
    check(report, {"cut-short", "slow-link", "disk-full"})
    assert report["emulated_hosts"]


def test_wrong_faults(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    write_config(tmp_path)
    outcome = braid(tmp_path, "drill", "run.yaml", "--faults", "kill-forwards")
    assert outcome.code == 2
    assert "'kill-forwards' is not known" in outcome.errors
    assert "kill-forward," in outcome.errors
    listed = braid(tmp_path, "drill", "run.yaml", "--list")
    assert listed.code == 0
    assert "cut-long" in listed.output
