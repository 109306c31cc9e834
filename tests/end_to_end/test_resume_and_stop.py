"""A run goes on as if it had not been stopped, in other layouts too. How it stops: `test_signals`."""

import json
from pathlib import Path

import pytest

from tests.end_to_end.command import braid, losses_of, write_config, write_corpus

pytestmark = pytest.mark.slow

LAYOUTS = (
    (),
    ("parallel.tp=2",),
    ("parallel.pp=2", "overlap.pipeline=folded"),
    ("parallel.dp=2", "parallel.zero=3"),
    ("parallel.tp=2", "parallel.tensor_degrees=2 2*1 2"),
    ("parallel.dp=2",),
)
"""Of the steps 1 to 3, 4 to 6 and so on."""


def _set(overrides: tuple[str, ...]) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with corpus, configuration and an uninterrupted run of 18 steps on one rank."""
    path = tmp_path_factory.mktemp("resume")
    write_corpus(path)
    write_config(path, train={"steps": 18, "dtype": "fp64", "warmup_steps": 3}, checkpoint={"every": 5})
    assert braid(path, "train", "run.yaml", "--set", "name=whole").code == 0
    return path


def test_every_layout_goes_on_from_the_one_before(folder: Path) -> None:
    """And without the corpus, whose tokens the run has."""
    common, more = ("train", "run.yaml", "--set", "name=moved"), ()
    for number, layout in enumerate(LAYOUTS, start=1):
        outcome = braid(folder, *common, *_set(layout), "--until", str(3 * number), *more)
        assert outcome.code == 0, outcome.errors
        assert len(losses_of(folder, "moved")) == 3 * number
        assert ("the run has the tokens that were made before" in outcome.output) == bool(more)
        more = ("--set", "data.files=[gone.txt]", "--resume")
    assert losses_of(folder, "moved") == pytest.approx(losses_of(folder, "whole"), rel=1e-9)


def test_a_finished_run_resumes_to_nothing(folder: Path) -> None:
    before = losses_of(folder, "whole")
    outcome = braid(folder, "train", "run.yaml", "--set", "name=whole", "--resume")
    assert outcome.code == 0, outcome.errors
    assert "nothing left to do" in outcome.output
    assert losses_of(folder, "whole") == before


def test_report_has_what_it_promises(folder: Path) -> None:
    report_file = folder / "report.json"
    arguments = ("--set", "name=reported", "--set", "parallel.tp=2", "--report", str(report_file))
    assert braid(folder, "train", "run.yaml", *arguments, "--until", "4").code == 0
    report = json.loads(report_file.read_text())
    assert report == json.loads((folder / "runs" / "reported" / "report.json").read_text())
    keys = {"step", "loss", "grad_norm", "lr", "seconds", "wall_seconds", "tokens"}
    assert [set(step) for step in report["steps"]] == [keys] * 4
    assert all(step["wall_seconds"] >= step["seconds"] for step in report["steps"])
    assert report["tokens_per_s"] > 0
    assert 0 < report["validation"]["bits_per_byte"] < 9
    assert report["layout"]["tp"] == 2
    assert len(report["memory"]["peak_bytes"]) == 2
    assert 0 < report["communication"]["exposed_seconds"] <= report["communication"]["seconds"]
    files = {path.name for path in (folder / "runs" / "reported").iterdir()}
    assert {"config.yaml", "cluster.json", "schedule.txt", "metrics.jsonl"} <= files
