"""Wrong input that is found in data, runs, checkpoints or clusters; the rest: `tests/jobs/test_mistakes.py`.

One clear message, exit code 2, no trace, and nothing is left behind.
"""

import fcntl
from pathlib import Path

import pytest

from tests.actors.saved import flip
from tests.end_to_end.command import ROOT, braid, write_config, write_corpus
from tests.in_process import refused

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_corpus(tmp_path)
    write_config(tmp_path)
    return tmp_path


def _check(folder: Path, says: tuple[str, ...], *arguments: str) -> None:
    before = {path for path in folder.rglob("*") if "data" not in path.parts}
    refused(braid(folder, *arguments, timeout=100), *says)
    after = {path for path in folder.rglob("*") if "data" not in path.parts}
    assert {p for p in after - before if p.name != "runs"} == set()


def test_a_text_that_is_too_short(folder: Path) -> None:
    (folder / "corpus.txt").write_text("too short for one sample")
    _check(folder, ("tokens", "33"), "train", "run.yaml")


def test_run_directory_in_use(folder: Path) -> None:
    lock = folder / "runs" / "run" / ".lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        _check(folder, ("runs/run", "in use", "--set name="), "train", "run.yaml")


def test_other_data_or_model_and_damaged_checkpoints(tmp_path: Path) -> None:
    """Truncated or flipped: refused by name; an older good one is used, and that is said aloud."""
    write_corpus(tmp_path)
    write_config(tmp_path, checkpoint={"every": 2})
    assert braid(tmp_path, "train", "run.yaml", "--until", "3").code == 0
    for override, says in (
        ("model.layers=2", ("layers=4", "layers=2")),
        ("train.seed=7", ("seed=0", "7", "other samples")),
        ("train.global_batch=4", ("global_batch=8", "4")),
        ("model.pattern=layer own", ("pattern=layer,", "pattern=layer own")),
    ):
        arguments = ["train", "run.yaml", "--resume", "--set", override]
        if "pattern" in override:
            example = ROOT / "docs" / "examples" / "parallel_layer.py"
            arguments += ["--set", f"model.layer.own={example}:ParallelLayer"]
        _check(tmp_path, says, *arguments)
    checkpoints = tmp_path / "runs" / "run" / "checkpoints"
    newest = next(iter(sorted((checkpoints / "step-3").glob("*.distcp"))))
    newest.write_bytes(newest.read_bytes()[:-7])
    again = braid(tmp_path, "train", "run.yaml", "--resume", "--set", "checkpoint.keep=9")
    assert again.code == 0, again.errors
    assert "step-3" in again.output
    assert "falling back to step 2" in again.output
    for damaged in checkpoints.glob("step-*/*.distcp"):
        flip(damaged)
    says = ("step-4", "step-2", "checksum", "no older checkpoint")
    _check(tmp_path, says, "train", "run.yaml", "--resume")
