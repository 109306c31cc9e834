"""A stopped run goes on as if it had not been stopped, in other layouts too; nothing is left behind."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.end_to_end.command import (
    braid,
    left_running,
    processes_mentioning,
    start,
    write_config,
    write_corpus,
)

LAYOUTS = {
    "one rank": (),
    "tp 2": ("parallel.tp=2",),
    "pp 2 folded": ("parallel.pp=2", "overlap.schedule=folded"),
    "dp 2": ("parallel.dp=2",),
    "shares": ("parallel.dp=2", "parallel.zero=3"),
    "degrees": ("parallel.tp=2", "parallel.tensor_degrees=2 2*1 2"),
    "two copies": ("parallel.pp=2", "overlap.schedule=bidirectional"),
}

FORMATS = {"fp64": ("train.dtype=fp64",), "bf16": ("train.dtype=bf16",)}


def _set(overrides: tuple[str, ...]) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def losses(folder: Path, name: str) -> list[float]:
    """The losses of a run, checked to be of the steps 1, 2, 3, ..."""
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with corpus, configuration and an uninterrupted run of 16 steps on one rank."""
    path = tmp_path_factory.mktemp("resume")
    write_corpus(path)
    write_config(path, train={"steps": 16, "dtype": "fp64", "warmup_steps": 3}, checkpoint={"every": 5})
    assert braid(path, "train", "run.yaml", "--set", "name=whole").code == 0
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("one rank", "tp 2"),
        ("tp 2", "pp 2 folded"),
        ("pp 2 folded", "dp 2"),
        ("dp 2", "two copies"),
        ("two copies", "shares"),
        ("shares", "degrees"),
        ("degrees", "one rank"),
    ],
)
def test_resume_in_another_layout(folder: Path, first: str, second: str) -> None:
    """And without the corpus, whose tokens the run has."""
    name = f"{first}-{second}".replace(" ", "_")
    common = ("train", "run.yaml", "--set", f"name={name}")
    stopped = braid(folder, *common, *_set(LAYOUTS[first]), "--until", "10")
    assert stopped.code == 0, stopped.errors
    assert len(losses(folder, name)) == 10
    resumed = braid(folder, *common, *_set(LAYOUTS[second]), "--set", "data.files=[gone.txt]", "--resume")
    assert resumed.code == 0, resumed.errors
    assert "the run has the tokens that were made before" in resumed.output
    assert losses(folder, name) == pytest.approx(losses(folder, "whole"), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FORMATS)
def test_resume_in_the_same_layout_is_bitwise(folder: Path, dtype: str) -> None:
    runs = {}
    for name, stops in (("straight", ()), ("stopped", ("10",))):
        common = ("train", "run.yaml", "--set", f"name={dtype}-{name}", *_set(FORMATS[dtype]))
        for stop in stops:
            assert braid(folder, *common, "--until", stop).code == 0
        assert braid(folder, *common, *(("--resume",) if stops else ())).code == 0
        runs[name] = losses(folder, f"{dtype}-{name}")
    assert runs["straight"] == runs["stopped"]


@pytest.mark.slow
def test_a_finished_run_resumes_to_nothing(folder: Path) -> None:
    before = losses(folder, "whole")
    outcome = braid(folder, "train", "run.yaml", "--set", "name=whole", "--resume")
    assert outcome.code == 0, outcome.errors
    assert "nothing left to do" in outcome.output
    assert losses(folder, "whole") == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "number"),
    [("processes", signal.SIGINT), ("processes", signal.SIGTERM), ("ray", signal.SIGINT)],
    ids=lambda value: value if isinstance(value, str) else value.name,
)  # SIGTERM on Ray: test_elastic.py
def test_a_signal_saves_and_leaves_nothing_running(
    folder: Path, launcher: str, number: signal.Signals
) -> None:
    """SIGINT goes to the whole session, as a terminal's Ctrl-C does; SIGTERM to the command alone."""
    name = f"{launcher}-{number.name}"
    common = ("train", "run.yaml", "--set", f"name={name}", "--set", "parallel.dp=2", "--launcher", launcher)
    process = start(folder, *common, "--set", "train.steps=100000", "--set", "checkpoint.every=0")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step "):
            break
    (os.killpg if number is signal.SIGINT else os.kill)(process.pid, number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "stopped early; go on with --resume" in output
    assert "Traceback" not in errors
    assert left_running(process.pid) == []
    assert processes_mentioning(f"name={name}") == []
    steps = len(losses(folder, name))
    checkpoints = folder / "runs" / name / "checkpoints"
    assert sorted(p.name for p in checkpoints.iterdir()) == ["latest", f"step-{steps}"]


@pytest.mark.slow
def test_ray_and_processes_give_the_same_bits(folder: Path) -> None:
    for launcher in ("ray", "processes"):
        arguments = ("--set", f"name=by-{launcher}", "--launcher", launcher, "--set", "parallel.tp=2")
        assert braid(folder, "train", "run.yaml", *arguments, "--until", "6").code == 0
    assert losses(folder, "by-ray") == losses(folder, "by-processes")


@pytest.mark.slow
def test_report_has_what_it_promises(folder: Path) -> None:
    report_file = folder / "report.json"
    arguments = ("--set", "name=reported", "--set", "parallel.tp=2", "--report", str(report_file))
    assert braid(folder, "train", "run.yaml", *arguments, "--until", "4").code == 0
    report = json.loads(report_file.read_text())
    assert report == json.loads((folder / "runs" / "reported" / "report.json").read_text())
    assert [set(step) for step in report["steps"]] == [
        {"step", "loss", "grad_norm", "lr", "seconds", "wall_seconds", "tokens"}
    ] * 4
    assert all(step["wall_seconds"] >= step["seconds"] for step in report["steps"])
    assert report["tokens_per_s"] > 0
    assert 0 < report["validation"]["bits_per_byte"] < 9
    assert report["layout"]["tp"] == 2
    assert len(report["memory"]["peak_bytes"]) == 2
    assert 0 < report["communication"]["exposed_seconds"] <= report["communication"]["seconds"]
    directory = folder / "runs" / "reported"
    assert {"config.yaml", "cluster.json", "schedule.txt", "metrics.jsonl"} <= {
        path.name for path in directory.iterdir()
    }
