"""Commands that are told to end, or lose their reader, in the ways of shells, systemd and batch systems."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from braid.actors.controller.records.json_lines import read_lines
from tests.end_to_end.command import (
    environment,
    left_running,
    processes_mentioning,
    start,
    steps_done,
    write_config,
    write_corpus,
)

pytestmark = pytest.mark.slow

ALONE: dict[str, Any] = {"env": environment(), "text": True, "start_new_session": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_corpus(tmp_path)
    write_config(tmp_path, train={"steps": 100_000}, parallel={"tp": 2}, cluster={"cpus_per_rank": 0.5})
    return tmp_path


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "runs" / "run" / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda one: one.name)
def test_a_signal_to_all_processes_of_a_run_ends_it_with_a_checkpoint(folder: Path, number: int) -> None:
    """Ctrl-C; others with one to the command alone a moment before, as ``timeout`` sends them."""
    options: dict[str, Any] = {**ALONE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = subprocess.Popen([sys.executable, "-m", "braid", "train", "run.yaml"], cwd=folder, **options)
    steps_done(folder, 3)
    if number != signal.SIGINT:
        os.kill(command.pid, number)
    os.killpg(command.pid, number)
    output, errors = command.communicate(timeout=60)
    assert command.returncode == 130, errors
    assert "stopped early; go on with --resume" in output
    assert errors == ""
    (saved,) = checkpoints(folder)
    lines = read_lines(folder / "runs" / "run" / "metrics.jsonl")
    assert saved == f"step-{len(lines)}", "no step is lost"
    assert not left_running(command.pid)
    assert not processes_mentioning(str(folder))


def test_a_second_signal_ends_a_run_at_once_and_says_what_is_left(folder: Path) -> None:
    """A save hangs, as its disk would: the rank that writes is stopped."""
    command = start(folder, "train", "run.yaml", "--set", "failure.silence_s=600")
    steps_done(folder, 3)
    ranks = json.loads((folder / "runs" / "run" / "cluster.json").read_text())["processes"]
    os.kill(ranks[1], signal.SIGSTOP)
    os.kill(command.pid, signal.SIGINT)
    time.sleep(1.5)
    os.kill(command.pid, signal.SIGINT)
    _, errors = command.communicate(timeout=60)
    assert command.returncode == 130
    assert errors == "braid: stopped at once, without a checkpoint; there is no checkpoint\n"
    assert not checkpoints(folder), "nor half a one"
    assert not left_running(command.pid)


def test_a_run_whose_reader_has_seen_enough_goes_on(folder: Path) -> None:
    """`| head -3`."""
    shell = f"{sys.executable} -m braid train run.yaml --set train.steps=6 | head -2"
    script = f"{shell}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, timeout=180, **ALONE)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2
    told = [line for line in done.stderr.splitlines() if line.startswith("braid: ")]
    assert told == ["braid: standard output cannot be written (Broken pipe); training goes on without it"]
    assert checkpoints(folder) == ["step-6"]
