"""`braid train` under torchrun, and in processes for which somebody else has set torchrun's variables."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from braid.actors.config.joined import JoinedProcess
from braid.actors.controller.ranks.rendezvous import KINDS, Door, Plate
from tests.end_to_end.command import (
    braid,
    environment,
    losses_of,
    processes_mentioning,
    steps_done,
    write_config,
    write_corpus,
)
from tests.end_to_end.forked import Command
from tests.in_process import Capture, called, refused
from tests.waiting import within

TRAIN = ["-m", "braid", "train"]
pytestmark = pytest.mark.slow


@pytest.fixture
def config(tmp_path: Path) -> Path:
    write_corpus(tmp_path)
    cluster = {"launcher": "processes", "cpus_per_rank": 0.5, "device": "cpu"}
    return write_config(tmp_path, model={"layers": 2}, parallel={"tp": 2}, cluster=cluster)


class Joined:
    """Processes of `braid train` with torchrun's variables."""

    def __init__(self, folder: Path, ranks: int, *arguments: str) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as free:
            port = free.getsockname()[1]
        common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self.processes = [
            Command(["train", *arguments], folder, {**environment(), **common, "RANK": str(rank)})
            for rank in range(ranks)
        ]

    def ended(self) -> list[tuple[int, str, str]]:
        told = [process.communicate(timeout=120) for process in self.processes]
        return [(process.wait(), *texts) for process, texts in zip(self.processes, told, strict=True)]


@pytest.fixture
def started(config: Path) -> Iterator[list[Joined]]:
    """Holds what a test starts; it ends with the test."""
    made: list[Joined] = []
    yield made
    for process in (process for one in made for process in one.processes if process.poll() is None):
        process.kill()
        process.communicate()


def nothing_left(folder: Path) -> None:
    """Neither processes of the run nor of its ranks."""
    pids = json.loads((folder / "runs" / "run" / "cluster.json").read_text())["processes"]
    assert within(10, lambda: not [pid for pid in pids if pid and Path(f"/proc/{pid}").exists()])
    assert not processes_mentioning(str(folder), patience=5)


def test_torchrun_measures_and_trains_as_plain_processes_do(config: Path, tmp_path: Path) -> None:
    """To the bit, with the spans of all ranks; no key says that there is torchrun. A profile and the run take
    the same processes, one group of ranks after the other."""
    config.write_text(config.read_text().replace("  launcher: processes\n", ""))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *torchrun, *TRAIN, str(config), "--set", "overlap.schedule=auto"]
    options: dict[str, Any] = {"env": environment(), "capture_output": True, "text": True, "timeout": 180}
    ended = subprocess.run(command, cwd=tmp_path, **options)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("ranks   2 (tp 2); steps 1 to 4") == 1
    run = tmp_path / "runs" / "run"
    assert (run / "profile.json").exists()
    assert len(list((run / "trace").glob("rank-0000[01].*"))) == 2
    nothing_left(tmp_path)
    same = ("--launcher", "processes", "--set", "name=alone", "--plan", str(run / "plan.yaml"))
    alone = braid(tmp_path, "train", str(config), *same)
    assert alone.code == 0, alone.errors
    assert losses_of(tmp_path, "run") == losses_of(tmp_path, "alone")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("", "the layout has 2 ranks (parallel.dp=1, parallel.tp=2|has started 3 processes; start 2"),
        ("--oops", "No such option: --oops"),
    ],
)
def test_a_run_is_refused_by_one_process(
    config: Path, tmp_path: Path, started: list[Joined], call: str, says: str
) -> None:
    started.append(Joined(tmp_path, 3, str(config), *call.split()))
    ended = started[0].ended()
    assert [code for code, *_ in ended] == [2, 2, 2]
    (line,) = [line for _, output, errors in ended for line in (output + errors).splitlines()]
    assert all(part in line for part in says.split("|")), line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("--launcher ray", "cluster.launcher='ray' starts its own ranks|leave cluster.launcher out"),
        ("--set parallel.dp=x", "parallel.dp='x'"),
        ("--set elastic.max_ranks=4", "elastic.max_ranks=4: torchrun's processes do not come and go"),
        ("--resume", "there is no run|start it without --resume"),
    ],
)
def test_what_torchrun_cannot_do_is_refused(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, call: str, says: str
) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(config.parent)
    refused(called(capsys, "train", config, *call.split()), *says.split("|"))
    assert not (config.parent / "runs").exists()


