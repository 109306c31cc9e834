"""``braid slurm``: scripts that bash accepts and that start what they should, with stand-ins for Slurm and
Ray.

No Slurm was at hand: that a cluster runs what is written here has not been tried.
"""

import json
import os
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from braid.actors.controller.records.json_lines import read_lines
from tests.end_to_end.command import ROOT, environment, write_config, write_corpus
from tests.end_to_end.test_readme import write_first
from tests.in_process import Capture, Outcome, called, refused


@pytest.fixture
def slurm(here: Path, capsys: Capture) -> Any:
    """``braid slurm run.yaml ARGUMENTS`` in this process: 16 ranks."""
    write_corpus(here)
    (here / "run.yaml").write_text("name: My_run.2\nparallel: {dp: 2, tp: 8}\ndata: {files: [corpus.txt]}\n")
    return partial(called, capsys, "slurm", "run.yaml")


STUB = """\
#!{python}
import json, os, subprocess, sys
words = sys.argv[1:]
name = os.path.basename(sys.argv[0])
with open({log!r}, "a") as log:
    env = {{key: os.environ.get(key) for key in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}}
    log.write(json.dumps({{"name": name, "words": words, "env": env}}) + chr(10))
if name == "scontrol":
    print("127.0.0.1" + chr(10) + "127.0.0.2")
elif name == "srun":
    words = [word for word in words if not word.startswith("--kill")]
    nodes = [subprocess.Popen(words) for _ in range(int(os.environ["SLURM_NNODES"]))]
    sys.exit(max(node.wait() for node in nodes))
elif name == "ray":
    sys.exit(subprocess.call(words[words.index("--") + 1 :]))
"""


