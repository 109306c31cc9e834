"""What ranks write themselves can be read: while they run, when they die, and where there is no room."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from braid.actors.stage.rank.log import log_file, put_aside
from tests.end_to_end.command import ROOT, braid, environment, start, write_config, write_corpus

TALK = """
import os
print("said by Python", end="")
os.write(1, b", and by a library\\n")
os.write(2, b"to standard error\\n")
"""


@pytest.mark.slow
def test_a_rank_that_dies_leaves_its_last_words(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    layer = tmp_path / "layer.py"  # ranks load it when they have a log
    layer.write_text((ROOT / "docs" / "examples" / "parallel_layer.py").read_text() + TALK)
    write_config(
        tmp_path,
        model={"layer": f"{layer}:ParallelLayer"},
        parallel={"tp": 2},
        train={"steps": 100000},
        failure={"max_restarts": 0},
        telemetry={"page": False},
    )
    run = tmp_path / "runs" / "run"
    stale = log_file(run, 3)  # of a run with more ranks, which this one replaces
    stale.parent.mkdir(parents=True)
    stale.touch()
    (run / "config.yaml").touch()
    process = start(tmp_path, "train", "run.yaml", "--overwrite")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step "):
            break
    follower = start(tmp_path, "logs", "runs/run", "-f")
    assert follower.stdout is not None
    shown = [follower.stdout.readline()]
    os.kill(json.loads((run / "cluster.json").read_text())["processes"][1], signal.SIGABRT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors
    assert errors.splitlines()[-1] == "what the rank wrote: braid logs runs/run --rank 1"
    shown += follower.stdout  # it ends with the run; communicate() would miss what was read ahead
    assert follower.wait(60) == 0
    lines = "".join(shown).splitlines()
    for rank in (0, 1):
        own = [line.removeprefix(f"rank {rank} | ") for line in lines if line.startswith(f"rank {rank} | ")]
        assert f"generation 1, rank {rank} on" in own[0]
        assert own[1:3] == ["said by Python, and by a library", "to standard error"]
    assert "rank 1 | Fatal Python error: Aborted" in lines
    one = braid(tmp_path, "logs", "runs/run", "--rank", "1")
    assert one.code == 0
    assert one.output.splitlines() == [line for line in lines if line.startswith("rank 1 | ")]
    assert not stale.exists()


def in_a_process(code: str) -> "subprocess.CompletedProcess[str]":
    head = (
        "import os, sys; from pathlib import Path; from braid.actors.stage.rank.log import Logged, write_to\n"
    )
    command = [sys.executable, "-c", head + code]
    return subprocess.run(command, env=environment(), capture_output=True, text=True)


def test_a_full_disk_and_a_missing_folder_end_nothing(tmp_path: Path) -> None:
    wrong = "print('lost'); print('lost', file=sys.stderr); sys.exit(7)"
    full = in_a_process(f"assert write_to(Path('/dev/full'), 'header', anew=False)\n{wrong}")
    assert (full.returncode, full.stdout, full.stderr) == (7, "", "")
    nowhere = in_a_process(f"print(write_to(Path('{tmp_path}/none/logs/rank-0.log'), 'header', anew=True))")
    assert (nowhere.stdout, nowhere.stderr) == ("False\n", "")


def test_a_long_log_is_put_aside_and_a_new_run_begins_anew(tmp_path: Path) -> None:
    log = log_file(tmp_path, 0)
    for anew, before, expected in (
        (True, "x", ("header\n", None)),
        (False, "short\n", ("short\nheader\n", None)),
        (False, "long\n" * 2_000_000, ("header\n", 10_000_000)),
        (True, "x", ("header\n", None)),
    ):
        log.parent.mkdir(exist_ok=True)
        log.write_text(before)
        assert in_a_process(f"write_to(Path('{log}'), 'header', anew={anew})").returncode == 0
        aside = put_aside(log)
        assert (log.read_text(), aside.stat().st_size if aside.exists() else None) == expected


def test_a_log_is_put_aside_while_a_rank_writes_to_it(tmp_path: Path) -> None:
    """C++ libraries among those who write; a rank looks whenever it is called."""
    program = f"""
class Rank(Logged):
    rank, address = 0, "here"

    def work(self):
        os.write(2, b"words\\n" * 100_000)

rank = Rank()
rank.open_log({str(tmp_path)!r}, 1)
for _ in range(40):
    rank.work()
"""
    done = in_a_process(program)
    assert (done.returncode, done.stderr) == (0, "")
    log = log_file(tmp_path, 0)
    sizes = log.stat().st_size, put_aside(log).stat().st_size
    assert all(0 < size < (8 << 20) + 700_000 for size in sizes), sizes
    assert log.read_text().startswith("=== goes on from rank-0.log.1")