def test_signals_stop_a_run_with_a_checkpoint(config: Path, tmp_path: Path, started: list[Joined]) -> None:
    """To all processes at once, as torchrun, Slurm and a terminal send them."""
    started.append(Joined(tmp_path, 2, str(config), "--set", "train.steps=100000"))
    steps_done(tmp_path, 2)
    for process in started[0].processes:
        os.killpg(process.pid, signal.SIGTERM)
    ended = started[0].ended()
    assert [code for code, *_ in ended] == [130, 130], ended
    (saved,) = (tmp_path / "runs" / "run" / "checkpoints").glob("step-*")
    assert saved.name == f"step-{len(losses_of(tmp_path, 'run'))}"
    nothing_left(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_process_ends_all(
    config: Path, tmp_path: Path, started: list[Joined], number: signal.Signals
) -> None:
    """The copy of its state that its partner holds is saved before."""
    more = ["--set", "checkpoint.copies_every=1", "--set", "failure.silence_s=3"]
    started.append(Joined(tmp_path, 2, str(config), "--set", "train.steps=100000", *more))
    steps_done(tmp_path, 2)
    begin = time.monotonic()
    started[0].processes[1].send_signal(number)
    started[0].processes[0].wait(60)
    started[0].processes[1].kill()
    (code, _, errors), (killed, *_) = started[0].ended()
    assert (code, killed) == (1, -signal.SIGKILL)
    assert "rank 1: its process has ended, and with it the run; `torchrun --max-restarts`" in errors
    assert time.monotonic() - begin < 60
    assert list((tmp_path / "runs" / "run" / "checkpoints").glob("step-*"))
    nothing_left(tmp_path)


def test_the_end_of_the_command_ends_all(config: Path, tmp_path: Path, started: list[Joined]) -> None:
    started.append(Joined(tmp_path, 2, str(config), "--set", "train.steps=100000"))
    steps_done(tmp_path, 1)
    started[0].processes[0].kill()
    assert [code for code, *_ in started[0].ended()] == [-signal.SIGKILL, 1]
    nothing_left(tmp_path)


def test_a_door_opens_to_nobody_without_the_token() -> None:
    """What strangers send is not unpickled, and keeps nobody else waiting."""
    with Door("127.0.0.1") as door:
        silent = socket.create_connection(door.plate[:2])
        with pytest.raises(Exception, match=r"digest|Authentication|reject"):
            Plate(*door.plate[:2], "another token").knock("calls", 1, "127.0.0.1")
        connections = [door.plate.knock(kind, 1, "127.0.0.1") for kind in KINDS]
        guest = door.take(1, 5.0)
        guest.calls.send("hello")
        assert connections[0].recv() == "hello"
        assert guest.pid == os.getpid()
        silent.close()


@pytest.mark.parametrize(
    ("name", "value"), [("RANK", "x"), ("WORLD_SIZE", "-1"), ("RANK", "2"), ("MASTER_PORT", "http")]
)
def test_variables_that_torchrun_does_not_set_so(name: str, value: str) -> None:
    whole = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert JoinedProcess.of(whole) == JoinedProcess(1, 2, "127.0.0.1", 29500, 2)
    assert JoinedProcess.of({**whole, "MASTER_ADDR": ""}) is None
    unset = "unset RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT to start braid without torchrun"
    with pytest.raises(ValueError, match=f"^{name}='?{value}'? must be .*{unset}"):
        JoinedProcess.of({**whole, name: value})