def run(folder: Path, text: str, stubs: list[str], nodes: int) -> list[dict[str, Any]]:
    """Submit a script: as ``sbatch`` would run it on the first node. Return the calls of the stand-ins."""
    script, log, commands = folder / "run.sh", folder / "calls.jsonl", folder / "bin"
    script.write_text(text)
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    commands.mkdir()
    for name in ("srun", "scontrol", *stubs):
        (commands / name).write_text(STUB.format(python=sys.executable, log=str(log)))
        (commands / name).chmod(0o755)
    (commands / "python").symlink_to(sys.executable)
    beside = {} if not stubs else {"BRAID_BIN": str(commands)}
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": str(nodes)}
    path = f"{commands}:{os.environ['PATH']}"
    ended = subprocess.run(
        ["bash", script],
        cwd=folder,
        env={**environment(), **job, **beside, "PATH": path},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return read_lines(log)


def directives(text: str) -> dict[str, str]:
    lines = (line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH"))
    return dict(line.split("=", 1) for line in lines)


def written(outcome: Outcome) -> str:
    assert (outcome.code, outcome.errors) == (0, "")
    return outcome.output


def test_what_sbatch_is_asked_for(slurm: Any, tmp_path: Path) -> None:
    text = written(slurm("--nodes", "2", "--time", "12:00:00", "--partition", "gpu", "--account", "me"))
    assert directives(text) == {
        "job-name": "My_run.2",
        "nodes": "2",
        "ntasks-per-node": "1",
        "cpus-per-task": "8",
        "gpus-per-node": "8",
        "time": "12:00:00",
        "partition": "gpu",
        "account": "me",
        "output": "My_run.2-%j.out",
        "signal": "TERM@180",
        "chdir": str(tmp_path),
    }
    assert text.startswith("#!/bin/bash\n")
    for limit in ("90", "90:30", "2-12", "2-12:30", "2-00:00:00"):
        assert directives(written(slurm("--nodes", "2", "--time", limit)))["time"] == limit
    on_cpus = directives(written(slurm("--nodes", "4", "--set", "cluster.device=cpu")))
    assert "gpus-per-node" not in on_cpus
    assert "time" not in on_cpus


def test_ray_gets_a_token_and_the_whole_call(slurm: Any, tmp_path: Path) -> None:
    odd = 'data.text_field=it\'s "$HOME"'
    text = written(slurm("--nodes", "2", "--launcher", "ray", "--set", odd))
    calls = run(tmp_path, text, ["ray", "braid"], nodes=1)
    ray, train = (next(call for call in calls if call["name"] == name) for name in ("ray", "braid"))
    port = 20000 + os.getpid() % 20000
    address = f"127.0.0.1:{port}"
    start = ["--address", address, "--min-nodes", "2", "--num-cpus", "8", "--num-gpus", "8", "--"]
    assert ray["words"][:10] == ["symmetric-run", *start]
    config = str(tmp_path / "run.yaml")
    assert train["words"] == ["train", config, "--set", odd, "--address", address, "--resume-if-begun"]
    assert ray["env"]["RAY_AUTH_MODE"] == "token"
    assert len(ray["env"]["RAY_AUTH_TOKEN"]) == 64
    assert ray["env"]["RAY_AUTH_TOKEN"] not in text


@pytest.mark.slow
def test_torchrun_on_two_nodes_trains(here: Path, capsys: Capture) -> None:
    """Both are this machine, each with an agent of torchrun's and one rank."""
    write_corpus(here)
    cluster = {"launcher": "processes", "device": "cpu", "cpus_per_rank": 0.5}
    write_config(here, parallel={"tp": 2}, cluster=cluster)
    text = written(called(capsys, "slurm", "run.yaml", "--nodes", "2", "--set", "train.steps=3"))
    run(here, text, [], nodes=2)
    folder = here / "runs" / "run"
    assert len(read_lines(folder / "metrics.jsonl")) == 3
    hosts = json.loads((folder / "cluster.json").read_text())["processes"]
    assert len(hosts) == 2
    assert len(list((folder / "trace").glob("rank-0000[01].*"))) == 2


REFUSED = {
    "": "Missing option '--nodes'; see braid slurm --help",
    "--nodes 0": "Invalid value for '--nodes': must be greater than or equal to 1",
    "--nodes 3": "--nodes 3 does not divide the layout's 16 ranks evenly; change --nodes",
    "--nodes 2 --gpus-per-node 4": "--gpus-per-node 4 is less than the 8 ranks of a node|need --nodes 4",
    "--nodes 2 --gpus-per-node 8 --set cluster.device=cpu": "--gpus-per-node 8 and cluster.device=cpu",
    "--nodes 2 --launcher slurm": "'slurm' is not one of 'ray', 'torchrun'; see braid slurm --help",
    "--nodes 2 --time '12 hours'": "--time '12 hours' must be a word, as sbatch takes it",
    "--nodes 2 --time tomorrow": "--time tomorrow must be minutes, minutes:seconds|such as 12:00:00",
    "--nodes 2 --time 1-2-3": "--time 1-2-3 must be minutes",
    "--nodes 2 --set cluster.address=auto": "cluster.address='auto': the script starts a cluster of its own",
    "--nodes 2 --set cluster.launcher=ray": "cluster.launcher='ray' does not go with --launcher torchrun",
    "--nodes 2 --launcher ray --set cluster.launcher=processes": "does not go with --launcher ray; leave",
    "--nodes 2 --set parallel=auto": "parallel: auto is decided when a run starts, or by `braid plan`",
    "--nodes 2 --output no/run.sh": "--output no/run.sh: the folder no does not exist",
}


@pytest.mark.parametrize("call", REFUSED)
def test_wrong_calls(slurm: Any, call: str) -> None:
    (line,) = refused(slurm(*shlex.split(call))).splitlines()
    assert all(part in line for part in REFUSED[call].split("|")), line


def test_the_container_file_copies_what_is_there() -> None:
    """No container tool was at hand: that an image is built from it has not been tried."""
    text = (ROOT / "Containerfile").read_text().replace("\\\n", " ")
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    known = {"ARG", "FROM", "RUN", "COPY", "WORKDIR", "USER", "ENTRYPOINT", "CMD"}
    assert {step for step, _ in steps} == known
    copied = [word for step, rest in steps if step == "COPY" for word in rest.split()[:-1]]
    assert all((ROOT / word).exists() for word in copied)
    packages = {link.name for link in (ROOT / "braid").iterdir() if link.is_symlink()}
    assert packages <= set(copied), "every folder that the package links to"
    (user,) = (rest for step, rest in steps if step == "USER")
    assert user not in ("root", "0")
    assert steps.index(["USER", user]) < steps.index(["ENTRYPOINT", '["braid"]'])
    arguments = dict(rest.partition("=")[::2] for step, rest in steps if step == "ARG")
    assert (ROOT / arguments["CONSTRAINTS"]).exists()


def test_the_scripts_of_the_page_can_be_written(here: Path, capsys: Capture) -> None:
    page = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    (line,) = (line for line in page.splitlines() if line.startswith("$ braid slurm"))
    write_first(here)
    assert called(capsys, *shlex.split(line)[2:], "--launcher", "ray").code == 0
    assert "--nproc-per-node" not in (here / "first.sh").read_text()
    written(called(capsys, *shlex.split(line)[2:]))
    assert "--nnodes 2 --nproc-per-node 1" in (here / "first.sh").read_text()
